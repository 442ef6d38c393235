"""The two receipts by which the seed's document accepts its module, on real states; figures are printed (`pytest -m slow -s`).

The first one holds. The second asks whether a bank's misfit lines up with the error of plain 8-bit codes. It does for fp8, whose error
follows the size of an element. It does not for int8: one scale for the whole tensor makes the error of every token the same rounding
noise, whatever the token is, and there is nothing for a misfit to line up with.
"""

from __future__ import annotations

import functools

import pytest
import torch
from real_models import smollm2_for_tests, wikitext
from scipy.stats import spearmanr
from transformers import DynamicCache

from hf_kvq import quantization_error_per_token, quantize_kv_cache
from hf_kvq.evaluation import EvalConfig, evaluate_model
from hf_kvq.evaluation.data import text_in_memory
from hf_kvq.evaluation.models import forward
from hf_kvq.far_field.bank import ClusterBank

pytestmark = pytest.mark.slow

LAYERS = (3, 10, 15, 20, 29)
TOKENS, CHUNK, CLUSTERS = 2048, 64, 16


@functools.cache
def perplexities():
    config = EvalConfig(schemes=("seed_int8", "seed_fp8"), window=512, count=2, noise_floor_tokens=0, timed_tokens=0)
    receipts = evaluate_model(smollm2_for_tests(), text_in_memory(wikitext(), name="wikitext-2-raw"), config)
    return {receipt.name: receipt.results for receipt in receipts}


@pytest.mark.parametrize(("scheme", "most_percent"), [("seed_int8", 1.5), ("seed_fp8", 2.0)])
def test_eight_bits_for_the_near_field_cost_little_perplexity(scheme, most_percent, shown):
    found = perplexities()[scheme]
    shown(
        f"{scheme}, 2 windows of 512: perplexity {found.exact_perplexity:.3f} -> {found.perplexity:.3f} "
        f"({found.delta_perplexity:+.3f}, {found.delta_percent:+.2f} %), KL {found.kl_mean:.2e}, "
        f"{found.bits_per_element:.2f} bits an element"
    )
    assert found.delta_percent < most_percent
    # Every token was read as codes, and that is felt.
    assert found.tokens_coded == 512 * 30
    assert 1e-3 < found.kl_mean < 2e-2


@functools.cache
def real_states():
    """Keys and values of some layers, `[kv_heads, tokens, channels]`."""
    loaded = smollm2_for_tests()
    ids = loaded.tokenizer(wikitext()[:12_000], return_tensors="pt")["input_ids"][:, :TOKENS]
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        forward(loaded.model, ids, cache)
    return {layer: (cache.layers[layer].keys[0].clone(), cache.layers[layer].values[0].clone()) for layer in LAYERS}


@functools.cache
def misfits(layer):
    """The bank's residual of every token, and the cluster that it went to; the chunk that founds the first cluster is left out."""
    keys, values = (states[None] for states in real_states()[layer])
    bank = ClusterBank(CLUSTERS, batch=1)
    residual, assignments = [], []
    for first in range(0, TOKENS, CHUNK):
        part = slice(first, first + CHUNK)
        positions = torch.arange(first, first + CHUNK).expand(1, keys.shape[1], -1)
        real = torch.ones_like(positions, dtype=torch.bool)
        receipt = bank.absorb(torch.tensor([0]), keys[:, :, part], values[:, :, part], positions, real)
        residual.append(receipt["residual"][0])
        # Numbered through, since a cluster of one chunk and of the next are two figures of misfit.
        assignments.append(receipt["assignments"][0] + first)
    return torch.cat(residual[1:], dim=1), torch.cat(assignments[1:], dim=1)


def rank_correlations(layer, which, mode):
    """Spearman's rho and p of residual against error: token by token over all heads, and cluster by cluster of every chunk and head."""
    states = real_states()[layer][which]
    residual, assignments = misfits(layer)
    by_token = spearmanr(residual.mean(dim=0), quantization_error_per_token(states.transpose(0, 1), mode=mode)[CHUNK:])
    misfit, error = [], []
    for head in range(len(states)):
        errors = quantization_error_per_token(states[head], mode=mode)[CHUNK:]
        for cluster in assignments[head].unique():
            members = assignments[head] == cluster
            misfit.append(residual[head, members].mean().item())
            error.append(errors[members].mean().item())
    # Each head has a scale of its own, so this figure also ranks heads; it is printed, and nothing rests on it.
    by_cluster = spearmanr(misfit, error)
    return by_token, by_cluster, len(misfit)


def printed(layer, which, mode, shown):
    by_token, by_cluster, clusters = rank_correlations(layer, which, mode)
    shown(
        f"layer {layer}, {('keys', 'values')[which]}, {mode}: rank correlation of the bank's residual with the error per token "
        f"{by_token.statistic:+.3f} (p {by_token.pvalue:.1e}, {TOKENS - CHUNK} tokens), of misfit with error per cluster "
        f"{by_cluster.statistic:+.3f} (p {by_cluster.pvalue:.1e}, {clusters} clusters)"
    )
    return by_token, by_cluster


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("layer", LAYERS)
def test_where_fp8_errs_most_the_bank_fits_worst(layer, which, shown):
    by_token, _ = printed(layer, which, "fp8", shown)
    assert by_token.statistic > 0.1
    assert by_token.pvalue < 1e-6


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_error_of_int8_does_not_follow_the_bank(layer, which, shown):
    by_token, _ = printed(layer, which, "int8", shown)
    assert abs(by_token.statistic) < 0.1


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_error_of_int8_is_the_same_rounding_noise_for_every_token(layer, which):
    states = real_states()[layer][which].transpose(0, 1)
    error = quantization_error_per_token(states)
    step = quantize_kv_cache(states).scale
    # The mean of |e| for e uniform within half a step, and its spread over the elements of one token: nothing of the token is in it.
    assert error.mean().item() == pytest.approx(step / 4, rel=0.01)
    assert (error.std() / error.mean()).item() == pytest.approx((3 * states[0].numel()) ** -0.5, rel=0.1)
