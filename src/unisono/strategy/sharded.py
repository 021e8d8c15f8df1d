"""`zero1`: every rank holds the whole model, and updates a shard of it with a shard of the optimizer's state.

After the reduce-scatter of the gradients each rank updates what it owns, then sends the new weights to all (ZeRO
stage 1: Rajbhandari et al. 2020, section 5.1): the bytes of `ddp`, and 1/W of its optimizer state and update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from unisono.comm.api import Collectives
from unisono.strategy.flat import BUCKET_BYTES, FlatBuffer, FlatGroup
from unisono.strategy.gradients import GradientStrategy
from unisono.strategy.pieces import Pieces, is_elementwise
from unisono.strategy.reduction import Partition


class OptimizerShardedStrategy(GradientStrategy):
    """See the module's docstring."""

    name = "zero1"
    shares_gradients = False

    def __init__(
        self,
        comm: Collectives,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(comm, optimizer, names, bucket_bytes)
        self._pieces = Pieces(comm, optimizer, sharded=True)

    def _partition(self, group: FlatGroup) -> Partition:
        partition = Partition(group, self.comm, whole=not is_elementwise(self.optimizer))
        self._pieces.add(group, partition.own(self.comm.rank), partition)
        return partition

    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        for param in group.params:
            param.grad = None
        self._pieces.set_gradients(group, result, present)

    def updating(self) -> AbstractContextManager[None]:
        return self._pieces.in_place()
