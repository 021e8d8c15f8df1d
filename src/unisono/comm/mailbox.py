"""Mailbox: what one rank tells the others of its host, in memory that all of them map.

Each rank writes to its own mailbox only: a log of messages (a ring), how far it has read the others' logs, and how many
of their messages it has done with. A message says where its data lie; small data lie in it.

Order of memory: data are written before the word that announces them, and read after it. x86 keeps that order by
itself. Elsewhere (Arm) `fence` makes it: two passes of a lock, since a write may slip into one locked section from
either side, and not past two (C11 acquire and release; POSIX 4.12 says the same of its locks).
"""

from __future__ import annotations

import platform
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.comm.arena import bytes_of, make_file, map_file

RING_BYTES = 512 * 1024
INLINE_BYTES = 4096
CHANNELS = 1021  # numbers of channels are taken modulo this; those that meet go in the order of both
_HEAD, _STATE, _BARRIERS, _TOKEN, _RANKS = 0, 1, 2, 3, 8  # words
_INLINE = -1

if platform.machine() in ("x86_64", "AMD64", "i686"):

    def fence() -> None:
        """See the module's docstring."""
else:
    _lock = threading.Lock()

    def fence() -> None:
        """See the module's docstring."""
        for _ in range(2):
            with _lock:
                pass


@dataclass(frozen=True)
class Piece:
    """Where some of a message's data lie: in a file of the sender's, or here."""

    file: int
    offset: int
    num_bytes: int
    inline: torch.Tensor | None = None


@dataclass(frozen=True)
class Message:
    """What has come from a rank: which verb it is in, and where the data are."""

    verb: int
    pieces: Sequence[Piece]


