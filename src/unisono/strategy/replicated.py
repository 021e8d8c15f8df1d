"""`ddp`: every rank holds the whole model and runs the whole update.

After the reduce-scatter each rank sends its shard of the gradient to all: together the bytes of a ring all-reduce,
with the order of additions in our hands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.comm.api import Collectives
from unisono.strategy.flat import BUCKET_BYTES, ONE_SHOT_BYTES, FlatBuffer, FlatGroup
from unisono.strategy.gradients import GradientStrategy
from unisono.strategy.offload import Offload
from unisono.strategy.pieces import Pieces, needs_padding
from unisono.strategy.reduction import Partition
from unisono.strategy.weights import FlatWeights


class ReplicatedStrategy(GradientStrategy):
    """See the module's docstring.

    Args:
        one_shot_bytes: Gradients are sent to all, and added up by all, where that sends less than so many bytes
            more: half the waits, and all of it during backward. The bits do not depend on it.
    """

    name = "ddp"

    def __init__(
        self,
        comm: Collectives,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        bucket_bytes: int = BUCKET_BYTES,
        one_shot_bytes: int = ONE_SHOT_BYTES,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(comm, optimizer, names, bucket_bytes)
        self._one_shot_bytes = one_shot_bytes
        self._pieces = Pieces(comm, optimizer, sharded=False, offload=offload)
        self._padded = offload is not None

    def _partition(self, group: FlatGroup) -> Partition:
        self._padded = self._padded or needs_padding(self.optimizer, group.dtype)
        if self._padded:  # all groups, or the optimizer would have to see both pieces and parameters
            for other in self.groups:
                if other not in self._pieces:
                    self._pieces.add(FlatWeights(self.comm, other))
        # What one-shot sends more than a reduce-scatter and an all-gather do: nothing at W = 2.
        others = self.comm.world_size - 1
        extra = group.num_bytes * others * (others - 1) // (others + 1)
        return Partition(group, self.comm, one_shot=extra < self._one_shot_bytes and not group.frugal)

    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        for position, param in enumerate(group.params):
            param.grad = result.views[position] if present[position] else None
        self._pieces.set_gradients(group, lambda place: result.flat[place.start : place.stop], present)

    def update(self, step: Callable[[], Any]) -> None:
        if self._padded:
            self._pieces.update(step)
        else:
            step()
