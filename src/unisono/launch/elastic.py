"""Starts the ranks of one host through torch elastic, in this process."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from unisono.errors import CommError, UnisonoError
from unisono.launch.environment import JOB_VARIABLE
from unisono.launch.failure import Failure, read_failures
from unisono.launch.hosts import Hosts, interface_of
from unisono.launch.memory import shared_memory_folder

_JOIN_S = 300  # how long a host waits for the others


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher needs to know.

    Attributes:
        command: Program and arguments of every rank.
        nproc: Ranks on this host.
        least_nproc: Ranks that are enough: a rank that is killed is not replaced while so many are left.
        hosts: Where the launchers of several hosts meet; None for a job of this one.
        threads: Intra-op threads a rank.
        run_dir: Folder of the run, or None.
        mirror: URL of the same in an object store, or None.
        flags: Command-line values for the ranks' `unisono.init`.
        max_restarts: How often a failed job is started again.
        on_note: Called with a sentence for the user.
    """

    command: Sequence[str]
    nproc: int
    least_nproc: int | None = None
    hosts: Hosts | None = None
    threads: int = 1
    run_dir: Path | None = None
    mirror: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 0
    on_note: Callable[[str], None] = lambda note: None


class RanksFailed(UnisonoError):
    """Ranks ended badly; `failures` holds the cause first."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        super().__init__(f"rank {failures[0].rank} failed: {failures[0].message}")
        self.exit_code = failures[0].exit_code

    @property
    def killed(self) -> list[Failure]:
        """Those that ended without a word, and not because a peer did: out of memory, say."""
        return [failure for failure in self.failures if failure.killed]


class Signalled(UnisonoError):
    """The launcher was told to stop (SIGINT, SIGTERM) and has stopped its ranks."""

    exit_code = 130


class _ErrorFiles(LogsSpecs):
    """Only error files: the ranks keep their own logs, and elastic's default leaves folders in /tmp."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def paths(self, nproc: int) -> dict[int, str]:
        return {rank: str(self.folder / f"rank-{rank}.error.json") for rank in range(nproc)}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for path in self.paths(len(envs)).values():  # of a start before
            Path(path).unlink(missing_ok=True)
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, nowhere, nowhere, self.paths(len(envs)))

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)


def launch(job: Job) -> None:
    """Runs the job to its end.

    Raises:
        RanksFailed: a rank failed; all others have been ended.
        Signalled: SIGINT or SIGTERM came; all ranks have been ended.
    """
    _quieten_elastic()
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder, shared_memory_folder() as memory:
        nproc, starts = job.nproc, 0
        while True:
            try:
                _start(replace(job, nproc=nproc), Path(folder), memory, starts)
            except RanksFailed as error:
                # Others are not by chance: wrong input, or a stop.
                if job.least_nproc is None or starts >= job.max_restarts or error.exit_code != 1:
                    raise
                left = max(job.least_nproc, nproc - len(error.killed))
                job.on_note(f"{error}; {left} of {nproc} processes go on")
                nproc, starts = left, starts + 1
            else:
                return


def _start(job: Job, folder: Path, memory: Path | None, starts: int) -> None:
    errors = _ErrorFiles(folder)
    word = {
        "run_dir": str(job.run_dir) if job.run_dir else None,
        "mirror": job.mirror,
        "error_dir": str(folder),
        "memory_dir": None if memory is None else str(memory),
        "launcher": os.getpid(),
        "starts": starts,
        "flags": dict(job.flags),
    }
    environment = {
        JOB_VARIABLE: json.dumps(word),
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
    }
    os.environ.update(environment)
    config = LaunchConfig(
        **_meeting(job.hosts, folder.name),
        nproc_per_node=job.nproc,
        rdzv_backend="c10d",
        max_restarts=0 if job.least_nproc else job.max_restarts,
        monitor_interval=0.1,
        logs_specs=errors,
        shutdown_timeout=30,
    )
    try:
        elastic_launch(config, job.command[0])(*job.command[1:])
    except ChildFailedError as error:
        found = read_failures(map(Path, errors.paths(job.nproc).values()))
        raise RanksFailed(sorted(found + _silent(error, {failure.rank for failure in found}))) from None
    except SignalException:
        raise Signalled("interrupted") from None
    except RendezvousError as error:
        assert job.hosts is not None
        where = f"{job.hosts.address}:{job.hosts.port}"
        reason = "not enough hosts came" if isinstance(error, RendezvousTimeoutError) else f"{where} does not answer"
        raise CommError(
            f"the hosts could not meet at {where}: {reason}; start the same command on {job.hosts.least} or more, "
            "first on the one with that address"
        ) from error


def _meeting(hosts: Hosts | None, name: str) -> dict[str, Any]:
    """What elastic needs to know of where its agents meet."""
    if hosts is None:
        endpoint = "localhost:0"  # port 0: whichever is free
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            "rdzv_endpoint": endpoint,
            "run_id": name,
            "local_addr": "localhost",
        }
    address = hosts.own_address()
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A rank 0 that lives on would keep its store from the last meeting, and a fresh agent wait for the new one's
    # address (torch 2.13, dynamic_rendezvous.py: _bootstrap_store_info is cached).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        "min_nodes": hosts.least,
        "max_nodes": hosts.most,
        "rdzv_endpoint": f"{hosts.address}:{hosts.port}",
        "rdzv_configs": {
            "is_host": hosts.keeps_it,
            "join_timeout": _JOIN_S,
            "last_call_timeout": 2,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
        },
        "run_id": "unisono",
        "local_addr": address,
    }


def _quieten_elastic() -> None:
    """Elastic reports each failure and signal in its own words; we print the cause ourselves, once."""
    for name in [*logging.root.manager.loggerDict]:  # some of its loggers have a level of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _silent(error: ChildFailedError, told: set[int]) -> list[Failure]:
    """Ranks that ended without a word: killed, or crashed in native code."""
    return [
        Failure(
            consequence=failure.exitcode == -signal.SIGTERM,  # so the agent ends the others
            time_s=float(failure.timestamp),
            rank=rank,
            exit_code=1,
            message=f"{failure.message} (exit code {failure.exitcode})",
            traceback="",
            killed=failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM,
        )
        for rank, failure in error.failures.items()
        if rank not in told
    ]
