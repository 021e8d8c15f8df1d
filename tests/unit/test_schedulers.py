"""Slurm and MPI, in torchrun's words."""

from __future__ import annotations

import pytest

from unisono.errors import InputError
from unisono.launch.environment import detect
from unisono.launch.schedulers import first_host

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[01-03]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "99",
}


def test_a_task_of_srun() -> None:
    found = detect(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 5, 1, 2)
    assert (found.origin, found.job_id) == ("slurm", "4711-0")
    scheme, _, rest = found.rendezvous.partition("://n01:")
    assert scheme == "tcp" and 20_000 <= int(rest) < 30_000
    assert detect({**SLURM, "SLURM_PROCID": "0"}).rendezvous == found.rendezvous
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).rendezvous != found.rendezvous
    assert detect({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rendezvous == "tcp://10.0.0.1:29500"
    last = {**SLURM, "SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}
    assert detect(last).local_world_size == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash, in an allocation of five
    ],
)
def test_what_is_no_task_of_several_is_alone(changes: dict[str, str]) -> None:
    assert detect({**SLURM, **changes}).world_size == 1


def test_a_shell_of_salloc_is_alone() -> None:
    assert detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n1"}).origin == "alone"


def test_torchrun_beneath_srun_wins() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    found = detect({**SLURM, **torchrun, "MASTER_ADDR": "n01", "MASTER_PORT": "29500"})
    assert (found.origin, found.rank, found.world_size, found.rendezvous) == ("torchrun", 0, 2, "env://")


def test_a_task_of_mpirun() -> None:
    found = detect(OPEN_MPI)
    assert (found.origin, found.rank, found.world_size, found.local_rank) == ("mpi", 1, 2, 1)
    assert found.rendezvous.startswith("tcp://127.0.0.1:2")
    hydra = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "m"}
    assert (detect(hydra).local_world_size, detect(hydra).rendezvous[:7]) == (2, "tcp://m")


def test_mpi_on_several_hosts_has_to_be_told_where() -> None:
    with pytest.raises(InputError, match="set MASTER_ADDR"):
        detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})


def test_a_pod_of_kubernetes_is_one_process() -> None:
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "m",
        "MASTER_PORT": "1",
    }
    found = detect(pod)
    assert (found.origin, found.rank, found.local_rank, found.local_world_size) == ("kubernetes", 1, 0, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[01-03,7],m1", "n01"), ("gpu[7,9]", "gpu7"), ("a,b", "a"), ("r[1-2]n", "r1n"), ("", "")],
)
def test_the_first_of_a_list_of_hosts(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
