"""The only reader of environment variables: which rank am I, of how many, started by whom?"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import InputError
from unisono.launch.schedulers import task_of

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOB_VARIABLE = "UNISONO_JOB"


@dataclass(frozen=True)
class Place:
    """A process's place in the job.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: Processes of the job.
        local_rank: Among those of this host.
        local_world_size: Processes on this host.
        origin: Who said so: "alone", "torchrun" (which our own launcher also is, beneath), "slurm", "mpi" or
            "kubernetes".
        restarts: How often the job was restarted.
        launcher_has_store: Whether the job's store lives in the launcher, and so outlives every rank.
        host: A word that is the same on all ranks of a host, and another one on each host.
        job_id: The launcher's or scheduler's word for the job.
        rendezvous: Where the ranks meet, as torch has it.
        job: What our launcher hands over: "run_dir", "error_dir", "launcher" (its process id), "starts" (how often
            it has started ranks before), "flags".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    origin: str = "alone"
    restarts: int = 0
    launcher_has_store: bool = False
    host: str = ""
    job_id: str = ""
    rendezvous: str = "env://"
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path | None:
        return Path(self.job["run_dir"]) if self.job.get("run_dir") else None

    @property
    def flags(self) -> Mapping[str, Any]:
        """Values given on the command line; they win over those in code."""
        return self.job.get("flags", {})  # type: ignore[no-any-return]


def detect(environ: Mapping[str, str] | None = None) -> Place:
    """Finds this process's place.

    Raises:
        InputError: the variables of a launcher are there by half, contradict each other, or cannot be read.
    """
    env = os.environ if environ is None else environ
    job, origin, job_id, rendezvous = _job(env), "torchrun", env.get("TORCHELASTIC_RUN_ID", ""), "env://"
    if not all(env.get(name) for name in TORCHRUN_VARIABLES):
        if task := task_of(env):
            env, origin, job_id = {**env, **task.variables}, task.origin, task.job
            rendezvous = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        elif env.get("KUBERNETES_SERVICE_HOST") and env.get("RANK") and not env.get("LOCAL_RANK"):
            env, origin = {"LOCAL_WORLD_SIZE": "1", **env, "LOCAL_RANK": "0"}, "kubernetes"  # one process a pod
    there = [name for name in TORCHRUN_VARIABLES if env.get(name)]
    if "RANK" not in there and "WORLD_SIZE" not in there and "LOCAL_RANK" not in there:
        return Place(job=job)
    if missing := [name for name in TORCHRUN_VARIABLES if name not in there]:
        raise InputError(
            f"the environment sets {', '.join(there)} but not {', '.join(missing)}: start with `unisono run` or "
            f"`torchrun`, or unset {'it' if len(there) == 1 else 'them'} for a run of one process"
        )
    rank, world_size, local_rank = (_integer(env, name) for name in TORCHRUN_VARIABLES[:3])
    if not 0 <= rank < world_size:
        raise InputError(f"the environment sets RANK={rank}, which is not below WORLD_SIZE={world_size}")
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else world_size
    if not 0 <= local_rank < local_world_size <= world_size:
        raise InputError(
            f"the environment sets LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size}, which do not fit "
            f"each other and WORLD_SIZE={world_size}"
        )
    restarts = _integer(env, "TORCHELASTIC_RESTART_COUNT") if env.get("TORCHELASTIC_RESTART_COUNT") else 0
    restarts += job.get("starts", 0)
    has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank,
        world_size,
        local_rank,
        local_world_size,
        origin,
        restarts,
        has_store,
        host=_host(env),
        job=job,
        job_id=job_id,
        rendezvous=rendezvous,
    )


def _host(env: Mapping[str, str]) -> str:
    """Two launchers on one machine count as two hosts: either may end without the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot} {env.get('GROUP_RANK', '')}"


def environment_of_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    """This process's variables, and those that torchrun would set for a rank of a job on this host."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
    }
    found = {name: value for name, value in os.environ.items() if name != JOB_VARIABLE}
    found |= {name: str(value) for name, value in place.items()}
    return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "unisono"}


def _job(env: Mapping[str, str]) -> dict[str, Any]:
    text = env.get(JOB_VARIABLE) or "{}"
    try:
        job = json.loads(text)
    except ValueError:
        job = None
    if not isinstance(job, dict):
        raise InputError(
            f"the environment sets {JOB_VARIABLE}={text!r}, which is no JSON object: unset it, `unisono run` sets it "
            "for the ranks that it starts"
        )
    return job


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise InputError(f"the environment sets {name}={env[name]!r}, which is no integer") from None


def tuning() -> dict[str, str]:
    """Variables that other programs' documentation tells people to set, and that change what a run does or costs."""
    found = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES"}
    starts = ("MALLOC_", "GLOO_", "NCCL_", "KMP_", "ATEN_", "TORCH_")
    return {name: value for name, value in sorted(os.environ.items()) if name in found or name.startswith(starts)}


def usable_cores() -> int:
    """Cores this process may run on: an affinity mask or a container's cpuset counts, the machine's total does not."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
