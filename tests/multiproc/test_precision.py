"""Mixed precision and recomputation: the same bits on any number of ranks, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_strategies import Tied, convolutional, data
from tests.worlds import run_world

MODELS: dict[str, Any] = {"tied": Tied, "convolutional": convolutional}


def train(strategy: str, model_name: str, how: dict[str, Any]) -> dict[str, Any]:
    saved = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[0] += tensor.nbytes
        return tensor

    with unisono.init(seed=3, strategy=strategy, **how) as run:
        model = MODELS[model_name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4, clip_norm=1.0)
        before = run.weights_digest()
        for _ in run.epochs(2):
            for x, y in loader:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    output = model(x)
                assert output.dtype == torch.float32
                run.backward(nn.functional.cross_entropy(output, y))
                optimizer.step()
                optimizer.zero_grad()
        loss = run.evaluate(model, data(), lambda m, b: float(nn.functional.cross_entropy(m(b[0]), b[1])))
        assert all(param.dtype == torch.float32 for param in model.parameters())
        found = {"moved": before != run.weights_digest(), "after": run.weights_digest(), "loss": loss}
        return {**found, "saved": saved[0] / max(len(loader), 1)}


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "saved"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_mixed_precision_is_the_same_everywhere_and_close_to_float32(model: str, recompute: bool) -> None:
    how = {"precision": "bf16-mixed", "recompute": recompute}
    alone = run_world(1, train, "ddp", model, how)[0]
    exact = run_world(1, train, "ddp", model, {})[0]
    assert alone["moved"]
    assert alone["after"] != exact["after"]
    assert alone["loss"] == pytest.approx(exact["loss"], rel=0.1)
    for strategy, world_size in (("ddp", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3)):
        for found in run_world(world_size, train, strategy, model, how):
            assert comparable(found) == comparable(alone)


@pytest.mark.parametrize("model", MODELS)
def test_recomputing_shows_in_memory_and_not_in_the_weights(model: str) -> None:
    exact = run_world(1, train, "ddp", model, {})[0]
    for strategy, world_size in (("ddp", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2)):
        for found in run_world(world_size, train, strategy, model, {"recompute": True}):
            assert comparable(found) == comparable(exact)
            if world_size == 1:
                assert found["saved"] < 0.7 * exact["saved"]
