"""Evaluation and prediction on ranks that are threads: what a metric does to the model, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import run_threads
from unisono.comm.api import Collectives
from unisono.comm.local import LocalCollectives
from unisono.errors import InputError
from unisono.evaluate import EvalPlan, evaluate, evaluating, predict
from unisono.launch.environment import Place
from unisono.launch.session import Session

TEN = [(torch.full((3,), float(index)), index) for index in range(10)]
WORLDS = (1, 2, 3, 5)


def session(comm: Collectives) -> Session:
    return Session(Place(comm.rank, comm.world_size), torch.device("cpu"), comm, None, 10.0)


def plan(micro_batch: int = 3, **options: Any) -> EvalPlan:
    return EvalPlan.of(TEN, micro_batch, 0, options)


def evaluated(metric: Callable[[nn.Module, Any], Any], model: nn.Module | None = None, **options: Any) -> Any:
    return evaluate(session(LocalCollectives()), model or nn.Identity(), metric, plan(**options))


def predicted(function: Callable[[nn.Module, Any], Any]) -> Any:
    return predict(session(LocalCollectives()), nn.Identity(), function, plan())


# Buffers


class Counting(nn.Module):
    """Changes its buffers in all the ways there are, and computes something else in every forward."""

    inplace: torch.Tensor
    assigned: torch.Tensor
    by_data: torch.Tensor
    resized: torch.Tensor
    grown: torch.Tensor
    empty: torch.Tensor | None
    cache: torch.Tensor | None
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("inplace", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("by_data", torch.zeros(2))
        self.register_buffer("resized", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("empty", None)
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.alias = self.inplace  # a second name of the same tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train()  # its kernel writes without raising the version counter
        self.norm(torch.cat([x, x + 1]))
        self.inplace.add_(1)
        self.assigned = self.assigned + 1
        self.by_data.data.add_(1)
        self.resized.data = torch.cat([self.resized, torch.ones(1)])
        self.grown = torch.cat([self.grown, torch.ones(1)])
        self.empty = torch.ones(1) if self.empty is None else self.empty + 1
        self.cache = self.table = torch.arange(4.0)
        seen = [self.inplace, self.assigned, self.by_data, self.resized, self.grown, self.empty]
        return x.sum() * torch.cat([*seen, self.norm.state_dict()["running_mean"]]).sum()


def state_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def run_counting(comm: Collectives, predicts: bool) -> list[float]:
    model = Counting()
    tensors, state = dict(model.named_buffers()), state_of(model)
    found: list[float]
    if predicts:
        found = predict(session(comm), model, lambda m, b: [float(m(b[0]))] * len(b[1]), plan())
    else:
        found = list(evaluate(session(comm), model, lambda m, b: {"sum": (m(b[0]), 1)}, plan()).values())
    for name, value in model.named_buffers():
        assert name in ("cache", "table") or value is tensors[name], name
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.alias is model.inplace
    assert model.empty is None
    return found


@pytest.mark.parametrize("predicts", [False, True])
def test_buffers_that_a_metric_changes_are_put_back(predicts: bool) -> None:
    """Before each micro-batch, or the number of ranks would show; and at the end, or training would see it."""
    expected = run_counting(LocalCollectives(), predicts)
    for world_size in WORLDS[1:]:
        assert run_threads(world_size, lambda comm: run_counting(comm, predicts)) == [expected] * world_size


def test_buffers_are_put_back_after_an_error_and_in_a_sample_too() -> None:
    model = Counting()
    state = state_of(model)

    def fails(m: nn.Module, batch: Any) -> float:
        m(batch[0])
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        evaluated(fails, model)
    with evaluating(model):
        model(torch.ones(2, 3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training and model.norm.training


def test_a_cache_may_stay() -> None:
    """It is no state, and to make it again for each micro-batch would cost what it is there to save."""
    model = Counting()
    evaluated(lambda m, b: float(m(b[0])), model)
    assert model.cache is not None
    assert len(model.table) == 4
    kept = model.cache

    def drop(m: Any, batch: Any) -> float:
        m.cache = None
        return 1.0

    evaluated(drop, model)
    assert model.cache is kept  # what was there at the start comes back


def test_what_has_not_changed_is_not_written() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    versions = [buffer._version for buffer in model.buffers()]
    evaluated(lambda m, b: m(b[0]).sum(), model)
    assert [buffer._version for buffer in model.buffers()] == versions


def test_buffers_of_every_kind_can_be_kept() -> None:
    model = nn.Module()
    kinds = {
        "sparse": torch.eye(2).to_sparse(),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "expanded": torch.ones(1).expand(3),
        "nan": torch.tensor([math.nan]),
        "complex": torch.ones(2, dtype=torch.complex128),
    }
    for name, value in kinds.items():
        model.register_buffer(name, value)
    model.lazy = nn.LazyBatchNorm1d()

    def metric(m: Any, batch: Any) -> float:
        m.sparse.mul_(2)
        m.nan.zero_()
        m.lazy(batch[0])
        return 1.0

    assert evaluated(metric, model) == {"value": 1.0}
    assert dict(model.named_buffers())["expanded"] is kinds["expanded"]
    assert kinds["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert kinds["nan"].isnan().all()


# Weights of a mean


def test_a_mean_weighs_as_many_samples_as_its_micro_batch_has() -> None:
    """The first dimension may be anything: time steps, in a batch that is (time, batch, ...)."""

    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.stack([x for x, _ in samples], dim=1)  # (3, samples)

    for micro_batch in (3, 4, 10):
        found = evaluated(lambda m, b: b.mean(), micro_batch=micro_batch, collate=collate)
        assert found["value"] == pytest.approx(4.5, abs=1e-6)
    assert evaluated(lambda m, b: {"a": float(b[0]) + 1}, micro_batch=4, collate=lambda s: [len(s)]) == {"a": 4.6}


@pytest.mark.parametrize("value", [torch.ones(3), "high", None, (1, 2, 3)])
def test_a_metric_that_returns_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=f"a metric returned {type(value).__name__}: return \\(sum, count\\)"):
        evaluated(lambda m, b: value)


@pytest.mark.parametrize("other", [-math.inf, math.nan])
def test_infinities_that_cancel_are_no_error(other: float) -> None:
    found = evaluated(lambda m, b: {"x": (math.inf if 0 in b[1] else other, 1), "y": (math.inf, 1), "z": (1e308, 1)})
    assert math.isnan(found["x"])
    assert found["y"] == math.inf
    assert math.isnan(found["z"])


# Predictions


def test_a_tensor_or_a_list_with_one_result_per_sample() -> None:
    assert predicted(lambda m, b: b[1] * 2).tolist() == [2 * index for index in range(10)]
    assert predicted(lambda m, b: [{"index": int(i)} for i in b[1]]) == [{"index": i} for i in range(10)]
    assert predicted(lambda m, b: b[1] if 0 in b[1] else b[1].tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda m, b: (b[0], b[1]), "returned tuple: return a tensor or a list, with one result for each"),
        (lambda m, b: {"x": b[0]}, "returned dict: return a tensor or a list"),
        (lambda m, b: None, "returned NoneType: return a tensor or a list"),
        (lambda m, b: b[1].numpy(), "returned ndarray: return a tensor or a list"),
        (lambda m, b: b[1].sum(), "returned a tensor without dimensions for a batch of 3 samples"),
        (lambda m, b: b[0].T, "returned 3 results for a batch of 1 sample:"),
        (lambda m, b: [1], "returned 1 result for a batch of 3 samples: return one result for each"),
        # Ten in all, but not one for each.
        (lambda m, b: [0] * {0: 2, 3: 4, 6: 3, 9: 1}[int(b[1][0])], "returned 2 results for a batch of 3 samples"),
    ],
)
def test_other_results_are_refused(function: Callable[[nn.Module, Any], Any], part: str) -> None:
    with pytest.raises(InputError) as caught:
        predicted(function)
    assert part in str(caught.value)
