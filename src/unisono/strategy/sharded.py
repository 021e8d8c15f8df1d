"""`zero1` and `zero2`: every rank holds the whole model, and updates a shard of it.

After the reduce-scatter of the gradients each rank updates what it owns, then sends the new weights to all. `zero1`
(ZeRO stage 1: Rajbhandari et al. 2020, section 5.1) moves the bytes of `ddp` and keeps 1/W of the optimizer's state;
`zero2` (section 5.2) keeps 1/W of the gradient too, and exchanges once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.gradients import GradientStrategy
from unisono.strategy.grouped import GroupedStrategy, clip_factor
from unisono.strategy.pieces import is_elementwise
from unisono.strategy.reduction import RESULTS, Norms, Partition
from unisono.strategy.rounds import Rounds
from unisono.strategy.weights import FlatWeights


class OptimizerShardedStrategy(GradientStrategy):
    """See the module's docstring."""

    name = "zero1"
    shares_gradients = False

    def _partition(self, group: FlatGroup) -> Partition:
        partition = Partition(group, self.comm, whole=not is_elementwise(self.optimizer))
        self._pieces.add(FlatWeights(self.comm, group, partition))
        return partition

    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        for param in group.params:
            param.grad = None
        self._pieces.set_gradients(group, lambda place: result.flat[place.start : place.stop], present)


class GradientShardedStrategy(GroupedStrategy):
    """`zero2`; see the module's docstring."""

    name = "zero2"
    strided = True
    whole_segments = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._rounds: list[Rounds] = []
        self._hooks: list[RemovableHandle] = []

    def _partition(self, group: FlatGroup) -> Partition:
        weights = self._weights_of(group)
        self._pieces.add(weights)
        assert weights.partition is not None
        return weights.partition

    def _weights_of(self, group: FlatGroup) -> FlatWeights:
        return FlatWeights(self.comm, group, Partition(group, self.comm, whole=not is_elementwise(self.optimizer)))

    def _begin_group(self, group: FlatGroup, partition: Partition, plan: StepPlan) -> None:
        rounds = Rounds(self.comm, group, partition, self._rounds[-1] if self._rounds else None)
        rounds.begin_step(plan)
        self._hooks += rounds.hooks()
        self._rounds.append(rounds)

    def begin_step(self, plan: StepPlan) -> None:
        for rounds in self._rounds:
            rounds.begin_step(plan)
        self.adopt_newcomers(plan)

    def expect_backward(self, plan: StepPlan, leaf: int | None, scale: Callable[[], float]) -> None:
        for rounds in self._rounds:
            rounds.start(plan, scale, armed=True)

    def add_micro_batch(self, plan: StepPlan, leaf: int | None, scale: float) -> None:
        for rounds in self._rounds:
            if not rounds.armed:
                rounds.start(plan, lambda: scale, armed=False)
        for rounds in self._rounds:
            rounds.finish()

    def skip_micro_batch(self, plan: StepPlan) -> None:
        for rounds in self._rounds:
            if rounds.armed:
                rounds.finish()

    @torch.no_grad()
    def complete(self, total: float, present: Sequence[bool], clip_norm: float | None) -> torch.Tensor:
        found = [rounds.results() for rounds in self._rounds]
        measured = [Norms(self.comm, rounds.group, rounds.partition) for rounds in self._rounds]
        pending = []
        for sums, norms in zip(found, measured, strict=True):
            for slot, value in enumerate(sums):
                norms.measure(slot, value.div_(total))
                pending.append(self.comm.all_gather(norms.parts(slot), channel=RESULTS))
        for arrival in pending:
            arrival.wait()
        norm = self._whole_norm([norms.values for norms in measured])
        start = 0
        for sums, rounds in zip(found, self._rounds, strict=True):
            group, shards = rounds.group, rounds.partition.own(self.comm.rank)
            if clip_norm is not None:
                factor = clip_factor(norm, clip_norm, group)
                for value in sums:
                    value.mul_(factor)

            def part(place: range, shards: list[range] = shards, sums: list[torch.Tensor] = sums) -> torch.Tensor:
                slot = next(slot for slot, shard in enumerate(shards) if place.start in shard)
                return sums[slot][place.start - shards[slot].start : place.stop - shards[slot].start]

            self._pieces.set_gradients(group, part, present[start : start + len(group.params)])
            start += len(group.params)
        return norm