class Mailbox:
    """One rank's, as its owner or another sees it.

    Args:
        memory: Of `make` or `see`.
        num_ranks: Of the host.
    """

    def __init__(self, memory: object, num_ranks: int) -> None:
        view = memoryview(memory)  # type: ignore[arg-type]
        words = (_RANKS + num_ranks * (1 + CHANNELS)) * 8
        self._base = -(-words // 4096) * 4096
        self.words = view[: self._base].cast("q")
        self._ring = view[self._base : self._base + RING_BYTES]
        self._bytes = bytes_of(memory)[self._base : self._base + RING_BYTES]  # type: ignore[arg-type]
        self._num_ranks = num_ranks

    @staticmethod
    def make(num_ranks: int) -> tuple[int, Mailbox]:
        """Makes this rank's own; returns its file too.

        Raises:
            OSError: there is no such memory.
        """
        words = (_RANKS + num_ranks * (1 + CHANNELS)) * 8
        file, memory = make_file(-(-words // 4096) * 4096 + RING_BYTES)
        return file, Mailbox(memory, num_ranks)

    @staticmethod
    def see(pid: int, file: int, num_ranks: int, token: int) -> Mailbox:
        """Maps another rank's.

        Raises:
            OSError: it is not to be seen from here.
        """
        box = Mailbox(map_file(pid, file), num_ranks)
        if box.words[_TOKEN] != token:
            raise OSError("another process has that number here")
        return box

    def sign(self, token: int) -> None:
        """Writes what `see` compares."""
        self.words[_TOKEN] = token

    @property
    def stopped(self) -> bool:
        return self.words[_STATE] != 0

    def stop(self) -> None:
        """Says that its owner has failed."""
        self.words[_STATE] = 1

    @property
    def barriers(self) -> int:
        """How many barriers its owner has come to."""
        return self.words[_BARRIERS]

    def come(self) -> None:
        """Comes to the next barrier."""
        fence()
        self.words[_BARRIERS] += 1

    def done(self, rank: int, channel: int) -> int:
        """How many messages of a rank in a channel its owner has done with."""
        return self.words[_RANKS + self._num_ranks + rank * CHANNELS + channel % CHANNELS]

    def mark_done(self, rank: int, channel: int) -> None:
        """The owner has done with one more."""
        fence()
        self.words[_RANKS + self._num_ranks + rank * CHANNELS + channel % CHANNELS] += 1

    def read_to(self, rank: int) -> int:
        """How far its owner has read a rank's log."""
        return self.words[_RANKS + rank]

    # The log

    def room(self, readers: Sequence[Mailbox], rank: int, num_bytes: int) -> bool:
        """Whether a message of `num_bytes` fits, given how far the readers are; else it has to wait."""
        head = self.words[_HEAD]
        return head + 2 * num_bytes - min(reader.read_to(rank) for reader in readers) <= RING_BYTES

    def post(self, header: Sequence[int], data: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Writes a message to the log.

        Args:
            header: Words; the first is the message's length in bytes, a multiple of 8.
            data: What lies in it: offsets from its start, and bytes.
        """
        head, size = self.words[_HEAD], header[0]
        at = head % RING_BYTES
        if at + size > RING_BYTES:  # the rest of the ring stays empty
            struct.pack_into("q", self._ring, at, -(RING_BYTES - at))
            head, at = head + RING_BYTES - at, 0
        struct.pack_into(f"{len(header)}q", self._ring, at, *header)
        for offset, part in data:
            self._bytes[at + offset : at + offset + len(part)].copy_(part)
        fence()
        self.words[_HEAD] = head + size

    def read(self, own: Mailbox, rank: int, number: int, take: Callable[[int, Message], None]) -> None:
        """Reads what is new in this mailbox, for the rank that owns `own`.

        Args:
            own: Where to note how far it was read.
            rank: This mailbox's, counted over the host.
            number: The reader's.
            take: Called with the channel and each message that has something for the reader.
        """
        tail, head = own.read_to(rank), self.words[_HEAD]
        if tail == head:
            return
        fence()
        while tail < head:
            at = tail % RING_BYTES
            (size,) = struct.unpack_from("q", self._ring, at)
            if size < 0:
                tail -= size
                continue
            verb, channel, table = self._entry(at, number)
            if table is not None:
                take(channel, Message(verb, self._pieces(at, table)))
            tail += size
        fence()
        own.words[_RANKS + rank] = tail

    def _entry(self, at: int, number: int) -> tuple[int, int, int | None]:
        _, verb, channel, tables = struct.unpack_from("4q", self._ring, at)
        table = at + 32 if tables == 0 else at + struct.unpack_from("q", self._ring, at + 32 + 8 * number)[0]
        return verb, channel, None if table == at else table

    def _pieces(self, at: int, table: int) -> list[Piece]:
        (count,) = struct.unpack_from("q", self._ring, table)
        words = struct.unpack_from(f"{3 * count}q", self._ring, table + 8)
        found = []
        for k in range(0, 3 * count, 3):
            file, offset, size = words[k : k + 3]
            inline = self._bytes[at + offset : at + offset + size].clone() if file == _INLINE else None
            found.append(Piece(file, offset, size, inline))
        return found


def encode(
    verb: int, channel: int, tables: Sequence[Sequence[tuple[int, int, torch.Tensor]] | None], shared: bool
) -> tuple[list[int], list[tuple[int, torch.Tensor]]]:
    """Lays a message out.

    Args:
        verb: Which.
        channel: Which.
        tables: For each rank of the host the pieces for it (file, offset, bytes), file -1 for those to be written into
            the message; None for nothing. If shared, one table for all.
        shared: See above.

    Returns:
        The header and the data, for `Mailbox.post`.
    """
    header = [0, verb, channel, 0 if shared else len(tables), *([] if shared else [0] * len(tables))]
    inline: list[tuple[int, torch.Tensor]] = []
    for number, table in enumerate(tables):
        if table is None:
            continue
        if not shared:
            header[4 + number] = 8 * len(header)
        header.append(len(table))
        for file, offset, part in table:
            if file == _INLINE:
                inline.append((len(header) + 1, part))
            header += [file, offset, len(part)]
    size = 8 * len(header)
    data = []
    for place, part in inline:
        header[place] = size
        data.append((size, part))
        size += -(-len(part) // 8) * 8
    header[0] = size
    return header, data
