"""`unisono train`: one digest for every number of processes and loader workers, and what a run leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.commands import UNISONO, Done, InProcess, run, started, steps

DIGITS = [*UNISONO, "train", "digits", "--steps", "40", "--json"]
TINY = {
    "width": 16, "depth": 1, "heads": 2, "context": 16, "steps": 4, "warmup": 1, "global_batch": 10, "micro_batch": 2,
}  # fmt: skip
GPT = ["train", "stdlib-gpt", *(word for key, value in TINY.items() for word in ("--set", f"{key}={value}"))]
ESCAPE = "\x1b"


@pytest.fixture
def unisono(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> InProcess:
    return InProcess(monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """The digits on one process, without a name for the run folder."""
    pytest.importorskip("sklearn")
    cwd = tmp_path_factory.mktemp("alone")
    return run([*DIGITS, "--nproc", "1"], cwd), cwd


def test_the_weights_moved(alone: tuple[Done, Path]) -> None:
    summary = alone[0].summary
    assert summary["first_loss"] > 2.0  # ln 10 is a guess
    assert summary["loss"] < 0.5
    assert summary["eval"]["accuracy"] > 0.85


FAST = [(2, 2)]
ALL = [pair for pair in itertools.product((1, 2, 3, 4), (0, 2)) if pair not in FAST]


@pytest.mark.parametrize(
    ("nproc", "num_workers"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL)]
)
def test_one_digest_for_the_digits(alone: tuple[Done, Path], tmp_path: Path, nproc: int, num_workers: int) -> None:
    options = ["--nproc", str(nproc), "--num-workers", str(num_workers), "--run-dir", "mine"]
    summary = run([*DIGITS, *options], tmp_path).summary
    expected = alone[0].summary
    assert summary["nproc"] == nproc
    assert summary["weights_digest"] == expected["weights_digest"]
    assert summary["eval"] == expected["eval"]
    assert [r["loss"] for r in steps(tmp_path / "mine")] == [r["loss"] for r in steps(folder_of(alone))]
    assert sorted(path.name for path in (tmp_path / "mine/logs").iterdir()) == [f"rank-{r}.log" for r in range(nproc)]


def test_threads_of_one_process(alone: tuple[Done, Path], tmp_path: Path) -> None:
    done = run([*DIGITS, "--strategy", "dp", "--nproc", "3", "--run-dir", "mine"], tmp_path)
    expected = alone[0].summary
    assert (done.summary["nproc"], done.summary["strategy"]) == (1, "dp")
    assert (done.summary["weights_digest"], done.summary["eval"]) == (expected["weights_digest"], expected["eval"])
    execution = json.loads((tmp_path / "mine/recipe.json").read_text())["execution"]
    assert (execution["nproc"], execution["workers"]) == (1, 3)
    assert "1 process, dp" in done.err


def folder_of(alone: tuple[Done, Path]) -> Path:
    (folder,) = (alone[1] / "runs").iterdir()
    return folder


def test_the_folder_is_named_for_the_recipe_and_the_time(alone: tuple[Done, Path]) -> None:
    folder = folder_of(alone)
    assert re.fullmatch(r"digits-\d{8}-\d{6}", folder.name)
    assert alone[0].summary["run_dir"] == f"runs/{folder.name}"
    names = ["checkpoints", "logs", "metrics.jsonl", "recipe.json", "summary.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_the_records(alone: tuple[Done, Path]) -> None:
    lines = [json.loads(line) for line in (folder_of(alone) / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "event" not in line]
    judged = [line for line in lines if line.get("event") == "eval"]
    keys = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "samples_per_s", "slowest_rank", "imbalance"}
    keys |= {f"{phase}_s" for phase in ("step", "data", "forward", "backward", "reduce", "optimizer")}
    assert all(line.keys() == keys for line in trained)
    assert [line["step"] for line in trained] == list(range(1, 41))
    # 1437 images in steps of 128: 11 full ones and one of 29.
    assert [line["samples"] for line in trained[10:13]] == [1408, 1437, 1565]
    assert [line["epoch"] for line in trained[10:13]] == [0, 0, 1]
    assert [line["step"] for line in judged] == [12, 24, 36, 40]
    assert all(set(line["metrics"]) == {"loss", "accuracy"} for line in judged)


def test_the_summary(alone: tuple[Done, Path]) -> None:
    written = json.loads((folder_of(alone) / "summary.json").read_text())
    printed = alone[0].summary
    assert {**written, "run_dir": printed["run_dir"]} == printed
    keys = "steps samples loss eval weights_digest samples_per_s nproc strategy restarts wall_s"
    assert set(keys.split()) <= written.keys()
    assert (written["steps"], written["samples"]) == (40, 3 * 1437 + 4 * 128)
    assert (written["nproc"], written["strategy"], written["restarts"]) == (1, "ddp", 0)
    assert re.fullmatch("sha256:[0-9a-f]{64}", written["weights_digest"])
    assert written["finished"] is True


def test_the_recipe_record(alone: tuple[Done, Path]) -> None:
    record = json.loads((folder_of(alone) / "recipe.json").read_text())
    assert {"options", "digest", "versions", "machine", "origins"} <= record.keys()
    assert record["recipe"] == "digits"
    assert record["options"]["global_batch"] == 128
    assert record["origins"]["steps"] == "--steps"
    assert record["origins"]["lr"] == "default"
    assert record["digest"] == alone[0].summary["recipe_digest"]
    assert {"unisono", "torch", "numpy", "python"} <= record["versions"].keys()


def test_progress_is_plain_lines_where_there_is_no_terminal(alone: tuple[Done, Path]) -> None:
    error = alone[0].err
    assert ESCAPE not in error
    assert "\r" not in error
    lines = error.splitlines()
    assert lines[0].startswith("digits: 1 process, ddp; runs/digits-")
    assert any(line.startswith("step 1/40 ") for line in lines)
    assert any(line.startswith("step 40/40 ") for line in lines)
    assert lines[1:] == (folder_of(alone) / "logs/rank-0.log").read_text().splitlines()


def test_one_digest_for_the_gpt_and_one_bar_on_a_terminal(unisono: InProcess, tmp_path: Path) -> None:
    expected = unisono(*GPT, "--nproc", "1", "--json").summary
    without = unisono(*GPT, "--set", "dropout=0.0", "--nproc", "1", "--json").summary
    assert without["weights_digest"] != expected["weights_digest"], "dropout is not on"
    three = run([*UNISONO, *GPT, "--nproc", "3", "--json"], tmp_path).summary
    two, screen = run_on_terminal([*UNISONO, *GPT, "--nproc", "2", "--json"], tmp_path)
    digests = {found["nproc"]: found["weights_digest"] for found in (expected, two.summary, three)}
    assert digests == dict.fromkeys((1, 2, 3), expected["weights_digest"])
    assert len({without["sample"], expected["sample"]}) == 2
    assert two.summary["sample"] == expected["sample"]
    assert screen.count(f"{ESCAPE}[?25l") == 1  # each bar hides the cursor once
    assert "step 4/4" in screen
    assert "loss" in screen
    assert not [line for line in screen.splitlines() if line.startswith("step 1/4  epoch")]  # nor plain lines


def run_on_terminal(command: list[str], cwd: Path) -> tuple[Done, str]:
    """Runs a command with a pseudo-terminal as standard error; returns also all that it wrote there."""
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # how Linux says that nobody has the other side open any more
                return
            if not data:
                return
            written.append(data)

    reader = threading.Thread(target=read)
    try:
        with started(command, cwd, stderr=theirs, environ={"TERM": "xterm", "COLUMNS": "120"}) as running:
            os.close(theirs)
            reader.start()
            done = running.wait()
        reader.join(10)
    finally:
        os.close(ours)
    return done, b"".join(written).decode()


RECIPE = """
import torch, unisono
from neighbour import Net, Data
print("printed at import")

