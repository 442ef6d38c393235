"""Families that a sorted profile can follow: how each is fitted, what it expects of a rank, and how densely it is coded.

Sources: scipy.stats for the distributions; for the bins of `coded_below`, Panter and Dite (1951): the density of code points that makes
the squared error smallest is proportional to f^(1/3), where f is the density of the data. For every family here f^(1/3) is, scaled to
integrate to one, a member of the same family, so that nothing is integrated numerically.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray as Array
from scipy import special, stats

__all__ = ["FAMILIES", "Profile", "family_name", "fit_profile", "middles", "parameters_of"]

Sorted = Float[Array, " elements"]
Probabilities = Float[Array, " probabilities"]

FIT_SAMPLE = 4096
"""Evenly spaced order statistics that stand for all elements where a fit is a search."""

LEAST_DEGREES = 2.5
"""Of freedom of a fitted t: at 2 and below it has no variance, and a squared error means nothing."""


@dataclass(frozen=True)
class Profile:
    """A fitted family.

    Attributes:
        family: A name of `FAMILIES`.
        parameters: As scipy orders them: shapes, location, scale. A scale of 0 stands for elements that are all equal.
    """

    family: str
    parameters: tuple[float, ...]

    def __post_init__(self) -> None:
        count = parameters_of(self.family)
        if len(self.parameters) != count or not all(math.isfinite(value) for value in self.parameters):
            raise ValueError(f"{self.family} has {count} finite parameters, got {self.parameters}")
        if self.scale < 0 or any(shape <= 0 for shape in self._shapes):
            raise ValueError(f"shapes must be positive and the scale at least 0, got {self.parameters}")

    @property
    def loc(self) -> float:
        """The location."""
        return self.parameters[-2]

    @property
    def scale(self) -> float:
        """The scale."""
        return self.parameters[-1]

    @property
    def _shapes(self) -> tuple[float, ...]:
        return self.parameters[:-2]

    def expected(self, elements: int) -> Float[Array, " elements"]:
        """What the family expects at each rank: its quantile at (rank + 1/2) / elements, within float32's range."""
        largest = float(np.finfo(np.float32).max)
        if self.scale == 0:
            return np.full(elements, self.loc).clip(-largest, largest)
        with np.errstate(all="ignore"):  # overflow is clipped, and what is no number raises
            values = self.loc + self.scale * _family(self.family).distribution.ppf(middles(elements), *self._shapes)
        if np.isnan(values).any():
            raise ValueError(f"{self.family} has no quantiles for the parameters {self.parameters}")
        return values.clip(-largest, largest)

    def tails(self, values: Float[Array, " elements"]) -> tuple[Float[Array, " elements"], Float[Array, " elements"]]:
        """Probability of an element at most, and at least, as large as each of `values`."""
        if self.scale == 0:
            return (values >= self.loc).astype(float), (values <= self.loc).astype(float)
        with np.errstate(over="ignore"):  # a scale far below the distance of a value: that is infinitely far
            standard = (values - self.loc) / self.scale
        distribution = _family(self.family).distribution
        return distribution.cdf(standard, *self._shapes), distribution.sf(standard, *self._shapes)

    def ks_distance(self, ascending: Sorted) -> float:
        """Kolmogorov-Smirnov statistic: the largest distance of the elements' own distribution from the family's."""
        count = len(ascending)
        if count == 0:
            return 0.0
        if self.scale == 0:  # one step at `loc`: the distance is taken on either side of it
            return max(float((ascending < self.loc).mean()), float((ascending > self.loc).mean()))
        below, _ = self.tails(ascending)
        ranks = np.arange(count)
        return float(max(((ranks + 1) / count - below).max(), (below - ranks / count).max()))

    def coded_below(self, bits: int) -> Float[Array, " inner_edges"]:
        """Inner edges of 2^bits bins, as the share of elements below each, where the density of bins follows f^(1/3)."""
        return _family(self.family).edges(np.arange(1, 2**bits) / 2**bits, *self._shapes)


