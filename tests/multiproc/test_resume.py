"""A run that ends anywhere goes on as if it had not: with other ranks, under another strategy, to the same bits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_strategies import MODELS, OPTIMIZERS, OTHERS, data, digest_of
from tests.worlds import outcomes_of_world, run_world

F = nn.functional


class Noisy(torch.utils.data.Dataset[Any]):
    """Augments each sample at random."""

    def __init__(self) -> None:
        self.inner = data()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(6), y


class Average:
    """An exponential moving average of the weights, as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def update(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            if value.is_floating_point():
                self.values[name].lerp_(value.to(self.values[name].dtype), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def train(folder: str, model_name: str, optimizer_name: str, until: int | None, options: dict[str, Any]) -> Any:
    """Trains 3 epochs of 4 steps (16, 16, 16 and 2 samples), or is gone after a step, without a word."""
    options = dict(options)
    workers = options.pop("num_workers", 0)
    with unisono.init(seed=3, run_dir=folder, resume=True, **options) as run:
        model = MODELS[model_name]()
        average = Average(model)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        schedules = torch.optim.lr_scheduler
        warm, down = schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.MultiStepLR(optimizer, [2, 4, 4])
        schedule = schedules.SequentialLR(optimizer, [warm, down], [4])
        model, optimizer, loader = run.prepare(
            model,
            optimizer,
            Noisy(),
            global_batch=16,
            micro_batch=5,
            clip_norm=0.5,
            schedule=schedule,
            num_workers=workers,
        )
        run.track("average", average)
        initial = run.weights_digest()
        started = run.resume()
        first, seen = run.step, []
        for _ in run.epochs(3):
            for x, y in loader:
                if run.micro_batch is not None:
                    seen.append((run.step, run.micro_batch, digest_of(x)))
                if len(x) == 1:
                    x, y = x.repeat(2, 1), y.repeat(2)
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    average.update(run.state())
                    killed_at(run, until)
        return {
            "started": started,
            "first": first,
            "seen": [s for part in run._session.comm.gather_objects(seen) for s in part],
            "initial": initial,
            "weights": run.weights_digest(),
            "average": digest_of(average.values),
            "state": digest_of(optimizer.state_dict()),
            "lr": schedule.get_last_lr(),
            "samples": run.ledger.samples,
        }


def killed_at(run: unisono.Run, until: int | None) -> None:
    """Saves after a step, and is gone."""
    if run.step == until:
        run.save(wait=True)
        run.barrier("the kill")
        os._exit(9)


def files_of(folder: Path, step: int) -> dict[str, str]:
    """A hash of each tensor file of a checkpoint."""
    place = folder / "checkpoints" / f"step-{step:08d}"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(place.glob("*.safetensors"))}


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("started", "first", "seen", "initial")}


def killed(folder: Path, world_size: int, model: str, optimizer: str, until: int, options: dict[str, Any]) -> None:
    for rank in outcomes_of_world(world_size, train, str(folder), model, optimizer, until, options):
        assert rank.exit_code == 9, rank.trace


# (W, strategy) before and after, and the step in between: in the first epoch, at its end, at the short last step, and
# in a later epoch.
WAYS = [
    ((1, "ddp"), (3, "zero3"), 2),
    ((4, "zero1"), (3, "zero2"), 4),
    ((2, "zero3"), (1, "ddp"), 5),
    ((3, "zero2"), (4, "hsdp"), 8),
    ((4, "hsdp"), (2, "zero1"), 11),
    ((1, "dp"), (2, "ddp"), 6),
]


