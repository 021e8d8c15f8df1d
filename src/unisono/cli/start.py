"""What both doors share: how many processes, in which folder, and what is said when they fail."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from unisono.checkpoint.reader import find
from unisono.cli.examining import print_ranks
from unisono.cli.options import parse_span
from unisono.errors import InputError, Interrupted
from unisono.execution import Execution
from unisono.launch.elastic import Job, RanksFailed, launch
from unisono.launch.environment import Place, usable_cores
from unisono.launch.hosts import Hosts
from unisono.mirror import Mirror, is_remote, local_folder
from unisono.opening import resolve
from unisono.strategy.catalog import strategy_name
from unisono.strategy.threaded import ThreadedStrategy
from unisono.verify.hang import look

_RESTARTS_OF_HOSTS = 10  # without --max-restarts, where hosts may come and go: each one that is lost costs one


def devices() -> int:
    """Accelerators of this host, or its usable cores where there are none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else usable_cores()


def shared(how: Execution, nproc: int, hosts: Hosts | None = None) -> tuple[Execution, int]:
    """Checks, before anything is started, that `nproc` can do as they are told.

    Returns:
        What is meant, and how many processes: one under dp, where `nproc` counts what shares its work.

    Raises:
        InputError: they cannot.
    """
    if strategy_name(how.strategy) == ThreadedStrategy.name:
        how, nproc = replace(how, workers=nproc if how.workers is None else how.workers), 1
    return resolve(how, Place(0, nproc * (hosts.most if hosts else 1), 0, nproc))[0], nproc


@dataclass(frozen=True)
class Crew:
    """The processes of a job.

    Attributes:
        nproc: On this host, as asked; None for the default.
        least: How many of them are enough; None where all are needed.
        hosts: Where several hosts meet.
        max_restarts: How often they are started again.
    """

    nproc: int | None
    least: int | None
    hosts: Hosts | None
    max_restarts: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Crew:
        """Reads --nproc, --nnodes, --rdzv and --max-restarts.

        Raises:
            InputError: they make no sense, alone or together.
        """
        nproc, nnodes, rdzv = given.get("nproc"), given.get("nnodes"), given.get("rdzv")
        ranks = None if nproc is None else parse_span(nproc, "--nproc")
        nodes = parse_span(nnodes or "1", "--nnodes")
        hosts = None
        if nodes.most > 1 and rdzv is None:
            raise InputError(
                f"--nnodes {nnodes} needs --rdzv HOST:PORT, where the hosts meet: one of them, a free port"
            )
        if nodes.most > 1 and ranks is not None and ranks.elastic:
            raise InputError(
                f"--nproc {nproc} with --nnodes {nnodes}: where hosts come and go, give --nproc one number"
            )
        if rdzv is not None:
            hosts = Hosts.at(nodes.least, nodes.most, rdzv)
        least = ranks.least if ranks is not None and ranks.elastic else None
        by_itself = ranks.most - least if ranks and least else _RESTARTS_OF_HOSTS if nodes.elastic else 0
        return cls(ranks.most if ranks else None, least, hosts, given.get("max_restarts", by_itself))

    @property
    def elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.least is not None or (self.hosts is not None and self.hosts.least < self.hosts.most)

    def job(self, command: Sequence[str], nproc: int, **more: Any) -> Job:
        """What the launcher is to start."""
        return Job(
            command=command,
            nproc=nproc,
            least_nproc=self.least,
            hosts=self.hosts,
            max_restarts=self.max_restarts,
            on_note=lambda note: print(f"unisono: {note}", file=sys.stderr),
            **more,
        )


def make_run_dir(given: str | None, name: str, hosts: Hosts | None = None, job_id: str | None = None) -> Path:
    """Makes a new run folder: the one given, or one named for the recipe and the time.

    Hosts that work together share one folder, which the first of them makes; so do a scheduler's tasks.

    Raises:
        InputError: there is one of that name, or it cannot be made.
    """
    if hosts is not None and given is None:
        raise InputError("several hosts need --run-dir, a folder that all of them see")
    together = hosts is not None or job_id is not None
    stem = Path(given) if given else Path("runs") / f"{name}-{job_id or f'{datetime.now():%Y%m%d-%H%M%S}'}"
    for number in range(1, 100):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=together)
        except FileExistsError:
            if given:
                raise InputError(f"run folder {folder} exists: choose another, or move it away") from None
        except OSError as error:
            raise InputError(f"run folder {folder} cannot be made: {error.strerror}") from None
        else:
            return folder
    raise InputError(f"no free run folder beside {stem}: give one with --run-dir")


def mirrored(given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Takes a run's folder that is named by a URL for one on the disk, and says which URL it is.

    What is to be resumed from there is brought to the disk first.
    """
    found, url = dict(given), None
    for name in ("resume", "run_dir"):
        if is_remote(place := found.get(name) or ""):
            url, folder = place, local_folder(place)
            found[name] = str(folder)
            if name == "resume":
                Mirror(url, folder).pull()
    return found, url


def resumed_folder(named: str) -> Path:
    """Returns the run's folder of what is to be resumed: a run's folder, or one checkpoint.

    Raises:
        InputError: there is nothing.
    """
    place = Path(named)
    return place if (place / "logs").is_dir() or (place / "metrics.jsonl").exists() else find(place)[0].parent


def launch_ranks(job: Job, debug: bool) -> None:
    """Launches, and shows the first failing rank's own traceback before the error goes on.

    Raises:
        RanksFailed: a rank failed.
        Interrupted: a rank was told to stop, and all have.
        Signalled: SIGINT or SIGTERM came.
    """
    try:
        with _table_on_signal(job.run_dir):
            launch(job)
    except RanksFailed as error:
        first = error.failures[0]
        if first.consequence or first.killed:  # no rank says why
            _print_ranks(job.run_dir, ask=False, killed={one.rank for one in error.failures if one.killed})
        if first.exit_code == Interrupted.exit_code:
            raise Interrupted(first.message) from error
        if first.traceback and (debug or first.exit_code != InputError.exit_code):
            print(f"\nrank {first.rank} failed first:\n{first.traceback.rstrip()}\n", file=sys.stderr)
        raise


@contextlib.contextmanager
def _table_on_signal(run_dir: Path | None) -> Iterator[None]:
    """Inside, SIGUSR2 prints where the ranks are, and the run goes on."""
    number = getattr(signal, "SIGUSR2", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: _print_ranks(run_dir, ask=True))
    try:
        yield
    finally:
        signal.signal(number, before)


def _print_ranks(run_dir: Path | None, *, ask: bool, killed: Collection[int] | None = None) -> None:
    if run_dir is not None:
        with contextlib.suppress(InputError):  # there are no records: one rank, or it has not begun
            print_ranks(look(run_dir, ask=ask, killed=killed), Console(stderr=True))
