"""Flight record: the last calls of a rank, where others can read them when it hangs, and after it has died.

A small file that is mapped into memory: to note a call is to write some bytes (2 us), nothing is done
for readers, and what was written stays when the process is killed.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FLIGHT = "flight"  # a run's folder of them
ENTRIES = 256
_HEADER = struct.Struct("<8sIIQ?64sddQd?240s")
_CALL = struct.Struct("<Q24sqqqdd")
_MAGIC = b"unisono1"
_BYTES = _HEADER.size + ENTRIES * _CALL.size


@dataclass(frozen=True)
class Call:
    """One call between ranks.

    Attributes:
        number: Counted from 1 on each rank.
        verb: Its name.
        num_bytes: That this rank sends.
        step: Updates done before it.
        micro_batch: Of the step; -1 for none.
        began_s: Seconds since the epoch.
        ended_s: Likewise; 0 while it is under way.
    """

    number: int
    verb: str
    num_bytes: int
    step: int
    micro_batch: int
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Flight:
    """What the record of a rank says.

    Attributes:
        rank: Whose.
        world_size: Of its job.
        pid: Of its process.
        answers: Whether SIGUSR2 makes it write down its Python stack.
        host: Where that runs.
        started_s: When it began, in seconds since the epoch.
        closed_s: When it ended in order; 0 if it has not.
        waits_in: The number of the call that it waits for; 0 if it does not.
        since_s: Since when.
        consequence: Whether it ended because another rank did, or did not come.
        failed: Why it ended, in one sentence.
        calls: The last ones, in order.
    """

    rank: int
    world_size: int
    pid: int
    answers: bool
    host: str
    started_s: float
    closed_s: float
    waits_in: int
    since_s: float
    consequence: bool
    failed: str
    calls: list[Call]


class FlightRecord:
    """Writes one; see the module's docstring.

    At first in memory that nobody else can see.

    Args:
        rank: This one.
        world_size: Of the job.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._place = (rank, world_size)
        self._host = socket.gethostname().encode()[:64]
        self._started, self._count, self._step, self._micro = time.time(), 0, 0, -1
        self._waits_in, self._since, self._closed = 0, 0.0, 0.0
        self._consequence, self._failed = False, b""
        self._memory = mmap.mmap(-1, _BYTES)
        self._folder: Path | None = None
        self._stack: TextIO | None = None
        self._write_header()

    def keep_in(self, folder: Path) -> None:
        """Moves it to a file of the folder, where others find it, and says how to get this rank's Python stack.

        Where that cannot be, all stays as it was: a record is no reason to fail.
        """
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / flight_name(self._place[0])
            number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(number, 0, _BYTES)  # or a write, later, would end in a signal
                memory = mmap.mmap(number, _BYTES)
            finally:
                os.close(number)
            memory[:] = self._memory[:]
            self._memory, self._folder = memory, folder
            self._answer_in(file.with_suffix(".stack"))
            self._write_header()

    def _answer_in(self, file: Path) -> None:
        # By the signal's own C code, for a rank that hangs runs no Python; and only where the signal is nobody else's.
        if hasattr(signal, "SIGUSR2") and self._stack is None and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            file.write_bytes(b"")
            self._stack = file.open("a")  # to append, since who asks empties it first
            faulthandler.register(signal.SIGUSR2, self._stack, all_threads=True)

    def _write_header(self) -> None:
        place = (*self._place, os.getpid(), self._stack is not None, self._host)
        rest = (self._started, self._closed, self._waits_in, self._since, self._consequence, self._failed)
        _HEADER.pack_into(self._memory, 0, _MAGIC, *place, *rest)

    def at(self, step: int, micro_batch: int) -> None:
        """Says where the loop is."""
        self._step, self._micro = step, micro_batch

    def begin(self, verb: str, num_bytes: int) -> int:
        """Notes a call; returns its number."""
        self._count += 1
        place = _HEADER.size + self._count % ENTRIES * _CALL.size
        fields = (self._count, verb.encode(), num_bytes, self._step, self._micro, time.time(), 0.0)
        _CALL.pack_into(self._memory, place, *fields)
        return self._count

    def end(self, number: int) -> None:
        """Notes that a call is done."""
        if number > self._count - ENTRIES:
            place = _HEADER.size + number % ENTRIES * _CALL.size
            struct.pack_into("<d", self._memory, place + _CALL.size - 8, time.time())

    def wait_for(self, number: int) -> None:
        """Notes that this rank waits for a call to be done; 0: that it does not."""
        self._waits_in, self._since = number, time.time() if number else 0.0
        self._write_header()

    def fail(self, reason: str, consequence: bool) -> None:
        """Notes why this rank ends, and whether that is because of another."""
        self._failed, self._consequence = reason.encode()[:240], consequence
        self._write_header()

    def close(self) -> None:
        """Notes that it ends in order, unless it has failed."""
        self._closed = time.time()
        self._write_header()
        if self._stack is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._stack.close()
            self._stack = None

    def ask_others(self) -> None:
        """Makes the host's other ranks write down their Python stacks, before one of them ends all."""
        if self._folder is not None:
            ask_for_stacks([flight for flight in read_flights(self._folder) if flight.pid != os.getpid()], self._folder)


def flight_name(rank: int) -> str:
    """The file of a rank's record in its folder; its stack has the suffix ".stack" instead."""
    return f"rank-{rank}.flight"


def read_flights(folder: Path) -> list[Flight]:
    """Returns the records of the last job that wrote to a folder, by rank."""
    found = [flight for file in folder.glob("rank-*.flight") if (flight := _read(file)) is not None]
    newest = max(found, key=lambda flight: flight.started_s, default=None)
    same = [flight for flight in found if newest is not None and flight.world_size == newest.world_size]
    return sorted((flight for flight in same if flight.rank < flight.world_size), key=lambda flight: flight.rank)


def lives(flight: Flight) -> bool | None:
    """Whether a rank's process is there; None where it is another host's."""
    if flight.host != socket.gethostname():
        return None
    try:
        os.kill(flight.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ask_for_stacks(flights: list[Flight], folder: Path) -> None:
    """Makes ranks of this host write down their Python stacks, and waits for a moment until they have."""
    asked = [flight for flight in flights if flight.answers and not flight.closed_s and lives(flight)]
    for flight in asked:
        with suppress(OSError):
            os.truncate(folder / flight_name(flight.rank).replace(".flight", ".stack"), 0)
            os.kill(flight.pid, signal.SIGUSR2)
    if asked:
        time.sleep(0.3)


def _read(file: Path) -> Flight | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES or not data.startswith(_MAGIC):
        return None
    _, rank, world_size, pid, answers, host, *times, failed = _HEADER.unpack_from(data)
    started_s, closed_s, waits_in, since_s, consequence = times
    calls = [_CALL.unpack_from(data, _HEADER.size + slot * _CALL.size) for slot in range(ENTRIES)]
    return Flight(
        rank,
        world_size,
        pid,
        answers,
        _text(host),
        started_s,
        closed_s,
        waits_in,
        since_s,
        consequence,
        _text(failed),
        [Call(number, _text(verb), *rest) for number, verb, *rest in sorted(calls) if number],
    )


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
