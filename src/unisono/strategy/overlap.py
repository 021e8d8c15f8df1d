"""Overlap: a bucket is sent as soon as backward has filled it.

Only where a rank has one micro-batch in the step: there the exchange is largest beside the work that could hide
it, and nothing has to be added up first. A gradient that is another one when the optimizer is stepped (a second
`backward()`, clipping, a scaler) spoils the sending: the ranks tell each other and send again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from unisono.comm.api import Collectives
from unisono.numerics.tree import roots
from unisono.strategy.base import StepPlan
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.reduction import Partition, Reduction
from unisono.strategy.two_level import make_reduction


class Overlap:
    """Watches one group's gradients through a backward pass.

    Attributes:
        armed: Whether the present micro-batch is watched.
        spoiled: Whether something sent in this step was not final.

    Args:
        before: The group whose buckets all go first.
    """

    def __init__(self, comm: Collectives, group: FlatGroup, partition: Partition, before: Overlap | None) -> None:
        self.comm, self.group, self.partition = comm, group, partition
        self._before = before
        self._after: Overlap | None = None
        if before is not None:
            before._after = self
        self.armed = self.spoiled = False
        self._buckets_of = [
            [slot for slot, bucket in enumerate(partition.buckets) if s.offset < bucket.stop and bucket.start < s.stop]
            for s in group.layout.segments
        ]
        self._sizes = [sum(slot in slots for slots in self._buckets_of) for slot in range(len(partition.buckets))]
        self._missing: list[int] = []
        self._ready: list[int] = []
        self._arrivals: set[int] = set()
        self._written: list[int] = []
        self._target: FlatBuffer | None = None
        self._reduction: Reduction | None = None
        self._scale: Callable[[], float] = lambda: 1.0
        self._scale_used: float | None = None

    def hooks(self) -> list[RemovableHandle]:
        """Hangs a hook on every parameter."""
        return [
            param.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
            for position, param in enumerate(self.group.params)
            if param.is_leaf
        ]

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        return lambda param: self._arrived(position) if self.armed else None

    def arm(self, plan: StepPlan, leaf: int, scale: Callable[[], float]) -> None:
        """Watches the coming backward, whose gradients are those of `leaf`."""
        node = roots(range(leaf, leaf + 1), plan.num_micro)[0]
        self._target, self._scale, self._scale_used = self.group.buffer(), scale, None
        self._reduction = make_reduction(self.comm, self.group, plan, self.partition, [(node, self._target)])
        self._missing, self._ready = list(self._sizes), []
        self._arrivals, self._written = set(), []
        self.armed, self.spoiled = True, False

    @property
    def began(self) -> bool:
        """Whether something was sent that nobody has taken up yet."""
        return self._reduction is not None and bool(self._reduction.loans)

    def forget(self) -> None:
        """Ends the watch."""
        self.armed = self.spoiled = False
        self._reduction = None

    def _arrived(self, position: int) -> None:
        if position in self._arrivals:  # a second backward; `finish` finds out whether it came too late
            return
        self._arrivals.add(position)
        self._ready.append(position)
        for slot in self._buckets_of[position]:
            self._missing[slot] -= 1
        self._launch_ready()

    @property
    def _all_launched(self) -> bool:
        return self._reduction is not None and len(self._reduction.loans) == len(self._missing)

    def _launch_ready(self) -> None:
        """Starts what is complete, in the one order of buckets and groups that all ranks keep."""
        if self._reduction is None or (self._before is not None and not self._before._all_launched):
            return
        while not self._all_launched and not self._missing[len(self._reduction.loans)]:
            self._write_ready()
            self._reduction.launch_next()
        if self._all_launched and self._after is not None:
            self._after._launch_ready()

    def _write_ready(self) -> None:
        assert self._target is not None
        if self._scale_used is None:
            self._scale_used = self._scale()
        self.group.write(self._target, self._ready, self._scale_used)
        self._written += self._ready
        self._ready = []

    def _changed_since(self, scale: float) -> bool:
        """Whether a gradient is not what was sent.

        By value: torch's version counters miss `grad.data.clamp_()` and `GradScaler.unscale_` (torch 2.13). It reads
        the gradients once more: 3 ms for 24 MB.
        """
        assert self._target is not None
        if self._scale_used is not None and self._scale_used != scale:
            return True
        same = []
        for position in self._written:
            grad, sent = self.group.params[position].grad, self._target.views[position]
            if grad is None or grad.shape != sent.shape:
                return True
            value = grad if scale == 1.0 else torch._foreach_mul([grad], self.group.factor(scale))[0]
            if grad.device.type == "cpu":
                if not torch.equal(value.to(sent.dtype), sent):
                    return True
            else:
                same.append((value == sent).all())
        return bool(same) and not bool(torch.stack(same).all())  # one wait for the device, not one a parameter

    def finish(self, leaf: int, scale: float) -> None:
        """Takes in what backward did not reach; `optimizer.step()` has been called."""
        assert self._target is not None and self._reduction is not None
        self.armed = False
        self.spoiled = self._changed_since(scale)
        written = set(self._written)
        rest = [position for position in range(len(self.group.params)) if position not in written]
        if self.spoiled:
            self._reduction.drop()  # its memory is about to change
            rest = list(range(len(self.group.params)))
            self.group.present = [False] * len(rest)
        self._written = []
        self.group.write(self._target, rest, scale)
        self.group.take(leaf, self._target)

    def take(self) -> Reduction | None:
        """Returns the exchange that was begun during backward, once."""
        reduction, self._reduction = self._reduction, None
        return reduction
