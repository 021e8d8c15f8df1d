"""GradientStrategy: gradients are exchanged once a step. What ddp and zero1 have in common.

The sum is a reduce-scatter: each rank owns a shard of every bucket, receives the others' partial sums of that shard,
adds them in tree order and divides once. What becomes of the shards is the strategy's own affair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from unisono.numerics.tree import roots
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.grouped import GroupedStrategy, clip_factor
from unisono.strategy.landing import Landing
from unisono.strategy.overlap import Overlap
from unisono.strategy.reduction import Partition, Reduction
from unisono.strategy.two_level import make_reduction


class GradientStrategy(GroupedStrategy):
    """See the module's docstring."""

    shares_gradients: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._partitions: list[Partition] = []
        self._reductions: list[Reduction] = []
        self._overlaps: list[Overlap] = []
        self._landings: list[Landing] = []
        self._hooks: list[RemovableHandle] = []
        self._results: list[FlatBuffer] = []

    @abstractmethod
    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        """Gives the step's gradient of one group to the optimizer."""

    def begin_step(self, plan: StepPlan) -> None:
        for overlap in self._overlaps:
            overlap.forget()
        for group, result in zip(self.groups, self._results, strict=False):
            group.recycle(result)
        self._results = []
        for group in self.groups:
            group.begin(plan.num_micro)
        self.adopt_newcomers(plan)

    def _begin_group(self, group: FlatGroup, partition: Partition, plan: StepPlan) -> None:
        group.begin(plan.num_micro)
        overlap = Overlap(self.comm, group, partition, self._overlaps[-1] if self._overlaps else None)
        if self._sends_early:
            self._hooks += overlap.hooks()
        landing = Landing(group)
        if not self.in_threads:  # which are to compute gradients, and to put them nowhere
            self._hooks += landing.hooks()
        self._landings.append(landing)
        self._partitions.append(partition)
        self._overlaps.append(overlap)

    def expect_backward(self, plan: StepPlan, leaf: int | None, scale: Callable[[], float]) -> None:
        if leaf is None:
            return
        # Where this rank has one micro-batch in the step, nothing has to be added up before it is sent.
        early = self._sends_early and len(plan.blocks[self.comm.rank]) == 1
        for overlap, landing, group in zip(self._overlaps, self._landings, self.groups, strict=True):
            if early and not group.frugal:
                overlap.arm(plan, leaf, scale)
            else:
                landing.open(leaf)

    @property
    def _sends_early(self) -> bool:
        """Nothing is sent where memory is shared, and to look whether a gradient has changed since takes time."""
        return self.comm.world_size > 1 and not self.comm.shares_memory

    @torch.no_grad()
    def add_micro_batch(self, plan: StepPlan, leaf: int | None, scale: float) -> None:
        if leaf is None:
            return
        for group, overlap, landing in zip(self.groups, self._overlaps, self._landings, strict=True):
            if overlap.armed:
                overlap.finish(leaf, scale)
            else:
                group.add(leaf, scale, landing.take())

    def launch(self, plan: StepPlan) -> None:
        self._reductions = []
        for group, partition, overlap in zip(self.groups, self._partitions, self._overlaps, strict=True):
            reduction = overlap.take() or make_reduction(self.comm, group, plan, partition, list(group.tree.items()))
            reduction.launch_all()
            self._reductions.append(reduction)

    @property
    def began(self) -> bool:
        return any(overlap.began for overlap in self._overlaps)

    def cancel(self, plan: StepPlan) -> None:
        own = roots(plan.blocks[self.comm.rank], plan.num_micro)
        for group, partition, overlap in zip(self.groups, self._partitions, self._overlaps, strict=True):
            nothing = [(node, group.buffer()) for node in own]  # what it holds is thrown away by all
            reduction = overlap.take() or make_reduction(self.comm, group, plan, partition, nothing)
            reduction.launch_all()
            reduction.drop()

    @property
    def must_resend(self) -> bool:
        return any(overlap.spoiled for overlap in self._overlaps)

    def resend(self, plan: StepPlan) -> None:
        for reduction in self._reductions:
            reduction.drop()
        self.launch(plan)

    @torch.no_grad()
    def complete(self, total: float, present: Sequence[bool], clip_norm: float | None) -> torch.Tensor:
        for reduction in self._reductions:
            reduction.divide_and_share(total, self.shares_gradients)
        outcomes = [reduction.result() for reduction in self._reductions]
        self._results, self._reductions = [result for result, _ in outcomes], []
        norm = self._whole_norm([norms for _, norms in outcomes])
        start = 0
        for group, result in zip(self.groups, self._results, strict=True):
            if clip_norm is not None:
                result.flat.mul_(clip_factor(norm, clip_norm, group))
            self._hand_over(group, result, present[start : start + len(group.params)])
            start += len(group.params)
        return norm
