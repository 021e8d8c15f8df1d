"""Rounds: one group's gradients, exchanged after every micro-batch, so that no rank ever holds a whole one.

In round j the ranks compute leaves j * W .. j * W + W - 1. A bucket leaves as soon as backward has filled it, its
gradients are freed, and its owner adds the round's leaves to what it has, in tree order: neighbouring leaves merge at
once, so about log2(num_micro) shards are alive at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from unisono.comm.api import Collectives, Pending
from unisono.errors import InputError
from unisono.numerics.tree import TreeAccumulator
from unisono.strategy.base import StepPlan
from unisono.strategy.flat import FlatBuffer, FlatGroup
from unisono.strategy.reduction import GRADIENTS, Partition

# Buckets on their way at once, of all groups together: more would hide more of the waits, and hold more memory.
_IN_FLIGHT = 2


@dataclass
class _Flight:
    rounds: Rounds
    slot: int
    pending: Pending
    buffer: FlatBuffer | None
    arrivals: list[tuple[int, torch.Tensor]]

    def land(self) -> None:
        self.rounds.land(self)


class Rounds:
    """See the module's docstring.

    Args:
        comm: The ranks.
        group: Whose gradients.
        partition: Who owns what; buckets hold whole segments.
        before: The group whose buckets all go first.

    Attributes:
        armed: Whether a backward pass is being watched.
    """

    def __init__(self, comm: Collectives, group: FlatGroup, partition: Partition, before: Rounds | None) -> None:
        self.comm, self.group, self.partition, self._before = comm, group, partition, before
        self._after: Rounds | None = None
        if before is not None:
            before._after = self
        self.armed = False
        segments = group.layout.segments
        self._slot_of = [
            next((k for k, bucket in enumerate(partition.buckets) if s.offset in bucket), -1) for s in segments
        ]
        self._positions = [[k for k, slot in enumerate(self._slot_of) if slot == n] for n in range(len(self._buckets))]
        self._trees: list[TreeAccumulator[torch.Tensor]] = []
        self._flights: list[_Flight] = [] if before is None else before._flights
        self._leaves: Sequence[int | None] = ()
        self._launched = self._round = 0
        self._arrived: list[set[int]] = []
        self._scale: Callable[[], float] = lambda: 1.0

    @property
    def _buckets(self) -> list[range]:
        return self.partition.buckets

    def begin_step(self, plan: StepPlan) -> None:
        """Forgets the last step."""
        self._trees = [TreeAccumulator(plan.num_micro, torch.Tensor.add_) for _ in self._buckets]
        self.group.begin(plan.num_micro)
        self._round, self.armed = 0, False

    def hooks(self) -> list[RemovableHandle]:
        """Hangs two hooks on every parameter: before a gradient is added to the parameter's, and after."""
        found: list[RemovableHandle] = []
        for position, param in enumerate(self.group.params):
            if param.is_leaf and param.requires_grad and self._slot_of[position] >= 0:
                found.append(param.register_hook(self._before_hook(position)))  # type: ignore[no-untyped-call]
                found.append(param.register_post_accumulate_grad_hook(self._after_hook(position)))  # type: ignore[no-untyped-call]
        return found

    def _before_hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def check(grad: torch.Tensor) -> None:
            if self.armed and self._slot_of[position] < self._launched:
                name = self.group.layout.segments[position].name
                raise InputError(
                    f"backward reached {name} a second time in one micro-batch, and zero2 has sent its gradient away: "
                    "call backward once, on the sum of the losses, or use the strategy zero1"
                )

        return check

    def _after_hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def arrived(param: torch.Tensor) -> None:
            if self.armed:
                self._arrived[self._slot_of[position]].add(position)
                self._launch_ready()

        return arrived

    def start(self, plan: StepPlan, scale: Callable[[], float], armed: bool) -> None:
        """Begins a round, before the forward (`armed`) or once the gradients are there."""
        first = self._round * self.comm.world_size
        self._leaves = [first + r if first + r < plan.num_micro else None for r in range(self.comm.world_size)]
        self._round += 1
        self._launched, self._arrived = 0, [set() for _ in self._buckets]
        self._scale, self.armed = scale, armed

    def pass_by(self) -> None:
        """Told in the midst of a backward that it will not come here: what is missing counts as there."""
        if self.armed:
            self._arrived = [set(positions) for positions in self._positions]
            self._launch_ready()

    def finish(self) -> None:
        """Collective: exchanges what backward did not reach, and adds up."""
        self.armed = False
        while self._launched < len(self._buckets):
            self._launch_next()
        while self._flights:
            self._flights.pop(0).land()
        for param in self.group.params:
            param.grad = None

    @property
    def _all_launched(self) -> bool:
        return self._launched == len(self._buckets)

    def _launch_ready(self) -> None:
        """Starts what is complete, in the one order of buckets and groups that all ranks keep."""
        if not self.armed or (self._before is not None and not self._before._all_launched):
            return
        while not self._all_launched and len(self._arrived[self._launched]) == len(self._positions[self._launched]):
            self._launch_next()
        if self._all_launched and self._after is not None:
            self._after._launch_ready()

    @torch.no_grad()
    def _launch_next(self) -> None:
        if len(self._flights) == _IN_FLIGHT:
            self._flights.pop(0).land()
        slot = self._launched
        bucket, shards, rank = self._buckets[slot], self.partition.shards[slot], self.comm.rank
        buffer = None
        if self._leaves[rank] is not None:
            buffer = self.group.buffer_of(bucket)
            self.group.write(buffer, self._positions[slot], self._scale())
        if self.armed:
            for position in self._positions[slot]:
                _send_away(self.group.params[position])
        self._launched += 1
        sends: list[list[torch.Tensor]] = [[] for _ in shards]
        if buffer is not None:
            sends = [[buffer.flat[s.start - bucket.start : s.stop - bucket.start]] for s in shards]
        own = len(shards[rank])
        arrivals = [
            (leaf, torch.empty(own, dtype=self.group.dtype, device=self.group.device))
            for peer, leaf in enumerate(self._leaves)
            if leaf is not None and peer != rank
        ]
        receives = [[part for leaf, part in arrivals if leaf == theirs] for theirs in self._leaves]
        pending = self.comm.exchange_shards(sends, receives, channel=GRADIENTS + self.group.number)
        self._flights.append(_Flight(self, slot, pending, buffer, arrivals))

    @torch.no_grad()
    def land(self, flight: _Flight) -> None:
        """Waits for a bucket, and adds up what has come."""
        flight.pending.wait()
        tree, leaf = self._trees[flight.slot], self._leaves[self.comm.rank]
        if flight.buffer is not None and leaf is not None:
            bucket, shard = self._buckets[flight.slot], self.partition.shards[flight.slot][self.comm.rank]
            part = flight.buffer.flat[shard.start - bucket.start : shard.stop - bucket.start]
            tree.add(leaf, part if shard == bucket else part.clone())  # a view would keep the whole bucket
        for other, value in flight.arrivals:
            tree.add(other, value)

    def results(self) -> list[torch.Tensor]:
        """Returns the sum of this rank's shard of each bucket."""
        return [tree.result() for tree in self._trees]


def _send_away(param: torch.Tensor) -> None:
    """Frees a gradient, and leaves one that says so to whoever looks: not a number, and not to be written to."""
    if param.grad is not None:
        param.grad = torch.full((), torch.nan, dtype=param.dtype, device=param.device).expand(param.shape)