def recipe(*, width: int = 4, lr: float = 0.1, betas: tuple = (0.9, 0.99), name: str = "x", bias: bool = True, n=None):
    print("printed by recipe()", (width, lr, betas, name, bias, n))
    def loss(model, batch):
        print("printed by loss")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return unisono.Recipe(
        model=lambda: Net(width, bias), loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=lr, betas=betas),
        train=Data, global_batch=6, micro_batch=2,
    )
"""
NEIGHBOUR = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, width, bias):
        super().__init__(torch.nn.Linear(4, width, bias=bias), torch.nn.ReLU(), torch.nn.Linear(width, 2))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return torch.randn(4), index % 2
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of the user's, which prints at every occasion, in a folder that is not the present one."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "my_own.py").write_text(RECIPE)
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return "recipes/my_own.py"


def test_a_recipe_file_with_options_and_a_neighbour(
    unisono: InProcess, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(*pairs: str) -> dict[str, Any]:
        done = unisono("train", own, "--nproc", "1", "--json", *(word for pair in pairs for word in ("--set", pair)))
        return done.summary

    try:
        plain, again = digest(), digest()
        assert plain["weights_digest"] == again["weights_digest"]
        assert plain["steps"] == 2  # 9 samples in steps of 6: one epoch
        changed = digest("width=8", "lr=1", "betas=(0.5,0.9)", "name=7", "bias=false", "n=3")
    finally:
        monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    assert changed["weights_digest"] != plain["weights_digest"]
    assert changed["recipe_digest"] != plain["recipe_digest"]
    record = json.loads((tmp_path / changed["run_dir"] / "recipe.json").read_text())
    assert record["options"] == {
        "width": 8, "lr": 1.0, "betas": [0.5, 0.9], "name": "7", "bias": False, "n": 3,
    }  # fmt: skip
    assert {record["origins"][name] for name in record["options"]} == {"--set"}
    assert {record["origins"][name] for name in record["execution"]} <= {"--nproc", "default"}
    assert re.match(r"my_own-\d{8}-\d{6}", Path(changed["run_dir"]).name)


def test_what_a_recipe_prints_is_kept_from_the_json(own: str, tmp_path: Path, unisono: InProcess) -> None:
    done = run([*UNISONO, "train", own, "--nproc", "2", "--json", "--run-dir", "mine"], tmp_path)
    assert done.summary["steps"] == 2
    for text in ("printed at import", "printed by recipe()", "printed by loss"):
        assert text in done.err
        assert text in (tmp_path / "mine/logs/rank-0.log").read_text()
        assert text in (tmp_path / "mine/logs/rank-1.log").read_text()
    # Once by the launcher, which looks at the recipe, and once by rank 0.
    assert done.err.count("printed at import") == 2
