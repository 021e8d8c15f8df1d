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
from unisono.errors import InputError
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

    def begin_step(self, plan: StepPlan) -> None:
        for overlap in self._overlaps:
            overlap.forget()
        self._adopt_parameters()
        for group, result in zip(self.groups, self._results, strict=False):
            group.recycle(result)
        self._results = []
        for group in self.groups:
            group.begin(plan.num_micro)

    def expect_backward(self, plan: StepPlan, leaf: int, scale: Callable[[], float]) -> None:
        for overlap in self._overlaps:
            overlap.arm(plan, leaf, scale)

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
    def must_resend(self) -> bool:
        return any(overlap.spoiled for overlap in self._overlaps)

    def resend(self, plan: StepPlan) -> None:
        for reduction in self._reductions:
            reduction.drop()
        self.launch(plan)

    def complete(self, total: float, present: Sequence[bool], clip_norm: float | None) -> torch.Tensor:
        for reduction in self._reductions:
            reduction.divide_and_share(total)
        outcomes = [reduction.result() for reduction in self._reductions]
        squares = torch.cat([norms.double().square() for _, norms in outcomes])
        norm = squares.sum().sqrt()
        self._results = [result for result, _ in outcomes]
        position = 0
        for group, result in zip(self.groups, self._results, strict=True):
            if clip_norm is not None:
                # As torch.nn.utils.clip_grad_norm_ has it; by 1.0 where nothing is to clip, so no device waits.
                result.flat.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(group.dtype))
            for param, view in zip(group.params, result.views, strict=True):
                param.grad = view if present[position] else None
                position += 1
        self._leave_out_newcomers()
        self._reductions = []
        return norm

    def presence(self) -> list[bool]:
        return [there for group in self.groups for there in group.present]

    def parameter_names(self) -> list[str]:
        return [segment.name for group in self.groups for segment in group.layout.segments]

    def _leave_out_newcomers(self) -> None:
        """Parameters that were thawed or added since the step began take part from the next one on.

        Their gradients are this rank's alone: an update with them would part the ranks.
        """
        known = set(self._members)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known:
                    param.grad = None

    def _adopt_parameters(self) -> None:
        """Lays the trainable parameters out; again where the user froze, thawed or added some."""
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        members = [id(param) for param in params]
        if members == self._members:
            return
        if not params:
            raise InputError("the optimizer has no trainable parameter: pass it some, with requires_grad=True")
        self._members, self._results = members, []
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for number, param in reversed(list(enumerate(params))):
            kinds[param.dtype, param.device].append((self.names.get(id(param), f"parameter {number}"), param))
        self.groups = [FlatGroup(named, self._bucket_bytes, number) for number, named in enumerate(kinds.values())]
        # What one-shot sends more than a reduce-scatter and an all-gather do: nothing at W = 2.
        others = self.comm.world_size - 1
        extra = sum(group.num_bytes for group in self.groups) * others * (others - 1) // (others + 1)
        one_shot = extra < self._one_shot_bytes
        self._partitions = [Partition(group, self.comm, one_shot) for group in self.groups]
        self._overlaps = []
        for group, partition in zip(self.groups, self._partitions, strict=True):
            before = self._overlaps[-1] if self._overlaps else None
            self._overlaps.append(Overlap(self.comm, group, partition, before))
        for hook in self._hooks:
            hook.remove()
        if self.comm.world_size > 1:
            self._hooks = [hook for overlap in self._overlaps for hook in overlap.hooks()]