@pytest.mark.parametrize(("before", "after", "until"), WAYS, ids=str)
def test_any_run_goes_on_as_any_other(before: Any, after: Any, until: int, tmp_path: Path) -> None:
    """Cases 4, 5 and 7: the samples, the weights and the state are those of a run that was not interrupted."""
    whole = run_world(1, train, str(tmp_path / "whole"), "tied", "adamw", None, {})[0]
    assert (whole["started"], whole["first"], len(whole["seen"])) == (False, 0, 39)
    folder = tmp_path / "killed"
    killed(folder, before[0], "tied", "adamw", until, {"strategy": before[1]})
    for rank in run_world(after[0], train, str(folder), "tied", "adamw", None, {"strategy": after[1]}):
        assert (rank["started"], rank["first"]) == (True, until)
        assert sorted(rank["seen"]) == [seen for seen in sorted(whole["seen"]) if seen[0] >= until]
        assert outcome(rank) == outcome(whole)


# Buffers, and parameters that are not row-major; the others hold nothing that these do not.
FEW = ("convolutional", "mixed")


def all_but_few_slow(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("model", all_but_few_slow([name for name in MODELS if name != "tied"]))
def test_every_model_goes_on(model: str, tmp_path: Path) -> None:
    whole = run_world(1, train, str(tmp_path / "whole"), model, "adamw", None, {})[0]
    killed(tmp_path / "killed", 2, model, "adamw", 6, {"strategy": "zero3"})
    for rank in run_world(3, train, str(tmp_path / "killed"), model, "adamw", None, {"strategy": "zero1"}):
        assert outcome(rank) == outcome(whole)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_every_optimizer_goes_on(optimizer: str, tmp_path: Path) -> None:
    whole = run_world(1, train, str(tmp_path / "whole"), "tied", optimizer, None, {})[0]
    killed(tmp_path / "killed", 3, "tied", optimizer, 6, {"strategy": "zero2"})
    for rank in run_world(2, train, str(tmp_path / "killed"), "tied", optimizer, None, {"strategy": "ddp"}):
        assert outcome(rank) == outcome(whole)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_every_precision_goes_on(precision: str, tmp_path: Path) -> None:
    how = {"precision": precision}
    whole = run_world(1, train, str(tmp_path / "whole"), "tied", "adamw", None, how)[0]
    killed(tmp_path / "killed", 2, "tied", "adamw", 6, {"strategy": "zero1", **how})
    for rank in run_world(3, train, str(tmp_path / "killed"), "tied", "adamw", None, {"strategy": "zero3", **how}):
        assert outcome(rank) == outcome(whole)
        assert rank["weights"] != whole["initial"], "an overflow in the first steps does not spoil those that follow"


def test_loader_workers_cannot_show(tmp_path: Path) -> None:
    whole = run_world(1, train, str(tmp_path / "whole"), "tied", "adamw", None, {})[0]
    killed(tmp_path / "killed", 2, "tied", "adamw", 6, {"num_workers": 2})
    found = run_world(1, train, str(tmp_path / "killed"), "tied", "adamw", None, {"num_workers": 1})[0]
    assert outcome(found) == outcome(whole)


@pytest.mark.parametrize("model", all_but_few_slow(list(MODELS)))
def test_the_files_are_the_same_to_the_byte(model: str, tmp_path: Path) -> None:
    found = []
    for world_size, strategy in ((1, "ddp"), (3, "ddp"), (2, "zero1"), (3, "zero2"), (3, "zero3"), (4, "hsdp")):
        folder = tmp_path / f"{strategy}-{world_size}"
        killed(folder, world_size, model, "adamw", 2, {"strategy": strategy})
        found.append(files_of(folder, 2))
    assert len(found[0]) == 3
    assert all(files == found[0] for files in found)


def save_anywhere(cwd: str) -> str:
    os.chdir(cwd)
    with unisono.init(seed=3) as run:
        model = nn.Linear(6, 3)
        run.prepare(model, torch.optim.AdamW(model.parameters()), data(), global_batch=16, micro_batch=4)
        return str(run.save())


def test_a_run_without_a_folder_gets_one(tmp_path: Path) -> None:
    found = run_world(2, save_anywhere, str(tmp_path))
    assert found[0] == found[1]
    assert found[0].startswith("runs/")
    assert (tmp_path / found[0] / "state.json").exists()
    assert (tmp_path / found[0]).parents[1].joinpath("summary.json").exists()
