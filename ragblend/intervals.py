"""95 % confidence intervals of a share and of a mean, by scipy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """Return (low, high) of Wilson's 95 % interval of a share of `num` cases.

    >>> tuple(round(bound, 3) for bound in wilson_interval(0.95, 100))
    (0.888, 0.978)
    """
    from scipy.stats import binomtest

    low, high = binomtest(round(share * num), num).proportion_ci(method="wilson")
    return float(low), float(high)


def mean_interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return (low, high) of the 95 % bootstrap interval of the mean. Equal `values` give equal intervals at every call.

    >>> mean_interval([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) == 1:  # of which scipy says nothing
        return float(values[0]), float(values[0])
    data = (np.asarray(values, dtype=float),)
    interval = bootstrap(data, np.mean, n_resamples=1000, method="percentile", rng=0)
    return float(interval.confidence_interval.low), float(interval.confidence_interval.high)
