"""Divergence of logits, against its definition in Python's float64."""

from __future__ import annotations

import math

import oracles_evaluation as oracle
import pytest
import torch

from hf_kvq.evaluation.divergence import compare_logits


def logits(positions: int, *, seed: int = 0, vocabulary: int = 53) -> torch.Tensor:
    return 4 * torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", [1, 37, 64, 65, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_position_agrees_with_the_definition(positions, dtype):
    exact = logits(positions).to(dtype)
    coded = (exact + 0.1 * logits(positions, seed=1)).to(dtype)
    targets = torch.arange(positions) % 53
    found = compare_logits(exact, coded, targets)
    assert found.exact_nll.tolist() == pytest.approx(oracle.nll(exact, targets), abs=1e-12)
    assert found.coded_nll.tolist() == pytest.approx(oracle.nll(coded, targets), abs=1e-12)
    assert found.kl.tolist() == pytest.approx(oracle.kl(exact, coded), abs=1e-12)
    assert found.same_top1.tolist() == [
        max(range(53), key=a.tolist().__getitem__) == max(range(53), key=b.tolist().__getitem__)
        for a, b in zip(exact, coded, strict=True)
    ]


def test_the_divergence_is_from_exact_to_coded_and_not_the_other_way():
    exact, coded = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(9.0), 0.0]])
    kl = compare_logits(exact, coded, torch.tensor([0])).kl.item()
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-7)


def test_equal_logits_have_no_divergence():
    exact = logits(5)
    found = compare_logits(exact, exact.clone(), torch.zeros(5, dtype=torch.long))
    assert found.kl.abs().max() == 0
    assert found.same_top1.all()


def test_a_divergence_below_the_rounding_of_float32_is_seen():
    exact = logits(37)
    coded = exact + 1e-5 * logits(37, seed=1)
    kl = compare_logits(exact, coded, torch.zeros(37, dtype=torch.long)).kl
    assert 1e-11 < kl.mean() < 1e-8
    assert kl.min() >= 0
    assert kl.tolist() == pytest.approx(oracle.kl(exact, coded), rel=1e-4, abs=1e-14)


def test_a_word_that_both_rule_out_adds_nothing():
    exact, coded = logits(3), logits(3, seed=1)
    exact[:, 7] = coded[:, 7] = -torch.inf
    keep = [index for index in range(53) if index != 7]
    found = compare_logits(exact, coded, torch.zeros(3, dtype=torch.long))
    assert found.kl.tolist() == pytest.approx(oracle.kl(exact[:, keep], coded[:, keep]), abs=1e-12)


def test_a_broken_logit_is_not_hidden():
    exact, coded = logits(3), logits(3, seed=1)
    coded[1, 4] = torch.nan
    assert compare_logits(exact, coded, torch.zeros(3, dtype=torch.long)).kl.isnan().tolist() == [False, True, False]
