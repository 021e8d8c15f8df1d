"""Ranks that fail, vanish, hang or are told to stop: the job ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.commands import UNISONO, InProcess, Running, run, started, steps, wait_until
from tests.worlds import outcomes_of_world

SOON_S = 20.0  # "within seconds", on a machine with other things to do

# Sleeps, so that there is a middle to be caught in; drops out, so that a step that was torn would show.
RECIPE = """
import itertools, pathlib, time
import torch, unisono
from torch import nn

calls = itertools.count()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 36
    def __getitem__(self, index):
        return torch.randn(4) + index % 2, index % 2

def recipe(*, nap_s: float = 0.05, fail_at: int = -1):
    def loss(model, batch):
        time.sleep(nap_s)
        if next(calls) == fail_at and torch.distributed.get_rank() == 1:
            pathlib.Path("raised").touch()
            raise ZeroDivisionError("boom on purpose")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return unisono.Recipe(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)), loss=loss, train=Data,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=6, micro_batch=2, steps=4000,
    )
"""
TRAIN = [*UNISONO, "train", "mine.py", "--run-dir", "mine"]


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(RECIPE)
    return tmp_path


def wait_for_steps(running: Running, folder: Path, number: int) -> None:
    def there() -> bool:
        assert running.process.poll() is None, running.wait().err
        return len(steps(folder)) >= number

    wait_until(there, 120, lambda: f"no {number} steps")


def test_a_rank_that_raises_ends_the_job_and_is_heard_first(cwd: Path) -> None:
    with started([*TRAIN, "--nproc", "3", "--set", "fail_at=7"], cwd) as running:
        done = running.wait()
        assert time.time() - (cwd / "raised").stat().st_mtime < SOON_S
        running.wait_until_gone(1)
    assert done.code == 1
    # One micro-batch a rank and step: the eighth call is in step 7.
    assert len(steps(cwd / "mine")) == 7
    said = done.err[done.err.index("rank 1 failed first:") :].splitlines()
    assert said[1] == "Traceback (most recent call last):"
    assert re.search(r'mine.py", line \d+, in loss', said[2]), "the first frame is the user's"
    assert said[-1] == "unisono: error: rank 1 failed: ZeroDivisionError: boom on purpose"
    assert done.err.count("Traceback") == 1, "the consequences on other ranks are in their logs"
    assert "CommError" in (cwd / "mine/logs/rank-0.log").read_text()
    assert "boom on purpose" in (cwd / "mine/logs/rank-1.log").read_text()


def test_a_rank_that_is_killed_is_named_with_the_signal(cwd: Path) -> None:
    with started([*TRAIN, "--nproc", "2"], cwd) as running:
        wait_for_steps(running, cwd / "mine", 3)
        os.kill(running.rank(1), signal.SIGKILL)
        began = time.monotonic()
        done = running.wait(SOON_S)
        running.wait_until_gone(SOON_S - (time.monotonic() - began))
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("unisono: error: rank 1 ")
    assert "SIGKILL" in last
    assert "Traceback" not in done.err


def test_nothing_outlives_a_killed_launcher(cwd: Path) -> None:
    with started([*TRAIN, "--nproc", "2", "--num-workers", "2"], cwd) as running:
        wait_for_steps(running, cwd / "mine", 2)
        wait_until(lambda: len(running.pids()) >= 7, 30, lambda: f"launcher, ranks, workers: {running.pids().keys()}")
        running.process.kill()
        running.wait_until_gone(3)  # torch's own loader workers look for their parent every 5 s


@pytest.mark.parametrize(
    ("number", "nproc", "num_workers", "to_group"),
    [
        pytest.param(signal.SIGINT, 1, 2, True, marks=pytest.mark.slow),
        (signal.SIGTERM, 1, 2, True),
        (signal.SIGINT, 2, 2, True),  # Ctrl-C: the terminal signals the whole foreground group
        (signal.SIGTERM, 2, 2, False),  # which the launcher passes on to the group of each rank
    ],
)
def test_a_stop_ends_the_step_and_writes_the_summary(
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    nproc: int,
    num_workers: int,
    to_group: bool,
) -> None:
    options = ["--nproc", str(nproc), "--num-workers", str(num_workers), "--json"]
    with started([*TRAIN, *options], cwd) as running:
        wait_for_steps(running, cwd / "mine", 3)
        (os.killpg if to_group else os.kill)(running.pid, number)
        done = running.wait(SOON_S)
        running.wait_until_gone(2)
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
    assert "killed" not in done.err
    summary = json.loads((cwd / "mine/summary.json").read_text())
    num_steps = len(steps(cwd / "mine"))
    assert summary["finished"] is False
    assert 3 <= summary["steps"] == num_steps < 4000
    assert done.err.splitlines()[-1].endswith(f"after step {num_steps}; go on with `unisono train --resume mine`")
    assert json.loads(done.out)["steps"] == num_steps
    # The step was a whole one: the weights are those of a run that was to end there.
    command = InProcess(monkeypatch, capfd, cwd)
    until_there = command("train", "mine.py", "--nproc", "1", "--steps", str(num_steps), "--set", "nap_s=0.0", "--json")
    assert summary["weights_digest"] == until_there.summary["weights_digest"]


@pytest.mark.slow
def test_a_stop_of_one_rank_stops_all(cwd: Path) -> None:
    with started([*TRAIN, "--nproc", "2"], cwd) as running:
        wait_for_steps(running, cwd / "mine", 3)
        os.kill(running.rank(1), signal.SIGTERM)
        done = running.wait(SOON_S)
        running.wait_until_gone(2)
    assert done.code == 130, done.err
    summary = json.loads((cwd / "mine/summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (False, len(steps(cwd / "mine")))


def test_a_taken_port_in_the_environment_is_no_hindrance(cwd: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = run([*TRAIN, "--nproc", "2", "--steps", "3", "--json"], cwd, environ=environ)
        assert done.summary["steps"] == 3
        taken.settimeout(0.1)
        with pytest.raises(TimeoutError):  # nobody even knocked
            taken.accept()


# Door 1, in worlds of the tests' own: no launcher ends the ranks, they must find out themselves.


class Data(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4) + index % 2, index % 2


def prepared(timeout_s: float, micro_batch: int = 2, size: int = 24) -> tuple[Any, ...]:
    run = unisono.init(timeout_s=timeout_s)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run, *run.prepare(model, optimizer, Data(size), global_batch=6, micro_batch=micro_batch)


def batches(run: Any, model: nn.Module, loader: Any) -> Iterator[torch.Tensor]:
    for x, y in loader:
        yield nn.functional.cross_entropy(model(x), y)


def hangs(folder: Path) -> None:
    """Rank 1 sleeps in its loss until the others have given up."""
    run, model, optimizer, loader = prepared(timeout_s=3)
    try:
        for loss in batches(run, model, loader):
            if run.rank == 1 and run.step == 2:
                wait_until(lambda: len(list(folder.iterdir())) == run.world_size - 1, 30)
            run.backward(loss)
            optimizer.step()
    except unisono.CommError:
        (folder / str(run.rank)).touch()
        raise


def test_a_rank_that_hangs_is_named_after_the_time_out(tmp_path: Path) -> None:
    outcomes = outcomes_of_world(3, hangs, tmp_path, timeout_s=60)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, unisono.CommError), outcomes[rank].trace
        assert "rank 1" in str(outcomes[rank].error)
        assert f"no word from rank {2 - rank}" not in str(outcomes[rank].error), "the other one waits too"
    assert isinstance(outcomes[1].error, unisono.CommError), outcomes[1].trace  # it comes back to find nobody
    assert all(outcome.exit_code == 0 for outcome in outcomes), "no rank had to be killed"


def skips(micro_batch: int, skipped: int) -> None:
    """Rank 1 looks at a batch and goes on to the next one."""
    run, model, optimizer, loader = prepared(timeout_s=5, micro_batch=micro_batch)
    for number, loss in enumerate(batches(run, model, loader)):
        if run.rank == 1 and number == skipped:
            continue
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize(
    ("micro_batch", "skipped"),
    [
        pytest.param(3, 1, id="the only one of a step"),
        pytest.param(1, 3, id="the first of three"),
        pytest.param(1, 4, id="the second of three", marks=pytest.mark.slow),
        pytest.param(1, 5, id="the last of three", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_skips_a_batch_is_an_error_on_all(micro_batch: int, skipped: int) -> None:
    began = time.monotonic()
    outcomes = outcomes_of_world(2, skips, micro_batch, skipped, timeout_s=60)
    assert time.monotonic() - began < SOON_S
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    for outcome in outcomes:
        assert isinstance(outcome.error, unisono.UnisonoError), outcome.trace or outcome
    said = " ".join(str(outcome.error) for outcome in outcomes)
    assert "step 1" in said
    assert "rank 1" in said
    assert "run.step" in said


def leaves() -> None:
    """Rank 1 is content after one step; the others wait for it in the next."""
    run, model, optimizer, loader = prepared(timeout_s=3)
    for loss in batches(run, model, loader):
        run.backward(loss)
        optimizer.step()
        if run.rank == 1:
            break
    run.close()


def test_a_rank_that_leaves_the_loop_early_is_an_error_on_all() -> None:
    began = time.monotonic()
    outcomes = outcomes_of_world(3, leaves, timeout_s=60)
    assert time.monotonic() - began < SOON_S
    for outcome in outcomes:
        assert isinstance(outcome.error, unisono.CommError), outcome
        assert outcome.exit_code == 0
    assert "rank 1" in str(outcomes[0].error)


def fails_first() -> None:
    with unisono.init(timeout_s=60).rank0_first():
        raise OSError("the disk is full")


def dawdles(folder: Path) -> str:
    """Rank 0 stays inside until rank 1 has given up."""
    run = unisono.init(timeout_s=60)
    try:
        with run.rank0_first(timeout_s=1.0):
            wait_until(lambda: (folder / "gave up").exists(), 30)
            return "was inside"
    except unisono.CommError:
        (folder / "gave up").touch()
        raise


def test_a_failure_of_the_first_rank_reaches_all_at_once() -> None:
    began = time.monotonic()
    outcomes = outcomes_of_world(3, fails_first, timeout_s=50)
    assert time.monotonic() - began < SOON_S
    assert isinstance(outcomes[0].error, OSError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, unisono.CommError), outcome
        assert "rank 0 failed" in str(outcome.error)
        assert "the disk is full" in str(outcome.error)


def test_the_wait_for_the_first_rank_has_a_time_out(tmp_path: Path) -> None:
    outcomes = outcomes_of_world(2, dawdles, tmp_path, timeout_s=50)
    assert outcomes[0].value == "was inside", outcomes[0].trace
    assert isinstance(outcomes[1].error, unisono.CommError), outcomes[1]
    assert "rank 1 waited 1 s" in str(outcomes[1].error)
