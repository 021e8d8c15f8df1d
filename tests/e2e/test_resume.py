"""`unisono train --resume`: killed, stopped, restarted or changed, a run ends with the digest of a whole one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.commands import UNISONO, Done, InProcess, Running, run, started, steps, wait_until

# Sleeps, so that there is a middle to be caught in.
RECIPE = """
import os, pathlib, signal, time
import torch, unisono
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return torch.randn(6) + index % 3, index % 3

def recipe(*, nap_s: float = 0.0, lr: float = 0.1, width: int = 9):
    def loss(model, batch):
        time.sleep(nap_s)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def metrics(model, batch):
        hits = (model(batch[0]).argmax(1) == batch[1]).sum()
        return {"accuracy": (hits, len(batch[1]))}
    return unisono.Recipe(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3)),
        loss=loss, train=Data, eval=Data, metrics=metrics, optimizer=lambda p: torch.optim.AdamW(p, lr=lr),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
        global_batch=12, micro_batch=3, steps=42,
    )
"""
TRAIN = [*UNISONO, "train", "mine.py"]


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def unisono(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cwd: Path) -> InProcess:
    return InProcess(monkeypatch, capfd, cwd)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("whole")
    (cwd / "mine.py").write_text(RECIPE)
    summary = run([*TRAIN, "--nproc", "1", "--run-dir", "it", "--json"], cwd).summary
    assert summary["steps"] == 42
    return {**summary, "records": records(cwd / "it")}


def records(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("slowest_rank", "imbalance")
    return [{k: v for k, v in record.items() if not k.endswith("_s") and k not in clocks} for record in found]


def same_end(done: dict[str, Any], whole: dict[str, Any], folder: Path) -> None:
    for name in ("steps", "samples", "weights_digest", "eval", "loss", "first_loss", "recipe_digest"):
        assert done[name] == whole[name], name
    assert records(folder) == whole["records"], "each step and evaluation once"


def wait_for_checkpoint(running: Running, folder: Path, step: int) -> None:
    def there() -> bool:
        assert running.process.poll() is None, running.wait().err
        return (folder / "checkpoints" / f"step-{step:08d}").exists()

    wait_until(there, 120, lambda: f"no checkpoint of step {step}")


def end_in_the_middle(cwd: Path, number: int, *, nproc: str, of: str = "all") -> Done:
    """Sends a signal when two checkpoints are there; the nap is so long that the end is far."""
    options = ["--nproc", nproc, "--run-dir", "it", "--checkpoint-every", "3", "--set", "nap_s=0.1"]
    with started([*TRAIN, *options], cwd) as running:
        wait_for_checkpoint(running, cwd / "it", 6)
        if of == "all":
            for pid in running.pids():
                os.kill(pid, number)
        else:
            os.kill(running.pid, number)
        done = running.wait()
        running.wait_until_gone(30)
    assert 6 <= len(steps(cwd / "it")) < 42
    return done


@pytest.mark.parametrize(
    ("number", "of"), [(signal.SIGKILL, "all"), pytest.param(signal.SIGKILL, "launcher", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on(cwd: Path, whole: dict[str, Any], number: int, of: str) -> None:
    assert end_in_the_middle(cwd, number, nproc="2", of=of).code == -number
    summary = run([*UNISONO, "train", "--resume", "it", "--nproc", "3", "--strategy", "zero2", "--json"], cwd)
    assert "goes on after step" in summary.err
    # The nap is an option, so another recipe, and the same weights.
    expected = {**whole, "recipe_digest": summary.summary["recipe_digest"]}
    same_end(summary.summary, expected, cwd / "it")
    assert sorted(path.name for path in (cwd / "it" / "checkpoints").iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_run_saves_and_goes_on(cwd: Path, unisono: InProcess, whole: dict[str, Any], number: int) -> None:
    done = end_in_the_middle(cwd, number, nproc="2" if number == signal.SIGTERM else "1", of="launcher")
    assert done.code == 130
    last = len(steps(cwd / "it"))
    assert re.search(rf"interrupted after step {last}; go on with `unisono train --resume it`", done.err)
    assert (cwd / "it" / "checkpoints" / "latest").resolve().name == f"step-{last:08d}", "nothing is lost"
    found = unisono("train", "--resume", "it", "--nproc", "1", "--json")
    assert f"goes on after step {last}" in found.err
    same_end(found.summary, {**whole, "recipe_digest": found.summary["recipe_digest"]}, cwd / "it")


def test_a_killed_rank_is_started_again(cwd: Path, whole: dict[str, Any]) -> None:
    options = ["--nproc", "2", "--run-dir", "it", "--checkpoint-every", "3", "--max-restarts", "2", "--json"]
    with started([*TRAIN, *options, "--set", "nap_s=0.05"], cwd) as running:
        for step in (6, 15):
            wait_for_checkpoint(running, cwd / "it", step)
            os.kill(running.rank(1), signal.SIGKILL)
        done = running.wait()
        running.wait_until_gone(5)
    summary = done.summary
    assert summary["restarts"] == 2
    assert done.err.count("goes on after step") == 2
    same_end(summary, {**whole, "recipe_digest": summary["recipe_digest"]}, cwd / "it")


def test_what_was_trained_to_the_end_is_done_at_once(cwd: Path, unisono: InProcess, whole: dict[str, Any]) -> None:
    first = unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", "--steps", "7", "--json").summary
    again = unisono("train", "--resume", "it", "--nproc", "1", "--json").summary
    assert again["weights_digest"] == first["weights_digest"] != whole["weights_digest"]
    assert again["eval"] == first["eval"]
    more = ["--steps", "42", "--allow-changed"]
    longer = run([*UNISONO, "train", "--resume", "it", "--nproc", "2", *more, "--json"], cwd).summary
    assert longer["weights_digest"] == whole["weights_digest"], "a longer run is a shorter one that went on"
    file = cwd / "it" / "checkpoints" / "latest" / "model.safetensors"
    assert "0.weight" in safetensors.torch.load_file(file)
    record = json.loads((cwd / "it" / "recipe.json").read_text())
    assert [before["nproc"] for before in record["executed_before"]] == [1, 1]


def test_a_branch_leaves_the_first_run_alone(cwd: Path, unisono: InProcess, whole: dict[str, Any]) -> None:
    unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", "--checkpoint-every", "5", "--steps", "12")
    before = {path: path.stat().st_mtime_ns for path in (cwd / "it").rglob("*")}
    named = "it/checkpoints/step-00000005"
    more = ["--steps", "42", "--allow-changed", "--nproc", "1"]
    found = unisono("train", "--resume", named, "--run-dir", "two", *more, "--json")
    assert found.summary["weights_digest"] == whole["weights_digest"]
    assert [record["step"] for record in records(cwd / "two") if "loss" in record] == list(range(6, 43))
    assert {path: path.stat().st_mtime_ns for path in (cwd / "it").rglob("*")} == before


def test_the_newest_and_the_best_stay(cwd: Path, unisono: InProcess) -> None:
    keep = ["--checkpoint-every", "5", "--keep", "2", "--keep-best", "accuracy:min"]
    unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", *keep)
    names = sorted(path.name for path in (cwd / "it" / "checkpoints").iterdir())
    assert names[0] == "latest"
    assert names[-2:] == ["step-00000040", "step-00000042"]
    assert len(names) == 4
    scores = {}
    for name in names[1:]:
        state = json.loads((cwd / "it" / "checkpoints" / name / "state.json").read_text())
        scores[name] = state["ledger"]["metrics"]["accuracy"]
    assert min(scores.values()) == scores[names[1]]


def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    cwd: Path, unisono: InProcess, whole: dict[str, Any]
) -> None:
    unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", "--checkpoint-every", "10", "--steps", "25")
    path = cwd / "it" / "checkpoints" / "step-00000025" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    found = unisono("train", "--resume", "it", "--steps", "42", "--allow-changed", "--nproc", "1", "--json")
    assert "step-00000025/optimizer.safetensors is damaged" in found.err
    assert "step-00000020 is the newest whole one" in found.err
    assert found.summary["weights_digest"] == whole["weights_digest"]
    named = unisono("train", "--resume", str(path.parent), "--nproc", "1", "--steps", "25")
    assert named.code == 0 or "is damaged" in named.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--resume", "nothing"], ["there is no folder nothing"]),
        (["--resume", "empty"], ["there is no checkpoint in empty"]),
        (["--resume", "it", "--set", "lr=0.2"], ["it/checkpoints/step-00000007", "lr was 0.1, is 0.2"]),
        (["--resume", "it", "--steps", "9"], ["Recipe.steps was 7, is 9", "--allow-changed"]),
        (["other.py", "--resume", "it"], ["recipe was mine, is other"]),
        (
            ["--resume", "it", "--set", "width=5", "--allow-changed"],
            ["shape (9, 6)", "(5, 6) in the model"],
        ),
        (["mine.py", "--checkpoint-every", "often"], ["checkpoint_every 'often'", "10m"]),
        (["mine.py", "--keep", "0"], ["keep must be"]),
        (["mine.py", "--keep-best", "accuracy"], ["METRIC:max"]),
        (["mine.py", "--init-from", "nothing"], ["nothing cannot be read"]),
        (["mine.py", "--init-from", "mine.py"], ["mine.py is no whole safetensors file"]),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_one_sentence(
    cwd: Path, unisono: InProcess, arguments: list[str], parts: list[str]
) -> None:
    (cwd / "empty").mkdir()
    (cwd / "other.py").write_text(RECIPE)
    assert unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", "--steps", "7").code == 0
    before = {path: path.read_bytes() for path in (cwd / "it" / "checkpoints").rglob("*") if path.is_file()}
    done = unisono("train", *arguments, "--nproc", "1")
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("unisono: error: ")
    for part in parts:
        assert part in last, last
    assert {p: p.read_bytes() for p in (cwd / "it" / "checkpoints").rglob("*") if p.is_file()} == before


def test_weights_of_another_run_begin_one(cwd: Path, unisono: InProcess) -> None:
    first = unisono("train", "mine.py", "--nproc", "1", "--run-dir", "it", "--steps", "7", "--json").summary
    fine = ["train", "mine.py", "--init-from", "it/checkpoints/latest", "--steps", "2", "--json"]
    one = unisono(*fine, "--nproc", "1", "--run-dir", "one").summary
    two = run([*UNISONO, *fine, "--nproc", "2", "--strategy", "zero3", "--run-dir", "two"], cwd).summary
    plain = unisono("train", "mine.py", "--nproc", "1", "--steps", "2", "--json").summary
    assert one["weights_digest"] == two["weights_digest"] not in (first["weights_digest"], plain["weights_digest"])
    assert one["recipe_digest"] == two["recipe_digest"] != plain["recipe_digest"]


def test_a_snapshot_in_memory_is_enough_to_go_on(cwd: Path, whole: dict[str, Any]) -> None:
    options = ["--nproc", "2", "--run-dir", "it", "--snapshot-every", "2", "--max-restarts", "1", "--json"]
    with started([*TRAIN, *options, "--set", "nap_s=0.05"], cwd) as running:
        wait_until(lambda: len(steps(cwd / "it")) >= 9, 120, lambda: "no 9 steps")
        (folder,) = Path("/dev/shm").glob(f"unisono-{running.pid}-*")
        assert not (cwd / "it" / "checkpoints").exists(), "the disk is not touched"
        os.kill(running.rank(0), signal.SIGKILL)
        done = running.wait()
        running.wait_until_gone(5)
    summary = done.summary
    step = int(re.findall(r"goes on after step (\d+), from /dev/shm/", done.err)[0])
    assert step >= 6, "a lost worker costs at most the steps since the last snapshot"
    assert not folder.exists()
    same_end(summary, {**whole, "recipe_digest": summary["recipe_digest"]}, cwd / "it")


@pytest.mark.slow
def test_what_a_killed_launcher_left_in_memory_is_swept(cwd: Path) -> None:
    options = ["--nproc", "2", "--run-dir", "it", "--snapshot-every", "2", "--max-restarts", "1"]
    with started([*TRAIN, *options, "--set", "nap_s=0.05"], cwd) as running:
        wait_until(lambda: len(steps(cwd / "it")) >= 5, 120, lambda: "no 5 steps")
        (folder,) = Path("/dev/shm").glob(f"unisono-{running.pid}-*")
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        running.wait_until_gone(30)
    assert folder.exists()
    assert run([*TRAIN, "--nproc", "2", "--run-dir", "two", "--steps", "2"], cwd).code == 0
    assert not folder.exists()


@pytest.mark.slow
def test_a_run_in_a_store_goes_on_on_another_machine(cwd: Path, whole: dict[str, Any]) -> None:
    url = f"file://{cwd}/store/mine"
    options = ["--run-dir", url, "--checkpoint-every", "5", "--keep", "2"]
    assert run([*TRAIN, *options, "--nproc", "1", "--steps", "17"], cwd).code == 0
    store = cwd / "store" / "mine"
    assert sorted(path.name for path in (store / "checkpoints").iterdir()) == ["step-00000015", "step-00000017"]
    for name in ("recipe.json", "metrics.jsonl", "summary.json"):
        assert (store / name).read_bytes() == (cwd / "runs" / "mine" / name).read_bytes()
    shutil.rmtree(cwd / "runs")  # another machine has none of it
    more = ["--steps", "42", "--allow-changed", "--nproc", "2", "--json"]
    summary = run([*UNISONO, "train", "--resume", url, *more], cwd).summary
    assert summary["weights_digest"] == whole["weights_digest"]
    assert (store / "checkpoints" / "step-00000042" / "state.json").exists()
    assert run([*UNISONO, "train", "--resume", f"file://{cwd}/store/none"], cwd).code == 2


SCRIPT = """
import os, signal, time, torch, unisono
from torch import nn

run = unisono.init(seed=3, run_dir="it", resume=True, checkpoint_every=3)
model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.1), nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = [(torch.full((6,), float(k)), k % 3) for k in range(50)]
model, optimizer, loader = run.prepare(model, optimizer, data, global_batch=12, micro_batch=3)
run.resume()
for _ in run.epochs(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step_done and run.step == 8 and run.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
run.print(run.weights_digest())
"""


@pytest.mark.slow
def test_ranks_of_torchrun_that_are_started_again_go_on(tmp_path: Path) -> None:
    """Its starts share one store, where the addresses of the last ranks still are."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    alone = run([sys.executable, "mine.py"], tmp_path)
    shutil.rmtree(tmp_path / "it")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run([*torchrun, "mine.py"], tmp_path)
    assert done.code == 0, done.err
    assert "goes on after step 6" in done.err
    assert done.out.splitlines()[-1] == alone.out.splitlines()[-1] != ""
