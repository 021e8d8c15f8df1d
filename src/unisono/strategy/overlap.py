"""Overlap: a bucket is sent as soon as backward has filled it.

Only where a rank has one micro-batch in the step: there the exchange is largest beside the work that could hide
it, and nothing has to be added up first. A gradient that changes after its bucket was sent (a second
`backward()` before the step, as in a GAN) spoils the sending: the ranks tell each other and send again.
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
        # By position: the gradient that was sent, and torch's count of what has written to it.
        self._written: dict[int, tuple[torch.Tensor | None, int]] = {}
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
        self._reduction = Reduction(self.comm, self.group, plan, self.partition, [(node, self._target)])
        self._missing, self._ready = list(self._sizes), []
        self._arrivals, self._written = set(), {}
        self.armed, self.spoiled = True, False

    def forget(self) -> None:
        """Ends what was begun for a step that the user's loop then left out, on all ranks alike."""
        self.armed = self.spoiled = False
        if (reduction := self.take()) is not None:
            reduction.drop()

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
        return self._reduction is not None and len(self._reduction.pending) == len(self._missing)

    def _launch_ready(self) -> None:
        """Starts what is complete, in the one order of buckets and groups that all ranks keep."""
        if self._reduction is None or (self._before is not None and not self._before._all_launched):
            return
        while not self._all_launched and not self._missing[len(self._reduction.pending)]:
            self._write_ready()
            self._reduction.launch_next()
        if self._all_launched and self._after is not None:
            self._after._launch_ready()

    def _write_ready(self) -> None:
        assert self._target is not None
        if self._scale_used is None:
            self._scale_used = self._scale()
        self.group.write(self._target, self._ready, self._scale_used)
        grads = [(position, self.group.params[position].grad) for position in self._ready]
        self._written.update({position: (grad, -1 if grad is None else grad._version) for position, grad in grads})
        self._ready = []

    def _changed_since(self) -> bool:
        """Whether a gradient was added to, clipped or replaced after it was sent."""
        return any(
            self.group.params[position].grad is not grad or (grad is not None and grad._version != version)
            for position, (grad, version) in self._written.items()
        )

    def finish(self, leaf: int, scale: float) -> None:
        """Takes in what backward did not reach; `optimizer.step()` has been called."""
        assert self._target is not None and self._reduction is not None
        self.armed = False
        self.spoiled = self._changed_since() or (self._scale_used is not None and self._scale_used != scale)
        rest = [position for position in range(len(self.group.params)) if position not in self._written]
        if self.spoiled:
            self._reduction.drop()  # its memory is about to change
            rest = list(range(len(self.group.params)))
            self.group.present = [False] * len(rest)
        self._written = {}
        self.group.write(self._target, rest, scale)
        self.group.take(leaf, self._target)

    def take(self) -> Reduction | None:
        """Returns the exchange that was begun during backward, once."""
        reduction, self._reduction = self._reduction, None
        return reduction
