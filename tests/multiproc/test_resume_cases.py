"""Loops as people write them, saved in the middle and gone on with: what is unusual has to survive too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_resume import killed_at
from tests.multiproc.test_strategies import data, digest_of
from tests.worlds import outcomes_of_world, run_world

F = nn.functional


class Odd(nn.Module):
    """Names that files might trip over, parameters of no and of one element, a buffer that two names share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a/b": nn.Linear(6, 8), "größe": nn.Linear(8, 8), "last": nn.Linear(8, 3)})
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("one", torch.zeros(3))
        self.register_buffer("two", self.one)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one.add_(1)
        return self.layers["last"](self.layers["größe"](self.layers["a/b"](x).relu()).relu()) * self.scale


class Counts(torch.optim.Optimizer):
    """Keeps numbers, texts and None beside tensors, and state that belongs to no parameter."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "extra": (1, None)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["word"], state["nothing"] = "seen", None
                    param.add_(param.grad, alpha=-group["lr"] / state["count"] ** 0.5)


def end(run: unisono.Run, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"weights": run.weights_digest(), "state": [digest_of(o.state_dict()) for o in optimizers], "step": run.step}


def gan(folder: str, until: int | None, strategy: str) -> Any:
    with unisono.init(seed=3, run_dir=folder, resume=True, strategy=strategy) as run:
        maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        one, two = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.SGD(judge.parameters(), 0.05, momentum=0.9)
        maker, one, loader = run.prepare(maker, one, data(), global_batch=16, micro_batch=5, name="maker")
        judge, two = run.prepare(judge, two, name="judge")
        run.resume()
        for _ in run.epochs(3):
            for x, _ in loader:
                x = x if len(x) > 1 else x.repeat(2, 1)
                fake = maker(torch.randn(len(x), 4))
                (F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(x)).mean()).backward()
                two.step()
                two.zero_grad()
                if run.step % 2 == 0:
                    F.softplus(-judge(fake)).mean().backward()
                    one.step()
                    one.zero_grad()
                if run.step_done:  # in the others only the judge was stepped, so the step ends when the loader goes on
                    killed_at(run, until)
        return end(run, one, two)


def thawed(folder: str, until: int | None, strategy: str) -> Any:
    """A layer thaws in step 4, and another joins the optimizer in step 7, with a learning rate that is a tensor."""
    with unisono.init(seed=3, run_dir=folder, resume=True, strategy=strategy) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        model[2].requires_grad_(False)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=5)
        step = saved_step(folder)
        if step > 4:
            model[2].requires_grad_(True)
        if step > 7:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": torch.tensor(0.02)})
        run.resume()
        for _ in run.epochs(3):
            for x, y in loader:
                if run.step == 4:
                    model[2].requires_grad_(True)
                if run.step == 7 and len(optimizer.param_groups) == 1:
                    model[0].requires_grad_(True)
                    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": torch.tensor(0.02)})
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    killed_at(run, until)
        return end(run, optimizer)


def saved_step(folder: str) -> int:
    found = sorted(path.name for path in Path(folder, "checkpoints").glob("step-*"))
    return int(found[-1][-8:]) + 1 if found else 0


def odd(folder: str, until: int | None, strategy: str) -> Any:
    with unisono.init(seed=3, run_dir=folder, resume=True, strategy=strategy) as run:
        model = Odd()
        optimizer = Counts(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        run.track("plateau", plateau)
        run.resume()
        for epoch in run.epochs(5):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 1 and run.step_done and run.step == 6:
                    break  # the epoch is over
            plateau.step(run.evaluate(model, data(), lambda m, b: float(F.cross_entropy(m(b[0]), b[1]))))
            killed_at(run, until)
        return {**end(run, optimizer), "plateau": digest_of(plateau.state_dict()), "buffer": float(model.two[0])}


def workers(folder: str, until: int | None, strategy: str) -> Any:
    """A DataLoader with workers that stay, and a second dataset in step with the first."""
    with unisono.init(seed=3, run_dir=folder, resume=True, strategy=strategy) as run:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        one = torch.utils.data.DataLoader(data(), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True)
        model, optimizer, loader = run.prepare(model, optimizer, one, global_batch=16)
        other = run._prepared.loader(data(), global_batch=16, micro_batch=5)
        run.resume()
        for _ in run.epochs(3):
            for (x, y), (z, _) in zip(loader, other, strict=True):
                F.cross_entropy(model(x + 0.1 * z), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    killed_at(run, until)
        return end(run, optimizer)


CASES: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (gan, (3, 7)),
    (thawed, (2, 4, 5, 9)),
    (odd, (4, 6, 10)),
    (workers, (6,)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "zero3"), (1, "ddp")), pytest.param((1, "ddp"), (3, "zero1"), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize(
    ("function", "until"),
    [
        pytest.param(function, step, marks=pytest.mark.slow if function is workers else ())
        for function, steps in CASES
        for step in steps
    ],
)
def test_what_is_unusual_goes_on(
    function: Callable[..., Any], until: int, before: Any, after: Any, tmp_path: Path
) -> None:
    whole = run_world(1, function, str(tmp_path / "whole"), None, "ddp")[0]
    folder = str(tmp_path / "killed")
    for rank in outcomes_of_world(before[0], function, folder, until, before[1]):
        assert rank.exit_code == 9, rank.trace
    assert run_world(after[0], function, folder, None, after[1]) == [whole] * after[0]


def rollback(folder: str, strategy: str) -> list[Any]:
    """Goes back in the same process, twice, and forward again."""
    with unisono.init(seed=3, run_dir=folder, strategy=strategy) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4, drop_last=True)
        found, place = [], None
        for attempt in range(3):
            if place is not None:
                run.resume(place)
            for _ in run.epochs(3):
                for x, y in loader:
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.step_done and run.step == 4 and attempt == 0:
                        place = run.save()
                        run.save(wait=True)
            found.append(end(run, optimizer))
        return found


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "ddp"), (2, "zero1"), (2, "zero3"), (3, "zero2")])
def test_a_run_goes_back_in_the_same_process(tmp_path: Path, world_size: int, strategy: str) -> None:
    alone = run_world(1, rollback, str(tmp_path / "alone"), "ddp")[0]
    assert alone == [alone[0]] * 3
    assert run_world(world_size, rollback, str(tmp_path / "it"), strategy) == [alone] * world_size
