"""Saving that is killed, has no room or is called wrongly: nothing whole is lost, and runs end as they would have."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_strategies import data
from tests.worlds import Outcome, outcomes_of_world, run_world
from unisono import keeper
from unisono.checkpoint.fault import FaultStorage, disk_full
from unisono.checkpoint.reader import Checkpoint, checkpoints_in
from unisono.checkpoint.storage import LocalStorage
from unisono.checkpoint.writer import CheckpointError

F = nn.functional
STEPS = 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_only() -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def train(
    folder: str, strategy: str = "ddp", fault: tuple[int, int, Callable[[], None]] | None = None, kill_at: Any = None
) -> dict[str, Any]:
    """Trains 12 steps with a checkpoint after every second one.

    Args:
        fault: (rank, number of the storage's verb, what happens then).
        kill_at: (step, micro-batch) in which this process kills itself.
    """
    with unisono.init(seed=3, run_dir=folder, resume=True, strategy=strategy, checkpoint_every=2, keep=3) as run:
        if fault is not None and fault[0] == run.rank:
            keeper.LocalStorage = lambda root: FaultStorage(LocalStorage(root), fault[2], fault[1])  # type: ignore
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        run.resume()
        first, seen, notes = run.step, [], list[str]()
        run.note = notes.append  # type: ignore[method-assign]
        for _ in run.epochs(3):
            for x, y in loader:
                if kill_at == (run.step, run.micro_batch):
                    die()
                if run.micro_batch is not None:
                    seen.append((run.step, run.micro_batch))
                run.backward(F.cross_entropy(model(x), y) if len(x) > 1 else model(x.repeat(2, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
        every = [item for part in run._session.comm.gather_objects(seen) for item in part]
        found = {"first": first, "seen": sorted(every), "weights": run.weights_digest(), "samples": run.ledger.samples}
        return {**found, "notes": notes}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(1, train, str(tmp_path_factory.mktemp("whole") / "it"))[0]


def same_end(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert (found["weights"], found["samples"]) == (whole["weights"], whole["samples"])
    assert found["seen"] == [item for item in whole["seen"] if item[0] >= found["first"]]


def all_whole(folder: Path) -> list[str]:
    """Checks every checkpoint that is published; returns their names."""
    found = checkpoints_in(folder / "checkpoints")
    for one in found:
        Checkpoint.open(one).check()
    return [one.name for one in found]


# The verbs of one checkpoint: two files of 4 verbs each (rank 1) or more, the note, and on rank 0 the publication.
MOMENTS = [(1, 12), (0, 26), *(pytest.param((0, n), marks=pytest.mark.slow) for n in (14, 21, 27))]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(
    tmp_path: Path, whole: dict[str, Any], moment: tuple[int, int]
) -> None:
    """Case 17, with real processes; tests/unit has every moment."""
    outcomes = outcomes_of_world(2, train, str(tmp_path / "it"), "zero1", (*moment, die), timeout_s=30)
    assert outcomes[moment[0]].exit_code == -signal.SIGKILL
    before = all_whole(tmp_path / "it")
    found = run_world(3, train, str(tmp_path / "it"), "zero3")[0]
    assert found["first"] == (int(before[-1][-8:]) if before else 0)
    same_end(found, whole)
    assert all_whole(tmp_path / "it") == ["step-00000008", "step-00000010", "step-00000012"]
    assert sorted(path.name for path in (tmp_path / "it" / "checkpoints").iterdir()) == [
        "latest", "step-00000008", "step-00000010", "step-00000012",
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "fault"), [(0, disk_full), (1, read_only)])
def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, whole: dict[str, Any], rank: int, fault: Any
) -> None:
    found = run_world(2, train, str(tmp_path / "it"), "ddp", (rank, 3, fault))[0]
    same_end(found, whole)
    text = os.strerror(errno.ENOSPC if fault is disk_full else errno.EROFS)
    name = "checkpoint step-00000002"
    assert found["notes"] == [f"{name} could not be written by rank {rank}: {text}; training goes on without it"]
    assert all_whole(tmp_path / "it") == ["step-00000008", "step-00000010", "step-00000012"]


def save_and_fail(folder: str) -> None:
    with unisono.init(seed=3, run_dir=folder) as run:
        if run.rank == 1:
            keeper.LocalStorage = lambda root: FaultStorage(LocalStorage(root), disk_full, 1)  # type: ignore
        model = nn.Linear(6, 3)
        run.prepare(model, torch.optim.AdamW(model.parameters()), data(), global_batch=16, micro_batch=4)
        run.save(wait=True)


def test_a_save_that_was_asked_for_is_an_error_on_all(tmp_path: Path) -> None:
    for outcome in outcomes_of_world(2, save_and_fail, str(tmp_path / "it")):
        assert isinstance(outcome.error, CheckpointError)
        assert "step-00000000 could not be written by rank 1: No space left on device" in str(outcome.error)


def save_on_one(folder: str) -> None:
    with unisono.init(seed=3, run_dir=folder, timeout_s=3) as run:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if run.step_done and run.is_main:
                run.save()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_save_on_one_rank_only_is_an_error_that_says_so(tmp_path: Path, world_size: int) -> None:
    """Case 16."""
    outcomes = outcomes_of_world(world_size, save_on_one, str(tmp_path / "it"), timeout_s=30)
    missing = ", ".join(map(str, range(1, world_size)))
    assert f"in run.save() after step 1; missing: rank {missing}" in str(outcomes[0].error)
    assert "Every rank must call it" in str(outcomes[0].error)
    assert all(outcome.error is not None for outcome in outcomes)


def save_inside(folder: str) -> None:
    with unisono.init(seed=3, run_dir=folder) as run:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.save()


def test_a_save_inside_of_a_step_is_refused(tmp_path: Path) -> None:
    outcome = outcomes_of_world(1, save_inside, str(tmp_path / "it"))[0]
    assert "run.save() inside of step 0: save between two steps" in str(outcome.error)


def forget_to_resume(folder: str) -> None:
    with unisono.init(seed=3, run_dir=folder, resume=True) as run:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        next(iter(loader))


def test_a_resume_that_is_forgotten_is_noticed(tmp_path: Path) -> None:
    outcome = outcomes_of_world(1, forget_to_resume, str(tmp_path / "it"))[0]
    assert "call run.resume() after the last prepare, before the loop" in str(outcome.error)


@pytest.mark.slow
def test_two_hundred_kills_lose_no_sample(tmp_path: Path, whole: dict[str, Any]) -> None:
    """Of one rank or in the middle of a save, at random; each time other ranks and another strategy go on."""
    random.seed(5)
    kills = runs = 0
    while kills < 200:
        runs += 1
        folder = tmp_path / f"run-{runs}"
        for _ in range(100):
            world_size = random.randint(1, 4)
            strategy = random.choice(["ddp", "zero1", "zero2", "zero3", "hsdp"])
            rank = random.randrange(world_size)
            in_save = random.random() < 0.4
            fault = (rank, random.randrange(60), die) if in_save else None
            kill_at = None if in_save else (random.randrange(STEPS), random.randrange(4))
            outcomes = outcomes_of_world(world_size, train, str(folder), strategy, fault, kill_at, timeout_s=60)
            all_whole(folder)
            if not any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes):
                break
            kills += 1
        same_end(finished(outcomes), whole)
    assert runs > 20


def finished(outcomes: list[Outcome]) -> dict[str, Any]:
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    return outcomes[0].value
