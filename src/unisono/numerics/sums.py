"""Sums of Python floats that do not depend on how the numbers are grouped."""

from __future__ import annotations

import math
from collections.abc import Iterable


def exact_sum(values: Iterable[float]) -> float:
    """Returns `math.fsum(values)`, and NaN where that raises: infinities that cancel out, a sum too large for a float.

    Determinism: rounded once, so the grouping cannot show; pass the values in one order for every world size, since
    whether an intermediate sum is too large may depend on it.
    """
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def weighted_mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the mean of (value, weight) pairs, from exact sums; NaN where all weights are 0."""
    pairs = list(pairs)
    total = exact_sum(weight for _, weight in pairs)
    return exact_sum(value * weight for value, weight in pairs) / total if total else math.nan
