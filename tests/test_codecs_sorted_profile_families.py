"""Fits against scipy's own, and bins against an integral of the cube root of the density."""

from __future__ import annotations

import numpy as np
import pytest
from oracles_sorted_profile import cube_root_edges
from scipy import stats

from hf_kvq.codecs.sorted_profile_families import FAMILIES, LEAST_DEGREES, Profile, fit_profile, parameters_of


def samples(family, *shapes, size=3000, seed=0):
    return np.sort(getattr(stats, family).rvs(*shapes, size=size, random_state=seed))


@pytest.mark.parametrize(
    ("family", "shapes", "fixed"),
    [
        ("norm", (), {}),
        ("laplace", (), {}),
        ("gamma", (0.3,), {"floc": 0}),
        ("gamma", (40.0,), {"floc": 0}),
        ("lognorm", (0.7,), {"floc": 0}),
    ],
)
def test_a_fit_is_the_maximum_of_the_likelihood_that_scipy_finds(family, shapes, fixed):
    x = 5 * samples(family, *shapes)
    expected = getattr(stats, family).fit(x, **fixed)
    assert fit_profile(x, family).parameters == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [300, 20_000])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_a_t_fits_at_any_magnitude_and_about_as_well_as_over_all_elements(size, magnitude):
    x = samples("t", 5.0, size=size)
    profile = fit_profile(x * magnitude, "t")
    degrees, loc, scale = profile.parameters
    best = stats.t.logpdf(x, *stats.t.fit(x, 5.0)).sum()
    assert stats.t.logpdf(x, degrees, loc / magnitude, scale / magnitude).sum() > best - 2


def test_a_t_keeps_a_finite_variance():
    profile = fit_profile(samples("cauchy"), "t")
    assert profile.family == "t"
    assert profile.parameters[0] == LEAST_DEGREES


@pytest.mark.parametrize("bits", [1, 3, 6])
@pytest.mark.parametrize(
    ("family", "shapes", "grid"),
    [
        ("norm", (), np.linspace(-20, 20, 400_001)),
        ("laplace", (), np.linspace(-90, 90, 400_001)),
        ("t", (12.0,), np.sinh(np.linspace(-14, 14, 400_001))),
        ("gamma", (3.0,), np.linspace(0, 120, 400_001)),
        ("gamma", (0.5,), np.linspace(0, 12, 400_001) ** 3),
        ("lognorm", (0.5,), np.exp(np.linspace(-8, 12, 400_001))),
    ],
)
def test_bins_are_as_dense_as_the_cube_root_of_the_density(family, shapes, grid, bits):
    density = getattr(stats, family)
    expected = cube_root_edges(lambda x: np.nan_to_num(density.pdf(x, *shapes), posinf=0.0), grid, bits)
    profile = Profile(family, (*shapes, 7.0, 3.0))  # neither location nor scale matters
    np.testing.assert_allclose(profile.coded_below(bits), expected, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_elements_are_scipys_quantiles(family):
    parameters = (*[3.0] * (parameters_of(family) - 2), 1.5, 2.5)
    expected = [getattr(stats, family).ppf((rank + 0.5) / 37, *parameters) for rank in range(37)]
    np.testing.assert_allclose(Profile(family, parameters).expected(37), expected, rtol=1e-12)


def test_expected_elements_stay_within_float32():
    expected = Profile("lognorm", (80.0, 0.0, 1e30)).expected(1000)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert expected[-1] == np.finfo(np.float32).max


@pytest.mark.parametrize("family", ["gamma", "lognorm"])
def test_elements_too_close_to_tell_apart_are_taken_as_normal_or_fitted(family):
    x = np.array([1.0] * 50 + [np.nextafter(np.float32(1), np.float32(2))])
    profile = fit_profile(x, family)
    assert np.abs(profile.expected(51) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("norm", (0.0,)),
        ("norm", (0.0, 1.0, 1.0)),
        ("norm", (0.0, -1.0)),
        ("norm", (float("nan"), 1.0)),
        ("t", (0.0, 0.0, 1.0)),
        ("gamma", (-1.0, 0.0, 1.0)),
        ("lognorm", (float("inf"), 0.0, 1.0)),
        ("uniform", (0.0, 1.0)),
    ],
)
def test_parameters_that_make_no_distribution_are_refused(family, parameters):
    with pytest.raises(ValueError, match=r"parameters|positive|must be one of"):
        Profile(family, parameters)


@pytest.mark.parametrize("family", ["t", "gamma", "lognorm"])
@pytest.mark.parametrize("shape", [5e-324, 1e-300, 1e300])
@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (1e308, 1e308), (-1e308, 5e-324)])
def test_parameters_at_the_edge_of_float64_give_finite_elements_or_raise(family, shape, loc, scale):
    try:
        expected = Profile(family, (shape, loc, scale)).expected(5)
    except ValueError as error:
        assert "no quantiles" in str(error)  # noqa: PT017
    else:
        assert np.isfinite(expected.astype(np.float32)).all()
