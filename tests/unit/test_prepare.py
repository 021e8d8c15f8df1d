"""What `prepare` does to a model, in a world of one and on ranks that are threads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import run_threads
from unisono.comm.api import Collectives
from unisono.comm.local import LocalCollectives
from unisono.errors import InputError
from unisono.evaluate import EvalPlan, evaluate
from unisono.launch.environment import Place
from unisono.launch.session import Session
from unisono.observe.timer import PhaseTimer
from unisono.prepare import Preparation
from unisono.strategy.stepper import Stepper

CPU = torch.device("cpu")
SAMPLES = [torch.full((3,), float(index)) for index in range(8)]


def prepared(comm: Collectives, model: nn.Module) -> tuple[Preparation, torch.optim.Optimizer, Any]:
    timer = PhaseTimer(CPU)
    session = Session(Place(comm.rank, comm.world_size), CPU, comm, None, 10.0)
    preparation = Preparation(session, Stepper(comm, CPU, seed=0, timer=timer), timer, seed=0, strategy="ddp")
    preparation.add_model(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preparation.add_optimizer(optimizer, None, None, lambda note: None)
    return preparation, optimizer, preparation.loader(SAMPLES, global_batch=4, micro_batch=2)


def train(comm: Collectives, model: nn.Module) -> list[float]:
    _, optimizer, loader = prepared(comm, model)
    before = [param.clone() for param in model.parameters()]
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize("inside", [True, False])
def test_a_sync_batch_norm_is_refused(inside: bool) -> None:
    norm = nn.SyncBatchNorm(3)
    model = nn.Sequential(nn.Linear(3, 3), norm) if inside else norm
    with pytest.raises(InputError, match=f"^{'1' if inside else 'model'} is a SyncBatchNorm, .*: use BatchNorm, "):
        prepared(LocalCollectives(), model)


class Expanded(nn.Module):
    """Two names of one buffer that is one number three times."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((1, 1), 0.5).expand(1, 3))
        self.register_buffer("again", self.scale)
        self.register_buffer("whole", torch.ones(1, 3))
        with torch.no_grad():  # of its own: ranks that are threads share the generator
            self.linear.weight.copy_(torch.eye(3))
            self.linear.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 0.9
        found: torch.Tensor = self.linear(x) * self.scale
        return found


def test_expanded_buffers_get_memory_of_their_own() -> None:
    model = Expanded()
    whole = model.whole
    prepared(LocalCollectives(), model)
    assert model.scale.stride() == (3, 1)
    assert model.scale.tolist() == [[0.5, 0.5, 0.5]]
    assert model.again is model.scale
    assert model.whole is whole


def test_a_model_with_expanded_buffers_trains() -> None:
    expected = train(LocalCollectives(), Expanded())
    assert run_threads(2, lambda comm: train(comm, Expanded())) == [expected] * 2


def test_a_scripted_model_trains_and_is_evaluated() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(plain)
    session = Session(Place(), CPU, LocalCollectives(), None, 10.0)
    state = {name: value.clone() for name, value in scripted.state_dict().items()}

    def metric(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.train()
        found: torch.Tensor = model(batch).sum()
        return found

    evaluate(session, scripted, metric, EvalPlan.of(SAMPLES, 4, 0, {}))
    assert all(torch.equal(value, state[name]) for name, value in scripted.state_dict().items())
    found = train(LocalCollectives(), scripted)
    plain.load_state_dict(state)
    assert found == train(LocalCollectives(), plain)
