"""Collectives of one host's ranks through memory that they share.

A rank says in its mailbox where its data lie (see `mailbox`), and the others read them there: what lies in the arena
(`empty`) is copied once, or not at all where the reader only adds it up (`lend_shards`); anything else is copied into
the arena first. Nobody works in the background: a rank takes what has come while it waits for something.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.comm.api import Parts
from unisono.comm.arena import Arena, flat_bytes
from unisono.comm.calls import (
    BROADCAST,
    EXCHANGE,
    GATHER,
    LEND,
    OBJECTS,
    VERBS,
    Lent,
    Outer,
    ShmPending,
    bytes_in,
    in_rounds,
)
from unisono.comm.mailbox import CHANNELS, INLINE_BYTES, Mailbox, Message, encode
from unisono.comm.peer import Peer
from unisono.errors import CommError

_OBJECTS_CHANNEL = CHANNELS - 1
_MOST_INLINE = 64 * 1024  # of one message
# How to wait, see docs/design/0008: where each rank has a core of its own the answer is often there within
# microseconds; where it has not, the others need the core to answer at all.
SPINS, _YIELDS_S, _SLEEP_S, _MOST_SLEEP_S = 50, 0.002, 20e-6, 0.001
_LOOK_S = 0.1  # between two looks at whether the others live


Taker = Callable[[Peer, int, Message], bool]  # returns whether the message is done with


class ShmCollectives:
    """`Collectives` of the ranks of one host; see the module's docstring.

    Args:
        outer: The same ranks over a process group: for what goes through the job's store.
        box: This rank's mailbox.
        number: Of this rank on the host.
        peers: The host's others.
        spins: Looks before the first pause.
    """

    shares_memory = True

    def __init__(self, outer: Outer, box: Mailbox, number: int, peers: Sequence[Peer], spins: int) -> None:
        self.outer, self.box, self.number, self.peers = outer, box, number, list(peers)
        self.rank, self.world_size, self.timeout_s = outer.rank, outer.world_size, outer.timeout_s
        self._peer = {peer.rank: peer for peer in peers}
        self._boxes = [peer.box for peer in peers]
        self._arena = Arena()
        self._spins = spins
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._arrived: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._expected: dict[tuple[int, int], deque[tuple[ShmPending, Taker]]] = defaultdict(deque)
        self._kept: deque[tuple[ShmPending, list[torch.Tensor]]] = deque()  # sent, and perhaps still read
        self.flight = outer.flight
        self.bytes_sent = 0

    # Verbs

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" and numel:
            with contextlib.suppress(OSError):
                return self._arena.empty(numel * dtype.itemsize).view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def exchange_shards(self, sends: Parts, receives: Parts, channel: int = 0) -> ShmPending:
        pending = self._begin(EXCHANGE, bytes_in(sends))
        for peer in self.peers:
            if targets := [part for part in receives[peer.rank] if part.numel()]:
                self._expect(peer, channel, pending, self._copier(targets, pending))
        self._post(pending, channel, [[part for part in parts if part.numel()] for parts in sends])
        return pending

    def all_gather(self, parts: Parts, channel: int = 0) -> ShmPending:
        pending = self._begin(GATHER, bytes_in(parts[self.rank : self.rank + 1]))
        for peer in self.peers:
            if targets := [part for part in parts[peer.rank] if part.numel()]:
                self._expect(peer, channel, pending, self._copier(targets, pending))
        self._post_all(pending, channel, [part for part in parts[self.rank] if part.numel()])
        return pending

    def lend_shards(
        self,
        sends: Parts,
        sizes: Sequence[Sequence[int]],
        inbox: Callable[[int], torch.Tensor],
        channel: int = 0,
    ) -> Lent:
        call = self._begin(LEND, bytes_in(sends), Lent)
        assert isinstance(call, Lent)
        call.parts, call._taken = [[torch.empty(0)] * len(own) for own in sizes], []
        call.parts[self.rank] = []
        dtype = inbox(0).dtype
        for peer in self.peers:
            if any(sizes[peer.rank]):
                self._expect(peer, channel, call, self._lender(call, sizes[peer.rank], dtype))
        self._post(call, channel, [[part for part in parts if part.numel()] for parts in sends])
        return call

    def broadcast(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        for part in in_rounds([tensor.detach() for tensor in tensors if tensor.numel()]):
            pending = self._begin(BROADCAST, bytes_in([part]))
            if src == self.rank:
                self._post_all(pending, 0, part)
            else:
                self._expect(self._peer[src], 0, pending, self._copier(part, pending))
            pending.wait()

    def gather_objects(self, value: Any) -> list[Any]:
        pending, found = self._begin(OBJECTS, 0), {self.rank: value}

        def take(peer: Peer, channel: int, message: Message) -> bool:
            (data,) = self._data(peer, message)
            found[peer.rank] = pickle.loads(data.numpy().tobytes())
            return True

        for peer in self.peers:
            self._expect(peer, _OBJECTS_CHANNEL, pending, take)
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._post_all(pending, _OBJECTS_CHANNEL, [data])
        pending.arrive()
        return [found[rank] for rank in range(self.world_size)]

    def barrier(self, what: str = "barrier") -> None:
        self.box.come()
        count = self.box.barriers

        def missing() -> set[int]:
            return {peer.rank for peer in self.peers if peer.box.barriers < count}

        number = self.flight.begin("barrier", 0)
        self.until(lambda: all(box.barriers >= count for box in self._boxes), what, missing, number, must=True)
        self.flight.end(number)

    def abort(self) -> None:
        self.box.stop()
        self.outer.abort()

    def close(self) -> None:
        """Gives the memory back; what others still read stays until they have."""
        self._arena.close()
        for peer in self.peers:
            os.close(peer.alive)
        self.peers = []

    # Sending

    def _begin(self, verb: int, num_bytes: int, kind: type[ShmPending] = ShmPending) -> ShmPending:
        number = self.flight.begin(VERBS[verb], num_bytes)
        while self._kept and not self._kept[0][0]._left():
            self._kept.popleft()
        return kind(self, verb, number)

    def _post(self, pending: ShmPending, channel: int, sends: Sequence[Sequence[torch.Tensor]]) -> None:
        tables: list[Any] = [None] * (len(self.peers) + 1)
        kept: list[torch.Tensor] = []
        budget = _MOST_INLINE // len(tables)
        for peer in self.peers:
            if parts := sends[peer.rank]:
                tables[peer.number] = self._table(parts, kept, budget)
                self._owe(pending, peer, channel)
        self._write(pending, channel, tables, kept, shared=False)

    def _post_all(self, pending: ShmPending, channel: int, parts: Sequence[torch.Tensor]) -> None:
        if parts:
            kept: list[torch.Tensor] = []
            table = self._table(parts, kept, _MOST_INLINE)
            for peer in self.peers:
                self._owe(pending, peer, channel)
            self._write(pending, channel, [table], kept, shared=True)

    def _owe(self, pending: ShmPending, peer: Peer, channel: int) -> None:
        slot = (peer.rank, channel % CHANNELS)
        self._sent[slot] += 1
        pending.owed.append((peer, channel, self._sent[slot]))

    def _table(
        self, parts: Sequence[torch.Tensor], kept: list[torch.Tensor], budget: int
    ) -> list[tuple[int, int, torch.Tensor]]:
        table = []
        for part in parts:
            data = flat_bytes(part)
            if len(data) <= min(INLINE_BYTES, budget):
                budget -= len(data)
                table.append((-1, 0, data))
                continue
            place = self._arena.locate(data)
            if place is None:
                staged = self._staged(data)
                place, data = self._arena.locate(staged), staged
                assert place is not None
            kept.append(data)
            self.bytes_sent += len(data)
            table.append((*place, data))
        return table

    def _staged(self, data: torch.Tensor) -> torch.Tensor:
        try:
            return self._arena.empty(len(data)).copy_(data)
        except OSError as error:
            raise CommError(
                f"rank {self.rank} has no shared memory for {len(data):,} bytes: {error.strerror}"
            ) from error

    def _write(self, pending: ShmPending, channel: int, tables: Any, kept: list[torch.Tensor], shared: bool) -> None:
        if not pending.owed:
            return
        header, data = encode(pending.verb, channel, tables, shared)
        if not self.box.room(self._boxes, self.number, header[0]):
            self.until(
                lambda: self.box.room(self._boxes, self.number, header[0]),
                pending.what,
                lambda: set(self._peer),
                pending.call,
            )
        self.box.post(header, data)
        if kept:
            self._kept.append((pending, kept))
        else:
            pending.owed = []  # all of it lies in the message

    # Receiving

    def _expect(self, peer: Peer, channel: int, pending: ShmPending, take: Taker) -> None:
        pending.waits_for.add(peer.rank)
        self._expected[peer.rank, channel % CHANNELS].append((pending, take))
        self._match(peer, channel)

    def _match(self, peer: Peer, channel: int) -> None:
        slot = peer.rank, channel % CHANNELS
        arrived, expected = self._arrived[slot], self._expected[slot]
        while arrived and expected:
            message, (pending, take) = arrived.popleft(), expected.popleft()
            if message.verb != pending.verb:
                raise CommError(
                    f"rank {peer.rank} is in {VERBS[message.verb]} while rank {self.rank} is in {pending.what}: the "
                    "ranks' loops differ"
                )
            if take(peer, channel, message):
                self.box.mark_done(peer.number, channel)
            pending.waits_for.discard(peer.rank)

    def _progress(self) -> None:
        for peer in self.peers:

            def take(channel: int, message: Message, peer: Peer = peer) -> None:
                self._arrived[peer.rank, channel % CHANNELS].append(message)
                self._match(peer, channel)

            peer.box.read(self.box, peer.number, self.number, take)

    def _data(self, peer: Peer, message: Message) -> list[torch.Tensor]:
        return [
            peer.bytes_at(piece.file, piece.offset, piece.num_bytes) if piece.inline is None else piece.inline
            for piece in message.pieces
        ]

    def _copier(self, targets: Sequence[torch.Tensor], pending: ShmPending) -> Taker:
        def take(peer: Peer, channel: int, message: Message) -> bool:
            views = [flat_bytes(target) for target in targets]
            self._check(peer, pending, [len(view) for view in views], message)
            for view, data in zip(views, self._data(peer, message), strict=True):
                view.copy_(data)
            peer.forget(message)
            return True

        return take

    def _lender(self, call: Lent, sizes: Sequence[int], dtype: torch.dtype) -> Taker:
        def take(peer: Peer, channel: int, message: Message) -> bool:
            self._check(peer, call, [size * dtype.itemsize for size in sizes if size], message)
            found = iter(self._data(peer, message))
            nothing = torch.empty(0, dtype=dtype)
            call.parts[peer.rank] = [next(found).view(dtype) if size else nothing for size in sizes]
            call._taken.append((peer, channel, message))
            return False

        return take

    def _check(self, peer: Peer, pending: ShmPending, sizes: Sequence[int], message: Message) -> None:
        sent = [piece.num_bytes for piece in message.pieces]
        if sent != list(sizes):
            raise CommError(
                f"rank {peer.rank} sends {sent} bytes to rank {self.rank}, which expects {list(sizes)} in "
                f"{pending.what}: the ranks' loops or models differ"
            )

    # Waiting

    def until(
        self, ready: Callable[[], bool], what: str, missing: Callable[[], set[int]], call: int, must: bool = False
    ) -> None:
        """Takes what comes until `ready`.

        Args:
            ready: What is waited for.
            what: In which call.
            missing: Who has not come.
            call: Its number.
            must: Every rank has to call it, says the error.

        Raises:
            CommError: a peer has failed, is gone, or did not come in time.
        """
        looks, started, pause_s, looked_s = 0, 0.0, _SLEEP_S, 0.0
        while True:
            self._progress()
            if ready():
                if started:
                    self.flight.wait_for(0)
                return
            looks += 1
            if looks < self._spins:
                continue
            now = time.monotonic()
            if not started:
                started = now
                self.flight.wait_for(call)
            if now - started < _YIELDS_S:
                os.sched_yield()
                continue
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MOST_SLEEP_S)
            if now - looked_s > _LOOK_S:
                looked_s = now
                self._look(ready, what, missing, now - started, must)

    def _look(
        self, ready: Callable[[], bool], what: str, missing: Callable[[], set[int]], waited_s: float, must: bool
    ) -> None:
        bad = [peer for peer in self.peers if peer.rank in missing() and (peer.box.stopped or peer.gone)]
        if bad:
            self._progress()  # what it did before counts
            if ready():
                return
        if not bad and waited_s < self.timeout_s:
            return
        names = ", ".join(map(str, sorted(missing())))
        if bad and must:
            said = f"rank {self.rank} waits in {what} for nothing"
        elif bad:
            said = f"rank {self.rank} could not finish {what}: rank {', '.join(str(peer.rank) for peer in bad)} is gone"
        elif must:
            said = f"rank {self.rank} waited {self.timeout_s:g} s in {what}; missing: rank {names}"
        else:
            said = f"rank {self.rank} could not finish {what}: waited {self.timeout_s:g} s for rank {names}"
        raise CommError(
            said + self.outer.news(what, wait_s=0.0 if must and not bad else 2.0) + ". Every rank must call it" * must
        )
