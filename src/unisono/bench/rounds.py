"""Rounds: the systems do a few steps each, in turn, again and again, since a machine's speed drifts."""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.bench.workloads import WORKLOADS
from unisono.errors import UnisonoError
from unisono.launch.environment import environment_of_rank
from unisono.launch.hosts import free_port

_START_S, _ROUND_S = 180.0, 120.0
_AIM_S = 0.6  # of one round of a step without communication


class BenchError(UnisonoError):
    """A system could not be measured."""


@dataclass(frozen=True)
class Row:
    """What was measured of a system.

    Attributes:
        step_s: Median seconds a step, of the slowest rank.
        ratio_to_plain: Median over the rounds of its time to that of a step without communication.
        spread: Least and most of these.
        peak_rss_mb: Of a rank, at the end; pages that ranks share count for each.
        first_step_s: From the start of the processes to the end of the first step.
        wire_bytes: Sent through the network (loopback) in one step, by all ranks.
    """

    workload: str
    system: str
    nproc: int
    step_s: float
    ratio_to_plain: float
    spread: tuple[float, float]
    peak_rss_mb: float
    first_step_s: float
    wire_bytes: int


class System:
    """The ranks of one system, waiting to be told.

    Args:
        name: Its.
        workload: What it trains.
        nproc: Ranks.
    """

    def __init__(self, name: str, workload: str, nproc: int) -> None:
        self.name, self.nproc = name, nproc
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        started = time.perf_counter()
        port = free_port()
        self._ranks = [self._start(workload, rank, port) for rank in range(nproc)]
        try:
            self._answers(_START_S)
        except BaseException:
            self.close()
            raise
        self.first_step_s = time.perf_counter() - started

    def _start(self, workload: str, rank: int, port: int) -> subprocess.Popen[str]:
        environment = environment_of_rank(rank, self.nproc, port)
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        return subprocess.Popen(
            [sys.executable, "-m", "unisono.bench.rank", self.name, workload],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """Waits for one line of every rank."""
        deadline, found = time.monotonic() + timeout_s, []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            there, _, _ = select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = rank.stdout.readline() if there else ""
            if not line:
                raise BenchError(f"{self.name}: rank {number} {self._reason(there, timeout_s)}")
            found.append(json.loads(line))
        return found

    def _reason(self, ended: Sequence[Any], timeout_s: float) -> str:
        self._log.seek(0)
        last = (self._log.read().strip().splitlines() or ["without a word"])[-1]
        return f"ended: {last[:300]}" if ended else f"gave no answer in {timeout_s:g} s"

    def _tell(self, line: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.write(line + "\n")

    def steps(self, number: int) -> tuple[float, int]:
        """Seconds a step of the slowest rank, and bytes that went through the network."""
        before = _network_bytes()
        self._tell(f"go {number}")
        seconds = max(answer["seconds"] for answer in self._answers(_ROUND_S)) / number
        return seconds, (_network_bytes() - before) // number

    def end(self) -> float:
        """Ends the ranks; returns the largest peak of memory, in MB."""
        self._tell("end")
        peak: float = max(answer["peak_rss_mb"] for answer in self._answers(_ROUND_S))
        self._tell("")
        self.close(kill=False)
        return peak

    def close(self, kill: bool = True) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            if kill:
                rank.kill()
            with contextlib.suppress(BrokenPipeError):
                rank.communicate()
        self._log.close()


def _network_bytes() -> int:
    """Sent through the loopback interface since the system began; 0 where it cannot be said."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 8_000_000_000
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def batches(systems: Sequence[str], workload: str, nproc: int) -> list[list[str]]:
    """Divides systems into those that fit in memory together; "plain" is in all."""
    others = [system for system in systems if system != "plain"]
    room = max(1, int(0.7 * _free_memory()) // (nproc * WORKLOADS[workload].bytes_a_rank) - 1)
    return [["plain", *others[start : start + room]] for start in range(0, max(1, len(others)), room)]


def measure(
    systems: Sequence[str], workload: str, nproc: int, rounds: int, on_event: Callable[[str], None]
) -> Iterator[Row]:
    """Measures systems on one workload.

    Args:
        systems: Their names; "plain" is measured in any case.
        workload: Its name.
        nproc: Ranks of each.
        rounds: How often each has its turn.
        on_event: Told what is being done, and what failed.
    """
    for number, batch in enumerate(batches(systems, workload, nproc)):
        alive: dict[str, System] = {}
        try:
            for name in batch:
                on_event(f"{workload}: starting {name}")
                try:
                    alive[name] = System(name, workload, nproc)
                except BenchError as error:
                    on_event(f"failed: {error}")
            yield from (row for row in _turns(alive, workload, rounds, on_event) if row.system != "plain" or not number)
        finally:
            for system in alive.values():
                system.close()


def _turns(alive: dict[str, System], workload: str, rounds: int, on_event: Callable[[str], None]) -> list[Row]:
    plain = alive.get("plain")
    if plain is None:
        raise BenchError(f"{workload}: not even a step without communication could be measured")
    plain.steps(2)
    number = max(2, round(_AIM_S / plain.steps(2)[0]))
    times: dict[str, list[float]] = {name: [] for name in alive}
    sent = dict.fromkeys(alive, 0)
    for turn in range(rounds + 1):
        names = list(alive)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            on_event(f"{workload}: round {turn} of {rounds}, {name}")
            try:
                seconds, sent[name] = alive[name].steps(number)
            except BenchError as error:
                on_event(f"failed: {error}")
                alive.pop(name).close()
                continue
            if turn:  # the first warms up
                times[name].append(seconds)
    found = []
    for name in list(alive):
        ratios = [value / base for value, base in zip(times[name], times["plain"], strict=True)]
        system = alive.pop(name)
        found.append(
            Row(
                workload=workload,
                system=name,
                nproc=system.nproc,
                step_s=statistics.median(times[name]),
                ratio_to_plain=statistics.median(ratios),
                spread=(min(ratios), max(ratios)),
                peak_rss_mb=system.end(),
                first_step_s=system.first_step_s,
                wire_bytes=sent[name],
            )
        )
    return found
