"""Starts the ranks of one host through torch elastic, in this process."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from unisono.errors import UnisonoError
from unisono.launch.environment import JOB_VARIABLE
from unisono.launch.failure import Failure, read_failures
from unisono.launch.memory import shared_memory_folder


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher needs to know.

    Attributes:
        command: Program and arguments of every rank.
        nproc: Ranks on this host.
        threads: Intra-op threads a rank.
        run_dir: Folder of the run, or None.
        mirror: URL of the same in an object store, or None.
        flags: Command-line values for the ranks' `unisono.init`.
        max_restarts: How often a failed job is started again.
    """

    command: Sequence[str]
    nproc: int
    threads: int = 1
    run_dir: Path | None = None
    mirror: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 0


class RanksFailed(UnisonoError):
    """Ranks ended badly; `failures` holds the cause first."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        super().__init__(f"rank {failures[0].rank} failed: {failures[0].message}")
        self.exit_code = failures[0].exit_code


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
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder, shared_memory_folder() as memory:
        errors = _ErrorFiles(Path(folder))
        environment = {
            JOB_VARIABLE: json.dumps(
                {
                    "run_dir": str(job.run_dir) if job.run_dir else None,
                    "mirror": job.mirror,
                    "error_dir": folder,
                    "memory_dir": None if memory is None else str(memory),
                    "launcher": os.getpid(),
                    "flags": dict(job.flags),
                }
            ),
            "OMP_NUM_THREADS": str(job.threads),
            "MKL_NUM_THREADS": str(job.threads),
        }
        os.environ.update(environment)
        _quieten_elastic()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.nproc,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: whichever is free
            run_id=Path(folder).name,
            local_addr="localhost",
            max_restarts=job.max_restarts,
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
        )
        for rank, failure in error.failures.items()
        if rank not in told
    ]
