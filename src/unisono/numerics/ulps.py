"""The distance of two states in units of the last place: how many representable numbers lie between."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def max_ulps(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]) -> int:
    """Returns the largest distance of two states, in representable numbers between them."""
    largest = 0
    for name, tensor in here.items():
        other = there.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype or not tensor.numel():
            continue
        one, two = _ordered(tensor), _ordered(other)
        # In float64, since the distance of two int64 may be no int64: exact up to 2**53, and then it hardly matters.
        largest = max(largest, int((one.double() - two.double()).abs().max()))
    return largest


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers as integers in the same order, neighbours one apart."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    kind = _INTEGERS[tensor.element_size()]
    bits = tensor.contiguous().view(kind)
    # Negative numbers grow downwards in their bits.
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)
