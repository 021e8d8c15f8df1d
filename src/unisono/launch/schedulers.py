"""Slurm and MPI, in torchrun's words: who am I among the tasks that they have started?"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import InputError

_PORTS = range(20_000, 30_000)  # where a job's port lies, below those that systems give out by themselves


@dataclass(frozen=True)
class Task:
    """One task of a scheduler's job.

    Attributes:
        origin: Which scheduler.
        variables: What torchrun would have set.
        job: The scheduler's word for the job.
    """

    origin: str
    variables: Mapping[str, str]
    job: str


def task_of(env: Mapping[str, str]) -> Task | None:
    """Finds the scheduler whose task this process is, if it is one of several.

    Raises:
        InputError: it is, and where the tasks are to meet cannot be known.
    """
    return _slurm(env) or _open_mpi(env) or _pmi(env)


def _slurm(env: Mapping[str, str]) -> Task | None:
    # A batch script, and a shell that salloc has opened, know how many tasks there could be, and are no step of them.
    if not env.get("SLURM_STEP_ID") or "SLURM_PROCID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    job = f"{env.get('SLURM_JOB_ID', '0')}-{env['SLURM_STEP_ID']}"
    here = _tasks_here(env.get("SLURM_STEP_TASKS_PER_NODE", ""), int(env.get("SLURM_NODEID", "0")))
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    alone = here == env["SLURM_STEP_NUM_TASKS"]  # a host's name need not mean anything to the host itself
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(hosts))
    return _task(
        env,
        "slurm",
        env["SLURM_PROCID"],
        env["SLURM_STEP_NUM_TASKS"],
        env.get("SLURM_LOCALID", "0"),
        here,
        address,
        job,
    )


def _open_mpi(env: Mapping[str, str]) -> Task | None:
    rank, size = env.get("OMPI_COMM_WORLD_RANK"), env.get("OMPI_COMM_WORLD_SIZE", "1")
    if rank is None or int(size) < 2:
        return None
    here = env.get("OMPI_COMM_WORLD_LOCAL_SIZE", size)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if here == size else "")
    return _task(env, "mpi", rank, size, env.get("OMPI_COMM_WORLD_LOCAL_RANK", rank), here, address, job)


def _pmi(env: Mapping[str, str]) -> Task | None:
    rank, size = env.get("PMI_RANK"), env.get("PMI_SIZE", "1")
    if rank is None or int(size) < 2:
        return None
    here = env.get("MPI_LOCALNRANKS", size)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if here == size else "")
    return _task(env, "mpi", rank, size, env.get("MPI_LOCALRANKID", rank), here, address, env.get("PMI_ID", ""))


def _task(
    env: Mapping[str, str], origin: str, rank: str, size: str, local: str, here: str, address: str, job: str
) -> Task:
    if not address:
        raise InputError(
            f"{origin} has started rank {rank} of {size} on several hosts, and does not say where rank 0 is: set "
            "MASTER_ADDR to its host (mpirun -x MASTER_ADDR=...)"
        )
    port = env.get("MASTER_PORT") or str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)])
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return Task(origin, variables, job)


def _tasks_here(counts: str, node: int) -> str:
    """Reads Slurm's "2(x3),1": two tasks on each of three hosts, one on a fourth."""
    found: list[str] = []
    for part in counts.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            found += [match[1]] * int(match[2] or 1)
    return found[node] if node < len(found) else "1"


def first_host(nodes: str) -> str:
    """Returns the first of Slurm's list of hosts: "n[01-03,7],m1" begins with n01."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return f"{match[1]}{match[2] or ''}{match[3]}" if match else ""
