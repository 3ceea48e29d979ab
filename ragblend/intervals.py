"""How far a share or a mean of a few cases may be from that of many: 95 % intervals. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 1000  # of the bootstrap
_RESAMPLES_AT_ONCE = 1000  # bounds memory
_Z = 1.96  # standard deviations to each side that hold 95 %


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `num` cases.

    >>> tuple(round(bound, 3) for bound in wilson_interval(0.95, 100))
    (0.888, 0.978)
    """
    middle = (share + _Z * _Z / (2 * num)) / (1 + _Z * _Z / num)
    half = _Z * math.sqrt(share * (1 - share) / num + _Z * _Z / (4 * num * num)) / (1 + _Z * _Z / num)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(
    values: Sequence[float] | NDArray[np.float64], num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: percentiles over resamples of the values, the same at every call.

    >>> mean_interval([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    rng, given = np.random.default_rng(0), np.asarray(values, dtype=float)
    means: list[NDArray[np.float64]] = []
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        drawn = rng.integers(len(given), size=(min(num_resamples - start, _RESAMPLES_AT_ONCE), len(given)))
        means.append(given[drawn].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
