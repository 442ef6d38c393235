"""Sorted profiles: what is kept, what comes back, when the encoding is dense, and what counts as unusual."""

from __future__ import annotations

from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracles import ODD_SHAPES, states
from oracles_sorted_profile import SQUARED_ERROR_AT_BITS, ks_distance, normal_profile, normal_rank_codes
from scipy import stats

from hf_kvq.codecs.sorted_profile import (
    SortedProfileEncoding,
    detect_anomaly,
    fit_sorted_profile,
    lilliefors_threshold,
    reconstruct,
)
from hf_kvq.codecs.sorted_profile_families import FAMILIES

NEVER_DENSE = 1.0
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def squared_error(x, decoded):
    return float(((decoded.astype(float) - x) ** 2).sum() / ((x.astype(float) - x.mean()) ** 2).sum())


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("elements", [1, 2, 37, 128, 129, 257])
def test_exact_ranks_give_the_normal_quantiles_of_the_slow_reference(elements, top_k):
    x = 3 + 2 * normal(elements)
    top_k = min(top_k, elements)
    decoded = reconstruct(fit_sorted_profile(x, top_k, gof_threshold=NEVER_DENSE))
    np.testing.assert_allclose(decoded, normal_profile([float(value) for value in x], top_k), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("elements", [1, 2, 37, 128, 129])
def test_rank_codes_give_the_bin_means_of_the_slow_reference(elements, bits):
    x = 3 + 2 * normal(elements)
    decoded = reconstruct(fit_sorted_profile(x, gof_threshold=NEVER_DENSE, rank_bits=bits))
    np.testing.assert_allclose(decoded, normal_rank_codes([float(value) for value in x], bits), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rank_codes_reach_the_measured_error_on_normal_elements(bits):
    x = normal(128, 64)
    target = SQUARED_ERROR_AT_BITS[bits]
    encoding = fit_sorted_profile(x, rank_bits=bits)
    assert 0.85 * target < squared_error(x, reconstruct(encoding)) <= target
    assert bits < encoding.bits_per_element < bits + 0.06


@pytest.mark.parametrize(("bits", "gain"), [(2, 1.08), (3, 1.4), (4, 2.0)])
def test_rank_codes_beat_bins_that_hold_the_same_number_of_ranks(bits, gain):
    x = np.sort(normal(8192))
    rows = x.reshape(2**bits, -1)
    equal = np.broadcast_to(rows.mean(axis=1, keepdims=True), rows.shape).reshape(-1)
    decoded = reconstruct(fit_sorted_profile(x, rank_bits=bits))
    assert squared_error(x, decoded) * gain < squared_error(x, equal)


@pytest.mark.parametrize("family", FAMILIES)
def test_rank_codes_with_a_bin_for_every_rank_equal_exact_ranks(family):
    x = np.exp(normal(37))
    exact = reconstruct(fit_sorted_profile(x, 2, family, NEVER_DENSE))
    codes = fit_sorted_profile(x, 2, family, NEVER_DENSE, rank_bits=16)
    np.testing.assert_allclose(reconstruct(codes), exact, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank_bits", [None, 4])
def test_each_family_codes_its_own_samples_best(family, rank_bits):
    parameters = {"norm": (), "laplace": (), "t": (4,), "gamma": (0.4,), "lognorm": (1.0,)}
    x = getattr(stats, family).rvs(*parameters[family], size=4000, random_state=1).astype(np.float32)
    error = {
        other: squared_error(x, reconstruct(fit_sorted_profile(x, 0, other, NEVER_DENSE, rank_bits=rank_bits)))
        for other in ("norm", "laplace", "gamma", "lognorm", family)
    }
    # A t holds a normal as its limit; a search stops a little short of it.
    assert error[family] <= min(error.values()) * 1.01
    assert fit_sorted_profile(x, 0, family).is_dense is False


@pytest.mark.parametrize("rank_bits", [None, 3])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 5), (7, 5), *ODD_SHAPES[:3]])
def test_shape_comes_back_as_float32(shape, rank_bits):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoding = fit_sorted_profile(x, 1, gof_threshold=NEVER_DENSE, rank_bits=rank_bits)
    decoded = reconstruct(encoding)
    assert (decoded.shape, decoded.dtype, encoding.shape) == (shape, np.float32, shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_torch_and_numpy_of_any_float_dtype_give_the_same_encoding(dtype):
    x = states(3, 2, 9, 16, dtype=dtype)
    expected = fit_sorted_profile(x.float().numpy(), 3, gof_threshold=NEVER_DENSE).to_bytes()
    assert fit_sorted_profile(x, 3, gof_threshold=NEVER_DENSE).to_bytes() == expected
    strided = x.requires_grad_().transpose(1, 3).contiguous().transpose(1, 3)
    assert fit_sorted_profile(strided, 3, gof_threshold=NEVER_DENSE).to_bytes() == expected


def test_numpy_of_half_precision_is_read_as_float32():
    x = normal(50).astype(np.float16)
    expected = fit_sorted_profile(x.astype(np.float32)).to_bytes()
    assert fit_sorted_profile(x).to_bytes() == expected


@pytest.mark.parametrize("rank_bits", [None, 2])
@pytest.mark.parametrize("top_k", [1, 4, 40])
def test_head_is_the_largest_magnitudes_and_exact(top_k, rank_bits):
    x = normal(8, 5)
    x[3, 2], x[6, 0] = -91.125, 90.0
    encoding = fit_sorted_profile(x, top_k, gof_threshold=NEVER_DENSE, rank_bits=rank_bits)
    decoded, flat = reconstruct(encoding), x.reshape(-1)
    largest = sorted(range(40), key=lambda index: -abs(flat[index]))[:top_k]
    assert sorted(largest) == encoding.head_indices.tolist()
    assert np.array_equal(decoded.reshape(-1)[largest], flat[largest])
    if top_k == 4:
        assert np.abs(np.delete(decoded, largest)).max() < 4


def test_of_equal_magnitudes_the_first_are_the_head():
    x = np.array([1, -2, 2, 0.5, 2, -2], np.float32)
    assert fit_sorted_profile(x, 3, gof_threshold=NEVER_DENSE).head_indices.tolist() == [1, 2, 4]


def test_a_head_larger_than_the_tensor_is_all_of_it():
    x = normal(6)
    encoding = fit_sorted_profile(x, 100)
    assert (encoding.top_k, encoding.tail_elements, encoding.is_dense) == (6, 0, False)
    assert np.array_equal(reconstruct(encoding), x)


@pytest.mark.parametrize(("elements", "dtype"), [(1, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_ranks_are_of_the_smallest_unsigned_type(elements, dtype):
    encoding = fit_sorted_profile(normal(elements), gof_threshold=NEVER_DENSE)
    assert encoding.codes.dtype == dtype
    assert len(encoding.codes) == elements


def test_equal_elements_rank_in_their_order():
    x = np.array([1, 0, 1, 0, 1], np.float32)
    assert fit_sorted_profile(x, gof_threshold=NEVER_DENSE).codes.tolist() == [2, 0, 3, 1, 4]


@pytest.mark.parametrize("rank_bits", [None, 1, 8])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("constant", [0.0, -2.5, 3e38, 1e-45])
def test_equal_elements_come_back_exactly(constant, family, rank_bits):
    x = np.full((3, 7), constant, np.float32)
    encoding = fit_sorted_profile(x, 2, family, rank_bits=rank_bits)
    assert np.array_equal(reconstruct(encoding), x)
    assert (encoding.ks_statistic, encoding.profile.scale, encoding.is_dense) == (0, 0, False)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("steps", [2, 1000])  # 2: many equal elements
@pytest.mark.parametrize("elements", [3, 9, 130])
def test_statistic_is_the_slow_references(elements, steps, sign):
    x = sign * (np.round(steps * np.exp(normal(elements))) / steps).astype(np.float32)
    numbers = [float(value) for value in x]
    expected = ks_distance(numbers, NormalDist(fmean(numbers), pstdev(numbers)).cdf)
    assert fit_sorted_profile(x).ks_statistic == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rank_bits", [None, 4])
def test_above_the_threshold_every_element_is_kept(rank_bits):
    x = np.sign(normal(40, 10)) + 0.1 * normal(40, 10, seed=1)
    encoding = fit_sorted_profile(x, 3, rank_bits=rank_bits)
    assert encoding.is_dense
    assert encoding.ks_statistic > encoding.ks_threshold == 0.05
    assert np.array_equal(reconstruct(encoding), x)
    assert 32 < encoding.bits_per_element < 34
    assert not fit_sorted_profile(x, 3, gof_threshold=encoding.ks_statistic, rank_bits=rank_bits).is_dense


def test_a_dense_encoding_keeps_no_part_of_the_callers_memory():
    x = np.sign(normal(40))
    before, encoding = x.copy(), fit_sorted_profile(x)
    x[:] = 7
    assert np.array_equal(reconstruct(encoding), before)
    reconstruct(encoding)[:] = 9
    assert np.array_equal(reconstruct(encoding), before)


@pytest.mark.parametrize("elements", [20, 64, 500])
def test_lilliefors_gate_passes_95_percent_of_normal_samples(elements):
    rng = np.random.default_rng(elements)
    samples = rng.standard_normal((1000, elements)).astype(np.float32)
    dense = sum(fit_sorted_profile(sample, gate="lilliefors").is_dense for sample in samples)
    # 1,000 draws at 5 %: 3.5 standard deviations are 24; the variance's divisor moves small samples a little.
    assert 50 - 26 < dense < 50 + 26


@pytest.mark.parametrize("elements", [31, 64, 1000, 10**6])
def test_lilliefors_threshold_is_near_the_first_published_one(elements):
    assert lilliefors_threshold(elements) == pytest.approx(0.886 / elements**0.5, rel=0.02)


def test_seed_gate_refuses_small_normal_groups_that_lilliefors_passes():
    x = normal(100, 64)
    assert sum(fit_sorted_profile(row).is_dense for row in x) > 60
    assert sum(fit_sorted_profile(row, gate="lilliefors").is_dense for row in x) < 15


@pytest.mark.parametrize("family", ["gamma", "lognorm"])
def test_a_family_that_cannot_hold_the_elements_gives_way_to_the_normal(family):
    x = np.abs(normal(500)) + 0.1
    assert fit_sorted_profile(x, 0, family).family == family
    for least in (0.0, -0.5):
        x[77] = least
        encoding = fit_sorted_profile(x, 0, family, NEVER_DENSE)
        assert (encoding.family, encoding.requested_family) == ("norm", family)
        assert reconstruct(encoding).tolist() == reconstruct(fit_sorted_profile(x, 0, None, NEVER_DENSE)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_scipys_distribution_is_its_name(family):
    x = np.exp(normal(60))
    by_name = fit_sorted_profile(x, 0, family, NEVER_DENSE)
    assert by_name.family == family
    assert fit_sorted_profile(x, 0, getattr(stats, family), NEVER_DENSE).to_bytes() == by_name.to_bytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wrap", [torch.from_numpy, np.asarray])
def test_elements_that_are_not_finite_are_counted_and_named(bad, wrap):
    x = normal(3, 4)
    x[1, 2] = x[2, 0] = bad
    with pytest.raises(ValueError, match=r"2 of 12 elements are not, the first at \(1, 2\)"):
        fit_sorted_profile(wrap(x))


def test_an_element_beyond_float32_is_refused():
    with pytest.raises(ValueError, match="finite in float32"):
        fit_sorted_profile(np.array([1.0, 1e39]))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
@pytest.mark.parametrize("library", [torch, np])
def test_dtypes_without_a_point_are_refused_by_name(library, dtype):
    x = library.ones((3, 2), dtype=getattr(library, dtype))
    with pytest.raises(ValueError, match=f"floating-point dtype, got .*{dtype}"):
        fit_sorted_profile(x)
    with pytest.raises(ValueError, match=f"floating-point dtype, got .*{dtype}"):
        detect_anomaly(x, fit_sorted_profile(normal(5)))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"rank_bits": 0}, "rank_bits must be 1 to 16, or None for exact ranks, got 0"),
        ({"rank_bits": 17}, "got 17"),
        ({"tail_family": "cauchy"}, "norm, laplace, t, gamma, lognorm, got 'cauchy'"),
        ({"tail_family": stats.expon}, "got 'expon'"),
        ({"tail_family": 3}, "got '3'"),
        ({"gof_threshold": 1.5}, "within 0 and 1"),
        ({"gof_threshold": float("nan")}, "within 0 and 1"),
        ({"gate": "ks"}, "'seed' or 'lilliefors', got 'ks'"),
        ({"gate": "lilliefors", "gof_threshold": 0.1}, "sets the threshold itself"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_sorted_profile(normal(5), **arguments)


@settings(deadline=None)
@given(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9), elements=FINITE),
    st.integers(0, 4),
    st.sampled_from(FAMILIES),
    st.sampled_from([None, 1, 3, 8, 13]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_any_finite_tensor_survives_fit_bytes_and_reconstruction(x, top_k, family, rank_bits, threshold):
    encoding = fit_sorted_profile(x, top_k, family, threshold, rank_bits=rank_bits)
    decoded = reconstruct(encoding)
    assert decoded.shape == x.shape
    assert np.isfinite(decoded).all()
    if encoding.is_dense:
        assert np.array_equal(decoded, x)
    data = encoding.to_bytes()
    assert len(data) == encoding.nbytes
    again = SortedProfileEncoding.from_bytes(data)
    assert np.array_equal(reconstruct(again), decoded)
    assert again.to_bytes() == data


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_tensor_is_no_anomaly_to_its_own_profile(family, top_k):
    for x in (np.exp(normal(200)), np.sign(normal(50)), np.full(9, 2.0, np.float32)):
        encoding = fit_sorted_profile(x, top_k, family)
        found = detect_anomaly(x, encoding)
        assert found.statistic == pytest.approx(encoding.ks_statistic)
        assert not found.is_anomaly


@pytest.mark.parametrize("significance", [0.01, 0.2])
def test_false_alarms_stay_within_their_share(significance):
    encodings = [fit_sorted_profile(normal(400, seed=seed), gof_threshold=NEVER_DENSE) for seed in range(300)]
    alarms = [
        detect_anomaly(normal(200, seed=1000 + seed), encoding, significance=significance).is_anomaly
        for seed, encoding in enumerate(encodings)
    ]
    assert sum(alarms) <= significance * 300


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x * 2, lambda x: np.abs(x), lambda x: x * 0])
@pytest.mark.parametrize("rank_bits", [None, 3])
def test_another_distribution_is_an_anomaly(change, rank_bits):
    encoding = fit_sorted_profile(normal(1000), rank_bits=rank_bits, gate="lilliefors")
    assert not detect_anomaly(normal(500, seed=1), encoding).is_anomaly
    found = detect_anomaly(torch.from_numpy(change(normal(500, seed=1))), encoding)
    assert found.is_anomaly
    assert found.statistic > found.threshold


def test_elements_outside_the_tail_are_listed_and_do_not_decide():
    x = normal(30, 40, seed=1)
    x[2, 3], x[29, 39] = 9.0, -11.0
    found = detect_anomaly(x, fit_sorted_profile(normal(1000)))
    assert found.outside.tolist() == [2 * 40 + 3, 29 * 40 + 39]
    assert not found.is_anomaly


def test_elements_beside_a_constant_profile_are_outside():
    encoding = fit_sorted_profile(np.full(500, 2.0, np.float32))
    found = detect_anomaly(np.array([2, 2, 1, 2, 3, 3], np.float32), encoding)
    assert found.outside.tolist() == [2, 4, 5]
    assert found.statistic == pytest.approx(2 / 6)


def test_smaller_significance_needs_more():
    encoding = fit_sorted_profile(normal(1000))
    strict, loose = (detect_anomaly(normal(50), encoding, significance=share) for share in (0.001, 0.1))
    assert strict.statistic == loose.statistic
    assert strict.threshold > loose.threshold


@pytest.mark.parametrize("significance", [0.0, 1.0, -1.0])
def test_a_share_of_false_alarms_must_be_one(significance):
    with pytest.raises(ValueError, match="significance must be above 0"):
        detect_anomaly(normal(5), fit_sorted_profile(normal(5)), significance=significance)


@pytest.mark.parametrize(("new", "old"), [(0, 5), (5, 0)])
def test_there_must_be_something_to_compare(new, old):
    with pytest.raises(ValueError, match=f"have {new} and {old} elements"):
        detect_anomaly(normal(new), fit_sorted_profile(normal(old)))
