"""`ddp`: every rank holds the whole model and runs the whole update.

After the reduce-scatter each rank sends its shard of the gradient to all: together the bytes of a ring all-reduce,
with the order of additions in our hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.strategy.base import Setup
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.gradients import GradientStrategy
from unisono.strategy.pieces import needs_padding
from unisono.strategy.reduction import Partition
from unisono.strategy.weights import FlatWeights


class ReplicatedStrategy(GradientStrategy):
    """See the module's docstring."""

    name = "ddp"
    shards_state = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._padded = setup.offload is not None or setup.masters

    def _partition(self, group: FlatGroup) -> Partition:
        self._padded = self._padded or needs_padding(self.optimizer, group.dtype)
        if self._padded:  # all groups, or the optimizer would have to see both pieces and parameters
            for other in self.groups:
                if other not in self._pieces:
                    self._pieces.add(FlatWeights(self.comm, other))
        others = self.comm.world_size - 1
        if self.comm.shares_memory:  # nothing is sent, but everybody adds up everything: what counts is the work
            one_shot = group.num_bytes * others < self.setup.one_shot_bytes // 8
        else:  # what one-shot sends more than a reduce-scatter and an all-gather do: nothing at W = 2
            extra = group.num_bytes * others * (others - 1) // (others + 1)
            one_shot = extra < self.setup.one_shot_bytes and not group.frugal
        return Partition(group, self.comm, one_shot=one_shot)

    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        for position, param in enumerate(group.params):
            param.grad = result.views[position] if present[position] else None
        self._pieces.set_gradients(group, lambda place: result.flat[place.start : place.stop], present)

    def update(self, step: Callable[[], Any]) -> None:
        if self._padded:
            super().update(step)
        else:
            step()
