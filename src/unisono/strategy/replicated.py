"""`ddp`: every rank holds the whole model and runs the whole update; gradients are summed in tree order.

The sum is a reduce-scatter and an all-gather. Each rank owns a shard of every bucket: it receives the others'
partial sums of that shard, adds them in tree order, divides once, and sends the result to all. These are the
bytes of a ring all-reduce, with the order of additions in our hands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from unisono.comm.api import Collectives
from unisono.numerics.tree import roots
from unisono.strategy.base import StepPlan, Strategy
from unisono.strategy.flat import BUCKET_BYTES, ONE_SHOT_BYTES, FlatBuffer, FlatGroup
from unisono.strategy.overlap import Overlap
from unisono.strategy.reduction import Partition, Reduction


class ReplicatedStrategy(Strategy):
    """See the module's docstring.

    Args:
        bucket_bytes: The unit of one exchange. The bits do not depend on it.
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
    ) -> None:
        super().__init__(comm, optimizer, names)
        self._bucket_bytes, self._one_shot_bytes = bucket_bytes, one_shot_bytes
        self._members: list[int] = []
        self.groups: list[FlatGroup] = []
        self._partitions: list[Partition] = []
        self._reductions: list[Reduction] = []
        self._overlaps: list[Overlap] = []
        self._hooks: list[RemovableHandle] = []
        self._results: list[FlatBuffer] = []
        self._trained: set[int] = set()  # had a gradient on some rank in the last step
        self._laid_out_at_once = True

    def begin_step(self, plan: StepPlan) -> None:
        for overlap in self._overlaps:
            overlap.forget()
        self._adopt_parameters()
        for group, result in zip(self.groups, self._results, strict=False):
            group.recycle(result)
        self._results = []
        for group in self.groups:
            group.begin(plan.num_micro)

    def adopt_newcomers(self, plan: StepPlan) -> None:
        known = set(self._members)
        newcomers = [
            (number, param)
            for number, param in enumerate(self._own_params())
            if (param.requires_grad or param.grad is not None) and id(param) not in known
        ]
        if newcomers:
            # Groups of their own for the rest of this step; the next one lays all out together.
            self._members += [id(param) for _, param in newcomers]
            for group in self._new_groups(newcomers):
                self._watch(group, None)
                group.begin(plan.num_micro)

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
            reduction.divide_and_share(total)
        outcomes = [reduction.result() for reduction in self._reductions]
        squares = [norms.double().square().sum() for _, norms in outcomes]
        norm = torch.stack([square.to(squares[0].device) for square in squares] or [torch.zeros(())]).sum().sqrt()
        self._results = [result for result, _ in outcomes]
        position = 0
        self._trained = set()
        for group, result in zip(self.groups, self._results, strict=True):
            if clip_norm is not None:
                # As torch.nn.utils.clip_grad_norm_ has it; by 1.0 where nothing is to clip, so no device waits.
                result.flat.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(group.device, group.dtype))
            for param, view in zip(group.params, result.views, strict=True):
                param.grad = view if present[position] else None
                if present[position]:
                    self._trained.add(id(param))
                position += 1
        self._reductions = []
        return norm

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]

    def _own_params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _adopt_parameters(self) -> None:
        """Lays out what is trained; again where the user froze, thawed or added parameters.

        Some loops thaw a layer for its forward and freeze it after the update: what got a gradient in the last step
        stays.
        """
        numbered = [
            (number, param)
            for number, param in enumerate(self._own_params())
            if param.requires_grad or id(param) in self._trained
        ]
        members = [id(param) for _, param in numbered]
        if members == self._members and self._laid_out_at_once:
            return
        self._members, self._results = members, []
        self.groups, self._partitions, self._overlaps = [], [], []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for group in self._new_groups(numbered):
            before = self._overlaps[-1] if self._overlaps else None
            overlap = self._watch(group, before)
            if self.comm.world_size > 1:
                self._hooks += overlap.hooks()
        self._laid_out_at_once = True

    def _new_groups(self, numbered: Sequence[tuple[int, torch.Tensor]]) -> list[FlatGroup]:
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(numbered):
            kinds[param.dtype, param.device].append((self.names.get(id(param), f"parameter {number}"), param))
        first = len(self.groups)
        return [FlatGroup(named, self._bucket_bytes, first + k) for k, named in enumerate(kinds.values())]

    def _watch(self, group: FlatGroup, before: Overlap | None) -> Overlap:
        # What one-shot sends more than a reduce-scatter and an all-gather do: nothing at W = 2.
        others = self.comm.world_size - 1
        extra = group.num_bytes * others * (others - 1) // (others + 1)
        partition = Partition(group, self.comm, one_shot=extra < self._one_shot_bytes)
        overlap = Overlap(self.comm, group, partition, before)
        self.groups.append(group)
        self._partitions.append(partition)
        self._overlaps.append(overlap)
        self._laid_out_at_once = False
        return overlap
