"""Ranks as threads of one process, for tests that need many worlds in little time.

The transport is strict where a real one is merely unlucky: what is received is poison until it has been waited for,
and a send that is overwritten in flight fails the test.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.comm.api import CopiedLoan
from unisono.errors import CommError

Lists = Sequence[Sequence[torch.Tensor]]
Call = tuple[int, int]  # (channel, number within it)


@dataclass
class _Posted:
    """One rank's part of one call: what it sends to each rank, and where it wants what it receives."""

    verb: str
    sends: Lists
    receives: Lists
    before: list[list[bytes]] = field(default_factory=list)


class ThreadWorld:
    """The mailbox that the ranks share."""

    def __init__(self, world_size: int, timeout_s: float = 5.0) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.changed = threading.Condition()
        self.posted: dict[tuple[Call, int], _Posted] = {}  # by call and rank
        self.delivered: set[tuple[Call, int, int]] = set()  # call, from, to
        self.aborted_by: int | None = None

    def post(self, call: Call, rank: int, posted: _Posted) -> None:
        posted.before = [[_bytes(part) for part in parts] for parts in posted.sends]
        for peer, parts in enumerate(posted.receives):
            for part in parts if peer != rank else ():
                part.view(torch.uint8).fill_(0xFF) if part.dim() else part.fill_(float("nan"))
        with self.changed:
            self.posted[call, rank] = posted
            self.changed.notify_all()

    def finish(self, call: Call, rank: int) -> None:
        """Waits until all that `rank` sends and receives in `call` has arrived."""
        deadline = time.monotonic() + self.timeout_s
        peers = [peer for peer in range(self.world_size) if peer != rank]
        mine = self.posted[call, rank]
        with self.changed:
            while True:
                if self.aborted_by is not None:
                    raise CommError(f"rank {rank} waited in {mine.verb}, but rank {self.aborted_by} aborted")
                missing = [peer for peer in peers if (call, peer) not in self.posted]
                if not missing:
                    break
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise CommError(f"rank {rank} waited {self.timeout_s:g} s in {mine.verb}; missing: {missing}")
            for peer in peers:
                self._deliver(call, rank, peer)
                self._deliver(call, peer, rank)
        now = [[_bytes(part) for part in parts] for parts in mine.sends]
        assert now == mine.before, f"rank {rank} overwrote what it was sending in {mine.verb}, call {call}"

    def _deliver(self, call: Call, frm: int, to: int) -> None:
        if (call, frm, to) in self.delivered:
            return
        self.delivered.add((call, frm, to))
        sender, receiver = self.posted[call, frm], self.posted[call, to]
        assert sender.verb == receiver.verb, f"call {call}: rank {frm} {sender.verb}, rank {to} {receiver.verb}"
        sent, wanted = sender.sends[to], receiver.receives[frm]
        shapes = [[(part.numel(), part.dtype) for part in parts if part.numel()] for parts in (sent, wanted)]
        assert shapes[0] == shapes[1], (
            f"{sender.verb}, call {call}: rank {frm} sends {shapes[0]}, {to} takes {shapes[1]}"
        )
        for source, target in zip(
            (part for part in sent if part.numel()), (part for part in wanted if part.numel()), strict=True
        ):
            assert source.is_contiguous() and target.is_contiguous()
            target.view(-1).copy_(source.view(-1))

    def abort(self, rank: int) -> None:
        with self.changed:
            if self.aborted_by is None:
                self.aborted_by = rank
            self.changed.notify_all()


class _Pending:
    def __init__(self, world: ThreadWorld, call: Call, rank: int) -> None:
        self._world, self._call, self._rank = world, call, rank
        self._done = False

    def wait(self) -> None:
        if not self._done:  # a second wait has nothing to wait for, and the memory may be in use again
            self._world.finish(self._call, self._rank)
            self._done = True


class ThreadCollectives:
    """`Collectives` between the threads of one process."""

    shares_memory = False

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size
        self._calls: Counter[int] = Counter()

    def _start(self, verb: str, sends: Lists, receives: Lists, channel: int = -1) -> _Pending:
        self._calls[channel] += 1
        call = (channel, self._calls[channel])
        self.world.post(call, self.rank, _Posted(verb, sends, receives))
        return _Pending(self.world, call, self.rank)

    def exchange_shards(self, sends: Lists, receives: Lists, channel: int = 0) -> _Pending:
        return self._start("exchange_shards", sends, receives, channel)

    def lend_shards(
        self,
        sends: Lists,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> CopiedLoan:
        return CopiedLoan(self.exchange_shards, self.rank, sends, sizes, inbox, channel)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, parts: Lists, channel: int = 0) -> _Pending:
        return self._start("all_gather", [parts[self.rank]] * self.world_size, parts, channel)

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        nothing: Lists = [[]] * self.world_size
        flat = [torch.empty(tensor.numel(), dtype=tensor.dtype) for tensor in tensors]
        if self.rank == src:
            for part, tensor in zip(flat, tensors, strict=True):
                part.copy_(tensor.reshape(-1))
            self._start("broadcast", [flat] * self.world_size, nothing).wait()
            return
        self._start("broadcast", nothing, [flat if r == src else [] for r in range(self.world_size)]).wait()
        for part, tensor in zip(flat, tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.tensor([data.numel()]) for _ in range(self.world_size)]
        self._start("gather_objects", [[sizes[self.rank]]] * self.world_size, [[size] for size in sizes]).wait()
        parts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        parts[self.rank] = data
        self._start("gather_objects", [[data]] * self.world_size, [[part] for part in parts]).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def barrier(self, what: str = "barrier") -> None:
        nothing: Lists = [[]] * self.world_size
        self._start(what, nothing, nothing).wait()

    def abort(self) -> None:
        self.world.abort(self.rank)


def run_threads(world_size: int, function: Callable[[ThreadCollectives], Any], timeout_s: float = 5.0) -> list[Any]:
    """Returns `function(comm)` of every rank; the first error of a rank ends all of them and is raised."""
    world = ThreadWorld(world_size, timeout_s)
    values: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            values[rank] = function(ThreadCollectives(world, rank))
        except BaseException as error:
            errors.append(error)  # the consequence of another's error comes behind it
            world.abort(rank)

    if world_size == 1:
        body(0)
    else:
        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return values


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
