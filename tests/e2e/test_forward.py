"""`--precision`, `--recompute` and `--compile`, as a user types them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import UNISONO, Done, run
from tests.e2e.test_run import NEIGHBOUR, SCRIPT
from tests.e2e.test_train import GPT

TRAIN = [*UNISONO, *GPT, "--json"]
# A third of the micro-batches is a short one, of another shape: 10 = 4 + 4 + 2.
SHORT = ["--set", "micro_batch=4"]


def trained(cwd: Path, name: str, *options: str) -> dict[str, Any]:
    """Trains into a folder of that name; returns the summary, with recipe.json beside."""
    summary = run([*TRAIN, "--run-dir", name, *options], cwd).summary
    return {**summary, "record": json.loads((cwd / name / "recipe.json").read_text())}


@pytest.mark.slow
def test_mixed_and_recomputed_on_the_command_line(tmp_path: Path) -> None:
    plain = trained(tmp_path, "plain", "--nproc", "1")
    mixed = trained(tmp_path, "mixed", "--nproc", "1", "--precision", "bf16-mixed")
    both = trained(tmp_path, "both", "--nproc", "2", "--precision", "bf16-mixed", "--recompute", "--strategy", "zero2")
    assert both["weights_digest"] == mixed["weights_digest"] != plain["weights_digest"]
    assert both["eval"] == mixed["eval"] != plain["eval"]
    assert mixed["loss"] == pytest.approx(plain["loss"], rel=1e-3)

    # Precision is part of the recipe; recomputation is how it was executed.
    assert both["record"]["digest"] == mixed["record"]["digest"] != plain["record"]["digest"]
    assert both["record"]["settings"]["precision"] == "bf16-mixed"
    assert both["record"]["origins"]["precision"] == "--precision"
    assert both["record"]["execution"]["recompute"] is True
    assert both["record"]["origins"]["recompute"] == "--recompute"
    assert (mixed["record"]["execution"]["recompute"], mixed["record"]["origins"]["recompute"]) == (False, "default")
    assert (both["precision"], both["recompute"], both["compile"]) == ("bf16-mixed", True, False)


@pytest.mark.slow
def test_a_flag_wins_over_the_script(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mixed.py").write_text(SCRIPT.replace("init(", "init(precision='bf16-mixed', recompute=True, "))
    flags = {"train.py": ["--precision", "bf16-mixed"], "mixed.py": ["--precision", "float32", "--no-recompute"]}
    digests = {}
    for script, own in flags.items():
        for name, options in (("as-it-is", []), ("flagged", own)):
            folder = f"{script}-{name}"
            command = [
                *UNISONO,
                "run",
                "--nproc",
                "2",
                "--run-dir",
                folder,
                *options,
                script,
                "--",
                "out",
                "--lr",
                "0.05",
            ]
            done = run(command, tmp_path)
            assert done.code == 0, done.err
            digests[script, name] = json.loads((tmp_path / folder / "summary.json").read_text())["weights_digest"]
            assert ("recompute: " in done.err) == (folder == "mixed.py-as-it-is")
    assert digests["train.py", "as-it-is"] == digests["mixed.py", "flagged"]
    assert digests["train.py", "flagged"] == digests["mixed.py", "as-it-is"]
    assert digests["train.py", "flagged"] != digests["train.py", "as-it-is"]


WRONG = [
    (
        ["--precision", "fp16"],
        "--precision must be one of float32, bf16-mixed, bf16, fp16-mixed, got 'fp16' (did you mean 'bf16'?)",
    ),
    (["--compile"], "compile needs a C++ compiler and torch finds none on this machine: "),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=["precision", "compile"])
@pytest.mark.parametrize("door", ["train", "run"])
def test_what_cannot_work_is_said_before_anything_starts(
    tmp_path: Path, door: str, options: list[str], said: str
) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError('it was started')")
    command = [*TRAIN, *options] if door == "train" else [*UNISONO, "run", *options, "script.py"]
    nowhere = {"PATH": str(tmp_path), "CXX": ""} if "--compile" in options else {}
    done: Done = run([sys.executable, *command[1:]], tmp_path, environ={**os.environ, **nowhere})
    assert done.code == 2, done.err
    assert done.err.splitlines()[-1].startswith(f"unisono: error: {said}")
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_compiled_on_the_command_line(tmp_path: Path) -> None:
    plain = trained(tmp_path, "plain", "--nproc", "1", *SHORT)
    alone = trained(tmp_path, "alone", "--nproc", "1", *SHORT, "--compile")
    two = trained(tmp_path, "two", "--nproc", "2", *SHORT, "--compile", "--strategy", "zero1")
    assert alone["weights_digest"] == two["weights_digest"]
    assert alone["eval"] == two["eval"]
    assert alone["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert alone["record"]["settings"]["compile"] is True
    assert alone["record"]["origins"]["compile"] == "--compile"
    assert alone["record"]["digest"] == two["record"]["digest"] != plain["record"]["digest"]
