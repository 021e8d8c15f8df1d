"""Real schedulers: what they start trains as one process does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import need_slurm, slurm
from tests.commands import UNISONO, run, steps, wait_until
from tests.e2e.test_resume import RECIPE, TRAIN
from unisono.launch.hosts import free_port

pytestmark = pytest.mark.cluster


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs OpenMPI's mpirun")
def test_tasks_of_mpirun_train_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    wanted = run([*TRAIN, "--nproc", "1", "--run-dir", "whole", "--json"], tmp_path).summary
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", "--bind-to", "none"]
    done = run([*mpirun, *UNISONO, "train", "mine.py", "--run-dir", "it", "--strategy", "zero1", "--json"], tmp_path)
    summary = done.summary
    assert (summary["nproc"], summary["strategy"]) == (3, "zero1")
    assert summary["weights_digest"] == wanted["weights_digest"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    need_slurm()
    (tmp_path / "mine.py").write_text(RECIPE)
    with slurm(tmp_path / "slurm") as environ:
        yield environ


def test_tasks_of_srun_train_together(tmp_path: Path, cluster: dict[str, str]) -> None:
    wanted = run([*TRAIN, "--nproc", "1", "--run-dir", "whole", "--json"], tmp_path).summary["weights_digest"]
    command = [*UNISONO, "train", "mine.py", "--strategy", "zero2", "--json"]
    done = run(["srun", "-N1", "-n2", *command, "--run-dir", "one"], tmp_path, environ=cluster)
    assert done.summary["weights_digest"] == wanted
    assert done.summary["nproc"] == 2
    # Both of Slurm's nodes are this machine, under names that no resolver knows.
    environ = {**cluster, "MASTER_ADDR": "127.0.0.1"}
    done = run(["srun", "-N2", "-n3", *command, "--run-dir", "two"], tmp_path, environ=environ)
    assert done.summary["weights_digest"] == wanted
    assert done.summary["nproc"] == 3


SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=log.txt
if [ -e it/metrics.jsonl ]; then where="--resume it"; else where="mine.py --run-dir it"; fi
srun {unisono} train $where {options} --nnodes 2 --nproc 2 --rdzv 127.0.0.1:{port} --checkpoint-every 5
"""


def test_a_job_that_is_requeued_goes_on_where_it_was(tmp_path: Path, cluster: dict[str, str]) -> None:
    nap = ["--set", "nap_s=0.1"]
    wanted = run([*TRAIN, "--nproc", "1", *nap, "--run-dir", "whole", "--json"], tmp_path).summary["weights_digest"]
    (tmp_path / "job.sh").write_text(SBATCH.format(unisono=" ".join(UNISONO), port=free_port(), options=" ".join(nap)))

    def call(*command: str) -> str:
        environ = {**os.environ, **cluster}
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout

    job = call("sbatch", "--parsable", "job.sh").strip()

    def log() -> str:
        return (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else "no log"

    wait_until(lambda: len(steps(tmp_path / "it")) >= 7, 120, log)
    call("scontrol", "requeue", job)  # what pre-emption does: SIGTERM, and back to the queue
    wait_until(lambda: "PENDING" in call("squeue", "-h", "-j", job, "-o", "%T"), 60, log)
    call("scontrol", "update", f"jobid={job}", "StartTime=now")  # Slurm waits for two minutes by itself
    ended = ("", "COMPLETED")
    wait_until(lambda: call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip() in ended, 180, log)
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["weights_digest"], summary["steps"], summary["finished"]) == (wanted, 42, True)
    assert "goes on after step" in log()
