"""GradientStrategy: gradients in flat vectors, exchanged once a step. What ddp and zero1 have in common.

The sum is a reduce-scatter: each rank owns a shard of every bucket, receives the others' partial sums of that shard,
adds them in tree order and divides once. What becomes of the shards is the strategy's own affair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from unisono.comm.api import Collectives
from unisono.numerics.tree import roots
from unisono.strategy.base import StepPlan, Strategy
from unisono.strategy.flat import BUCKET_BYTES, FlatBuffer, FlatGroup
from unisono.strategy.overlap import Overlap
from unisono.strategy.reduction import Partition, Reduction


class GradientStrategy(Strategy):
    """See the module's docstring.

    Groups are only ever added: a parameter that is frozen again keeps its place, and its zeros travel on, so that
    shards, and the optimizer state that belongs to them, stay where they are.

    Args:
        bucket_bytes: The unit of one exchange. The bits do not depend on it.
    """

    shares_gradients = True

    def __init__(
        self,
        comm: Collectives,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(comm, optimizer, names)
        self._bucket_bytes = bucket_bytes
        self._members: set[int] = set()
        self.groups: list[FlatGroup] = []
        self._partitions: list[Partition] = []
        self._reductions: list[Reduction] = []
        self._overlaps: list[Overlap] = []
        self._hooks: list[RemovableHandle] = []
        self._results: list[FlatBuffer] = []
        self._norm_order: torch.Tensor | None = None

    @abstractmethod
    def _partition(self, group: FlatGroup) -> Partition:
        """Says who owns what of a new group."""

    @abstractmethod
    def _hand_over(self, group: FlatGroup, result: FlatBuffer, present: Sequence[bool]) -> None:
        """Gives the step's gradient of one group to the optimizer."""

    def begin_step(self, plan: StepPlan) -> None:
        for overlap in self._overlaps:
            overlap.forget()
        for group, result in zip(self.groups, self._results, strict=False):
            group.recycle(result)
        self._results = []
        self.adopt_newcomers(plan)
        for group in self.groups:
            group.begin(plan.num_micro)

    def adopt_newcomers(self, plan: StepPlan) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(list(enumerate(self._params()))):
            if id(param) not in self._members and (param.requires_grad or param.grad is not None):
                self._members.add(id(param))
                kinds[param.dtype, param.device].append((self.names.get(id(param), f"parameter {number}"), param))
        for named in kinds.values():
            group = FlatGroup(named, self._bucket_bytes, len(self.groups))
            group.begin(plan.num_micro)
            partition = self._partition(group)
            overlap = Overlap(self.comm, group, partition, self._overlaps[-1] if self._overlaps else None)
            if self.comm.world_size > 1:
                self._hooks += overlap.hooks()
            self.groups.append(group)
            self._partitions.append(partition)
            self._overlaps.append(overlap)
            self._norm_order = None

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def expect_backward(self, plan: StepPlan, leaf: int, scale: Callable[[], float]) -> None:
        for overlap in self._overlaps:
            overlap.arm(plan, leaf, scale)

    @torch.no_grad()
    def add_micro_batch(self, leaf: int, scale: float) -> None:
        for group, overlap in zip(self.groups, self._overlaps, strict=True):
            if overlap.armed:
                overlap.finish(leaf, scale)
            else:
                group.add(leaf, scale)

    def launch(self, plan: StepPlan) -> None:
        self._reductions = []
        for group, partition, overlap in zip(self.groups, self._partitions, self._overlaps, strict=True):
            reduction = overlap.take() or Reduction(self.comm, group, plan, partition, list(group.tree.items()))
            reduction.launch_all()
            self._reductions.append(reduction)

    @property
    def began(self) -> bool:
        return any(overlap.began for overlap in self._overlaps)

    def cancel(self, plan: StepPlan) -> None:
        own = roots(plan.blocks[self.comm.rank], plan.num_micro)
        for group, partition, overlap in zip(self.groups, self._partitions, self._overlaps, strict=True):
            nothing = [(node, group.buffer()) for node in own]  # what it holds is thrown away by all
            reduction = overlap.take() or Reduction(self.comm, group, plan, partition, nothing)
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
                # As torch.nn.utils.clip_grad_norm_ has it; by 1.0 where nothing is to clip, so no device waits.
                result.flat.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(group.device, group.dtype))
            self._hand_over(group, result, present[start : start + len(group.params)])
            start += len(group.params)
        return norm

    def _whole_norm(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the blocks' squares in the optimizer's order, in which no grouping can show."""
        if not norms:
            return torch.zeros((), dtype=torch.float64)
        squares = torch.cat([part.to(norms[0].device, torch.float64).square() for part in norms])
        if self._norm_order is None:
            blocks, start = {}, 0
            for group in self.groups:
                for param, segment in zip(group.params, group.layout.segments, strict=True):
                    part = group.layout.blocks_in(range(segment.offset, segment.stop))
                    blocks[id(param)] = range(start + part.start, start + part.stop)
                start += group.layout.num_blocks
            order = [block for param in self._params() for block in blocks.get(id(param), ())]
            self._norm_order = torch.tensor(order, dtype=torch.long, device=squares.device)
        return squares[self._norm_order].sum().sqrt()

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]
