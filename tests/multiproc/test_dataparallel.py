"""`dp`: one process with several threads, or devices, gives the bits of `ddp` on one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_cases import train_forked, train_gan, train_tied
from tests.multiproc.test_strategies import MODELS, adamw, data, train
from tests.worlds import outcomes_of_world, run_world
from unisono.strategy import catalog, replicas, threaded

F = nn.functional


def watched(function: Any, args: tuple[Any, ...], on_copies: bool) -> tuple[Any, int, int]:
    """Returns what `function` does, how many backwards ran in other threads, and how many forwards on copies."""
    elsewhere, copied = [0], [0]
    differentiate, call = threaded._differentiate, replicas.Scattered.__call__

    def counted(*args: Any) -> Any:
        elsewhere[0] += threading.current_thread() is not threading.main_thread()
        return differentiate(*args)

    def counted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        copied[0] += self.chosen > 0 and torch.is_grad_enabled()
        return call(self, *args, **kwargs)

    threaded._differentiate = counted
    replicas.Scattered.__call__ = counted_call  # type: ignore[method-assign]
    if on_copies:  # copies on the one device there is
        catalog._workers = lambda count: (count, [torch.device("cpu")] * count)
    found = function(*args)
    assert not [thread for thread in threading.enumerate() if "unisono" in thread.name], "threads end with the run"
    return found, elsewhere[0], copied[0]


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow if m in ("recurrent", "parametrized") else ()) for m in MODELS]
)
def test_threads_and_copies_give_the_same_bits_for_every_model(model: str) -> None:
    args = ("ddp", model, "adamw")
    expected = run_world(1, train, *args)[0]
    assert expected["before"] != expected["after"]
    for workers, on_copies in ((1, False), (2, False), (3, False), (3, True)):
        found, threads, copies = run_world(
            1, watched, train, ("dp", *args[1:]), on_copies, strategy="dp", workers=workers
        )[0]
        assert found == expected
        if model == "recomputed":  # a checkpoint runs forwards in backward
            assert threads == copies == 0
        else:
            assert (threads > 0) == (workers > 1)
            assert (copies > 0) == on_copies


@pytest.mark.parametrize(("function", "args"), [(train_forked, ()), (train_tied, ()), (train_gan, ("",))])
def test_cases_10_21_and_22(function: Any, args: tuple[Any, ...]) -> None:
    expected = run_world(1, function, *args)
    for on_copies in (False, True):
        found = run_world(1, watched, function, args, on_copies, strategy="dp", workers=2)[0]
        assert [found[0]] == expected


class Frozen(nn.Module):
    """BatchNorm in eval mode, whose backward reads the buffers; a parameter that thaws; one that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.two.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.two(self.norm(self.one(x)))


def odd_loop(style: str) -> str:
    """Loops that mix what runs in threads with what does not."""
    with unisono.init(seed=3) as run:
        model = Frozen()
        factor = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), factor], lr=0.1, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=3)
        if style == "hook":
            model.one.weight.register_hook(lambda grad: grad * 2)
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(loader):
                if run.step == 3:
                    model.two.bias.requires_grad_(True)
                loss = F.cross_entropy(model(x) * factor, y)
                if style == "twice" and number % 3 == 0:
                    run.backward(loss / 2)
                    run.backward(F.cross_entropy(model(x) * factor, y) / 2)
                elif style == "mixed" and number % 3 == 0:
                    run.log(loss=loss.detach())
                    loss.backward()
                else:
                    run.backward(loss)
                if style == "dropped" and run.step % 2:
                    optimizer.zero_grad()
                if style == "skipped" and run.step % 2:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
        return run.weights_digest()


@pytest.mark.parametrize("style", ["plain", "hook", "twice", "mixed", "dropped", "skipped"])
def test_loops_as_people_write_them(style: str) -> None:
    expected = run_world(1, odd_loop, style)[0]
    for on_copies in (False, True):
        found, threads, _ = run_world(1, watched, odd_loop, (style,), on_copies, strategy="dp", workers=2)[0]
        assert found == expected
        assert (threads > 0) == (style != "hook")


def changes_gradients() -> None:
    with unisono.init(seed=3) as run:
        model = nn.Linear(6, 3)
        model, optimizer, loader = run.prepare(model, adamw(model), data(), global_batch=16, micro_batch=4)
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            model.weight.grad = torch.ones(3, 6)
            optimizer.step()


def test_a_gradient_that_is_changed_while_it_is_computed_is_refused() -> None:
    assert outcomes_of_world(1, changes_gradients)[0].error is None
    outcome = outcomes_of_world(1, changes_gradients, strategy="dp", workers=2)[0]
    assert "a gradient was changed between run.backward() and optimizer.step()" in str(outcome.error)


def test_several_processes_are_refused() -> None:
    for outcome in outcomes_of_world(2, changes_gradients, strategy="dp"):
        assert "dp is one process with several devices or threads, and this is one of 2 processes" in str(outcome.error)
