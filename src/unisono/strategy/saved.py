"""What a rank has of weights and optimizer state, as checkpoints want it: elements in row-major order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from unisono.numerics.layout import Segment
from unisono.strategy.flat import view_of


@dataclass(frozen=True)
class Shard:
    """Some elements of a tensor.

    Attributes:
        start: The first one's index in row-major order.
        values: 1-D and contiguous.
    """

    start: int
    values: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What this rank has of one tensor.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of it.
        shards: What of it is here; where the ranks share it, each element is on one of them.
        whole: Whether it is all here.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: Sequence[Shard]
    whole: bool

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> Held:
        """Describes a tensor that is here as a whole."""
        flat = tensor.detach().contiguous().view(-1)
        return cls(tuple(tensor.shape), tensor.dtype, [Shard(0, flat)], whole=True)


@dataclass(frozen=True)
class HeldState:
    """What this rank has of an optimizer's state.

    Attributes:
        tensors: By parameter and key; the parameter by its id.
        values: What is no tensor, likewise.
        common: State that belongs to no parameter, by key.
    """

    tensors: dict[tuple[int, str], Held] = field(default_factory=dict)
    values: dict[tuple[int, str], Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def add(self, param: torch.Tensor, key: str, value: Any) -> None:
        """Takes in a value that is here as a whole."""
        if isinstance(value, torch.Tensor):
            self.tensors[id(param), key] = Held.all_of(value)
        else:
            self.values[id(param), key] = value

    def add_all(self, state: Mapping[Any, Any]) -> None:
        """Takes in `optimizer.state` as an optimizer has it."""
        for owner, found in state.items():
            if not isinstance(owner, torch.Tensor):
                self.common[str(owner)] = found
                continue
            for key, value in found.items():
                self.add(owner, key, value)


def shards_of(segment: Segment, template: torch.Tensor, place: range, values: torch.Tensor) -> list[Shard]:
    """Returns part of a parameter's segment as elements of the parameter.

    Args:
        segment: Of the parameter.
        template: Its shape and strides.
        place: The range of the flat vector; the padding at a segment's end is left out.
        values: Shape (len(place),).
    """
    start, stop = place.start - segment.offset, min(place.stop - segment.offset, segment.numel)
    if stop <= start:
        return []
    values = values.detach()[: stop - start]
    if template.is_contiguous():
        return [Shard(start, values)]
    # Laid out as the parameter is in memory (channels last, transposed): find where each element belongs.
    places = view_of(torch.arange(segment.padded), segment, template, 0).reshape(-1)
    found = torch.nonzero((places >= start) & (places < stop)).view(-1)
    ordered = values[(places[found] - start).to(values.device)]
    cuts = (torch.nonzero(found.diff() != 1).view(-1) + 1).tolist()
    bounds = [0, *cuts, len(found)]
    return [Shard(int(found[a]), ordered[a:b]) for a, b in pairwise(bounds)]
