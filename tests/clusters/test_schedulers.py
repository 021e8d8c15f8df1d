"""Real schedulers: what they start trains as one process does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import UNISONO, run
from tests.e2e.test_resume import RECIPE, TRAIN

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
