"""Calls under way between ranks that share memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unisono.comm.arena import flat_bytes
from unisono.comm.flight import FlightRecord
from unisono.comm.mailbox import Message
from unisono.comm.peer import Peer

if TYPE_CHECKING:
    from unisono.comm.shm import ShmCollectives

VERBS = ("exchange_shards", "all_gather", "broadcast", "gather_objects", "lend_shards")
EXCHANGE, GATHER, BROADCAST, OBJECTS, LEND = range(5)
MOST_PIECES = 4096
STAGED_BYTES = 16 * 1024 * 1024


class Outer(Protocol):
    """The same ranks by another way, for what memory is not for."""

    rank: int
    world_size: int
    timeout_s: float
    flight: FlightRecord

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        ...

    def news(self, where: str, wait_s: float) -> str:
        """Tells the others where this rank stops; returns what they have said, as the end of a sentence."""
        ...

    def abort(self) -> None:
        """Drops the connections."""
        ...


class ShmPending:
    """One call under way: what it waits for, and who still reads what it sent."""

    def __init__(self, owner: ShmCollectives, verb: int, call: int) -> None:
        self._owner, self.verb, self.call = owner, verb, call
        self.waits_for: set[int] = set()
        self.owed: list[tuple[Peer, int, int]] = []  # who is to be done with how many messages of a channel

    @property
    def what(self) -> str:
        return f"{VERBS[self.verb]} (call {self.call})"

    def wait(self) -> None:
        self.arrive()
        self.drain()

    def arrive(self) -> None:
        """Returns when all receives are there; sends may still be read."""
        if self.waits_for:
            self._owner.until(lambda: not self.waits_for, self.what, lambda: self.waits_for, self.call)
        self._owner.flight.end(self.call)

    def drain(self) -> None:
        """Returns when nobody reads what was sent any more."""
        if self.owed and self._left():
            owed = lambda: {peer.rank for peer, _, _ in self.owed}  # noqa: E731
            self._owner.until(lambda: not self._left(), self.what, owed, self.call)

    def _left(self) -> bool:
        number = self._owner.number
        self.owed = [owed for owed in self.owed if owed[0].box.done(number, owed[1]) < owed[2]]
        return bool(self.owed)


class Lent(ShmPending):
    """Memory of others to read, and to add to: each owns the part that it is lent until it has done with it."""

    parts: list[list[torch.Tensor]]
    _taken: list[tuple[Peer, int, Message]]

    def wait(self) -> None:
        self.arrive()

    def received(self) -> list[list[torch.Tensor]]:
        """For each rank, what it lends."""
        self.arrive()
        return self.parts

    def done(self) -> None:
        """Says that it was read."""
        for peer, channel, message in self._taken:
            peer.forget(message)
            self._owner.box.mark_done(peer.number, channel)
        self._taken, self.parts = [], []


def bytes_in(parts: Sequence[Sequence[torch.Tensor]]) -> int:
    """Of all tensors together."""
    return sum(tensor.nbytes for some in parts for tensor in some)


def in_rounds(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields them in parts that need little memory to be staged in, which is used again for the next."""
    found: list[torch.Tensor] = []
    room = STAGED_BYTES
    for tensor in tensors:
        for piece in torch.split(flat_bytes(tensor), STAGED_BYTES):
            if found and (len(piece) > room or len(found) == MOST_PIECES):
                yield found
                found, room = [], STAGED_BYTES
            found.append(piece)
            room -= len(piece)
    if found:
        yield found
