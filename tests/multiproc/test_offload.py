"""`--offload`: the optimizer's state elsewhere, the same bits, and less memory."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.fakes import ThreadCollectives, run_threads
from tests.multiproc.test_strategies import OPTIMIZERS, Tied, data, digest_of
from tests.worlds import outcomes_of_world, run_world
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.offload import Offload
from unisono.strategy.sharded import OptimizerShardedStrategy

F = nn.functional


def train(strategy: str, optimizer_name: str, folder: str | None) -> tuple[str, str, list[str]]:
    offload = None if folder is None else "disk"
    with unisono.init(seed=3, strategy=strategy, offload=offload, offload_dir=folder) as run:
        model = Tied()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        for _ in run.epochs(2):
            for x, y in loader:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        left = [] if folder is None else os.listdir(folder)
        return run.weights_digest(), digest_of(optimizer.state_dict()), left


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "lamb", "rprop"])
def test_state_on_disk_gives_the_same_bits_and_leaves_no_file(optimizer: str, tmp_path: Path) -> None:
    alone = run_world(1, train, "ddp", optimizer, None)[0]
    for strategy, world_size in (("ddp", 1), ("zero1", 2), ("zero2", 1), ("zero3", 2)):
        found = run_world(world_size, train, strategy, optimizer, str(tmp_path))
        assert found == [(alone[0], alone[1], [])] * world_size
    assert list(tmp_path.iterdir()) == []


def anonymous_bytes() -> int:
    """What RLIMIT_DATA counts: the private memory that can be written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train_in(limit: int | None, folder: str | None) -> str:
    """Trains 16 M parameters (64 MB, Adam's state 128 MB), with so many bytes beyond those at the start."""
    torch.set_num_threads(1)
    with unisono.init(strategy="zero2", offload=None if folder is None else "disk", offload_dir=folder) as run:
        model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(16)))
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        samples = torch.utils.data.TensorDataset(torch.randn(12, 1000, generator=torch.Generator().manual_seed(0)))
        model, optimizer, loader = run.prepare(model, optimizer, samples, global_batch=4, micro_batch=4)
        if limit is not None:
            most = anonymous_bytes() + limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
        return run.weights_digest()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounting of memory")
def test_a_model_whose_state_does_not_fit_trains_from_disk(tmp_path: Path) -> None:
    room = 160 << 20  # 100 are enough from disk, where 240 to 280 are needed without
    unlimited = run_world(1, train_in, None, None)[0]
    (outcome,) = outcomes_of_world(1, train_in, room, None)
    assert "allocate" in str(outcome.error)
    assert run_world(1, train_in, room, str(tmp_path)) == [unlimited]


def build_in(limit: int | None, strategy: str, mapped: bool) -> tuple[str, str]:
    """Builds and trains 35 M parameters (138 MB), with so many bytes beyond those at the start."""
    with unisono.init(strategy=strategy, offload="disk") as run:
        if limit is not None:
            most = anonymous_bytes() + limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        with run.building() if mapped else contextlib.nullcontext():
            model = nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(24)))
            with torch.no_grad():  # as people do once the parts are there
                model[3].weight.mul_(0.5)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        samples = torch.utils.data.TensorDataset(torch.randn(8, 1200, generator=torch.Generator().manual_seed(0)))
        model, optimizer, loader = run.prepare(model, optimizer, samples, global_batch=4, micro_batch=1)
        before = run.weights_digest()
        for (x,) in loader:
            run.backward(model(x).square().mean())
            optimizer.step()
        return before, run.weights_digest()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounting of memory")
def test_a_model_that_does_not_fit_is_built_and_trained_in_shards() -> None:
    room = 115 << 20  # 100 are enough, where 120 to 140 are needed if it is built as ever
    unlimited = run_world(1, build_in, None, "ddp", False)
    assert unlimited[0][0] != unlimited[0][1]
    outcome = outcomes_of_world(4, build_in, room, "zero3", False)[0]
    assert "allocate" in str(outcome.error)
    assert run_world(4, build_in, room, "zero3", True) == unlimited * 4


def train_on_full_disk(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    train("zero1", "adamw", folder)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (outcome,) = outcomes_of_world(1, train_on_full_disk, str(tmp_path))
    assert isinstance(outcome.error, unisono.InputError)
    assert "MB cannot be put into" in str(outcome.error)
    assert "--offload-dir" in str(outcome.error)


def begin(how: dict[str, Any]) -> None:
    unisono.init(**how)


def test_offload_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for how, words in (
        ({"offload": "cpu"}, "offload cpu is for accelerators"),
        ({"offload": "tape"}, "neither cpu nor disk"),
        ({"offload": "disk", "offload_dir": str(tmp_path / "none")}, "does not exist"),
    ):
        (outcome,) = outcomes_of_world(1, begin, how)
        assert isinstance(outcome.error, unisono.InputError)
        assert words in str(outcome.error)


@pytest.mark.parametrize("name", ["adamw", "fused", "lamb"])
def test_an_update_on_a_copy_on_the_host_gives_the_same_bits(name: str) -> None:
    """The path of `--offload cpu`; the copies are real, the device is missing."""

    start = nn.Sequential(nn.Linear(40, 61), nn.Linear(61, 3)).state_dict()

    def body(comm: ThreadCollectives, offload: Offload | None) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(40, 61), nn.Linear(61, 3))
        model.load_state_dict(start)
        optimizer = OPTIMIZERS[name](model.parameters())
        setup = Setup(comm=comm, optimizer=optimizer, names={}, bucket_bytes=1000, offload=offload)
        strategy = OptimizerShardedStrategy(setup)
        plan = StepPlan(2, (range(1), range(1, 2)))
        for step in range(3):
            strategy.begin_step(plan)
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            strategy.add_micro_batch(plan, comm.rank, 1.0)
            strategy.launch(plan)
            strategy.complete(2.0, [True] * 4, 0.5)
            strategy.update(optimizer.step)
        return [param.detach().flatten().tolist() for param in model.parameters()]

    plain = run_threads(2, lambda comm: body(comm, None))
    assert run_threads(2, lambda comm: body(comm, Offload("cpu"))) == plain
    assert plain[0] == plain[1]