def family_name(family: str | stats.rv_continuous | None) -> str:
    """The name of a family given by its name, as scipy's distribution, or as None, the normal.

    Raises:
        ValueError: If it is none of `FAMILIES`.
    """
    name = "norm" if family is None else str(getattr(family, "name", family))
    if name not in FAMILIES:
        raise ValueError(f"tail_family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return name


def parameters_of(family: str) -> int:
    """Number of parameters of a family: its shapes, location and scale."""
    return _family(family).shapes + 2


def fit_profile(ascending: Sorted, family: str) -> Profile:
    """Fit a family by maximum likelihood; the normal where `family` has no fit (support, no spread, no optimum)."""
    if len(ascending) == 0 or ascending[0] == ascending[-1]:
        return Profile("norm", (float(ascending[0]) if len(ascending) else 0.0, 0.0))
    known = _family(family)
    if ascending[0] > 0 or not known.positive:
        parameters = known.fit(ascending)
        if parameters is not None and all(math.isfinite(value) for value in parameters):
            *shapes, _, scale = parameters
            if min(scale, *shapes, math.inf) > 0:
                return Profile(family, tuple(float(value) for value in parameters))
    return Profile("norm", _fit_norm(ascending))


@dataclass(frozen=True, kw_only=True)
class _Family:
    """One distribution of scipy.

    Attributes:
        fit: Parameters for elements that are not all equal, in ascending order; None where there are none.
        edges: Given probabilities p and the shapes: the share of elements below the p-quantile of the member that f^(1/3) is.
        shapes: Number of shape parameters.
        positive: Whether it holds positive elements only.
    """

    distribution: Any
    fit: Callable[[Array], tuple[float, ...] | None]
    edges: Callable[..., Array]
    shapes: int = field(default=0)
    positive: bool = False


def _fit_norm(x: Sorted) -> tuple[float, ...]:
    return float(x.mean()), float(x.std())


def _fit_laplace(x: Sorted) -> tuple[float, ...]:
    median = float(np.median(x))
    return median, float(np.abs(x - median).mean())


def _fit_t(x: Sorted) -> tuple[float, ...] | None:
    sample = x if len(x) <= FIT_SAMPLE else x[(middles(FIT_SAMPLE) * len(x)).astype(np.intp)]
    # The search compares absolute steps, so that it needs elements of about 1.
    loc, scale = float(sample.mean()), float(sample.std())
    if scale == 0:
        return None
    standard = (sample - loc) / scale
    with np.errstate(all="ignore"):
        try:
            degrees, shift, stretch = stats.t.fit(standard, 5.0, loc=0.0, scale=1.0)
            if degrees < LEAST_DEGREES:
                degrees, shift, stretch = stats.t.fit(standard, fdf=LEAST_DEGREES, loc=shift, scale=1.0)
        except stats.FitError:
            return None
    return degrees, loc + shift * scale, stretch * scale


def _fit_gamma(x: Sorted) -> tuple[float, ...] | None:
    """Minka's generalized Newton steps (Estimating a Gamma distribution, 2002): four reach float64's precision."""
    mean, mean_log = float(x.mean()), float(np.log(x).mean())
    gap = math.log(mean) - mean_log
    if gap <= 0:  # elements so close together that rounding hides their spread
        return None
    shape = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    for _ in range(6):
        step = mean_log - math.log(mean) + math.log(shape) - float(special.digamma(shape))
        shape = 1 / (1 / shape + step / (shape**2 * (1 / shape - float(special.polygamma(1, shape)))))
    return shape, 0.0, mean / shape


def _fit_lognorm(x: Sorted) -> tuple[float, ...]:
    logs = np.log(x)
    return float(logs.std()), 0.0, float(np.exp(logs.mean()))


def _edges_t(p: Probabilities, degrees: float) -> Probabilities:
    fewer = (degrees - 2) / 3
    return stats.t.cdf(stats.t.ppf(p, fewer) * math.sqrt(degrees / fewer), degrees)


_FAMILIES: dict[str, _Family] = {
    "norm": _Family(
        distribution=stats.norm, fit=_fit_norm, edges=lambda p: special.ndtr(math.sqrt(3) * special.ndtri(p))
    ),
    "laplace": _Family(
        distribution=stats.laplace, fit=_fit_laplace, edges=lambda p: stats.laplace.cdf(3 * stats.laplace.ppf(p))
    ),
    "t": _Family(distribution=stats.t, fit=_fit_t, edges=_edges_t, shapes=1),
    "gamma": _Family(
        distribution=stats.gamma,
        fit=_fit_gamma,
        edges=lambda p, shape: stats.gamma.cdf(3 * stats.gamma.ppf(p, (shape + 2) / 3), shape),
        shapes=1,
        positive=True,
    ),
    "lognorm": _Family(
        distribution=stats.lognorm,
        fit=_fit_lognorm,
        edges=lambda p, sigma: special.ndtr(math.sqrt(3) * special.ndtri(p) + 2 * sigma),
        shapes=1,
        positive=True,
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""Names, as scipy.stats has them. Their order is part of the byte format: new ones go last."""


def _family(name: str) -> _Family:
    return _FAMILIES[family_name(name)]


def middles(elements: int) -> Float[Array, " elements"]:
    """(rank + 1/2) / elements of every rank: the share of elements that an element of this rank stands at."""
    return (np.arange(elements) + 0.5) / elements
