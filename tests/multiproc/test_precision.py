"""Precisions and recomputation: the same bits on any number of ranks, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_strategies import OPTIMIZERS, Tied, convolutional, data, digest_of
from tests.worlds import outcomes_of_world, run_world

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
        before, norms = run.weights_digest(), []
        for _ in run.epochs(2):
            for x, y in loader:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    output = model(x)
                assert output.dtype == torch.float32
                run.backward(nn.functional.cross_entropy(output, y))
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    norms.append(float(run._stepper._exchange.norm))
        loss = run.evaluate(model, data(), lambda m, b: float(nn.functional.cross_entropy(m(b[0]), b[1])))
        low = how.get("precision") == "bf16"
        assert all(param.dtype == (torch.bfloat16 if low else torch.float32) for param in model.parameters())
        found = {"moved": before != run.weights_digest(), "after": run.weights_digest(), "loss": loss, "norms": norms}
        return {**found, "saved": saved[0] / max(len(loader), 1)}


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "saved"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("precision", "recompute"), [("bf16-mixed", False), ("bf16-mixed", True), ("bf16", False), ("fp16-mixed", True)]
)
def test_16_bits_are_the_same_everywhere_and_close_to_float32(model: str, precision: str, recompute: bool) -> None:
    how = {"precision": precision, "recompute": recompute}
    alone = run_world(1, train, "ddp", model, how)[0]
    exact = run_world(1, train, "ddp", model, {})[0]
    assert alone["moved"]
    assert alone["after"] != exact["after"]
    assert alone["loss"] == pytest.approx(exact["loss"], rel=0.2 if precision == "fp16-mixed" else 0.1)
    assert alone["norms"][-1] == pytest.approx(exact["norms"][-1], rel=0.5), "no loss scale is left in it"
    for strategy, world_size in (("ddp", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3)):
        for found in run_world(world_size, train, strategy, model, how):
            assert comparable(found) == comparable(alone)
    assert comparable(run_world(1, train, "dp", model, {**how, "workers": 2})[0]) == comparable(alone)


@pytest.mark.parametrize("model", MODELS)
def test_recomputing_shows_in_memory_and_not_in_the_weights(model: str) -> None:
    exact = run_world(1, train, "ddp", model, {})[0]
    for strategy, world_size in (("ddp", 1), ("ddp", 2), ("zero2", 2), ("zero3", 2)):
        for found in run_world(world_size, train, strategy, model, {"recompute": True}):
            assert comparable(found) == comparable(exact)
            if world_size == 1:
                assert found["saved"] < 0.7 * exact["saved"]


def small_steps(strategy: str, optimizer_name: str, masters: bool) -> tuple[str, str, float]:
    """Updates of which bfloat16 would not see one; the optimizer's state is saved and loaded in between."""
    with unisono.init(seed=3, strategy=strategy, precision="bf16" if masters else "float32") as run:
        model = nn.Linear(6, 3) if masters else nn.Linear(6, 3).bfloat16()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        for group in optimizer.param_groups:
            group["lr"] = 2e-5
        before = run.state()["weight"].clone()
        for epoch in run.epochs(40):
            for x, y in loader:
                run.backward(nn.functional.cross_entropy(model(x if masters else x.bfloat16()).float(), y))
                optimizer.step()
            if epoch == 7:
                saved = optimizer.state_dict()
                spoiled = {k: {n: v * 0 for n, v in s.items()} for k, s in saved["state"].items()}
                optimizer.load_state_dict({**saved, "state": spoiled})
                nudged = {k: {n: v * (1 + 2**-16) for n, v in s.items()} for k, s in saved["state"].items()}
                optimizer.load_state_dict({**saved, "state": nudged})
                assert digest_of(optimizer.state_dict()["state"]) == digest_of(nudged), "nothing is rounded"
                optimizer.load_state_dict(saved)
        return run.weights_digest(), digest_of(optimizer.state_dict()), float((run.state()["weight"] != before).sum())


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_small_updates_add_up_in_the_float32_copy(optimizer: str) -> None:
    alone = run_world(1, small_steps, "ddp", optimizer, True)[0]
    assert alone[2] >= 8
    lossy = run_world(1, small_steps, "ddp", optimizer, False)[0]
    assert lossy[2] <= alone[2] / 2, "without a copy most are lost"
    for strategy, world_size in (("ddp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2)):
        assert run_world(world_size, small_steps, strategy, optimizer, True) == [alone] * world_size


class Overflows(nn.Module):
    """Its gradient cannot be held by float16 where an input is large: in one micro-batch of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def overflow(strategy: str) -> dict[str, Any]:
    with unisono.init(seed=3, strategy=strategy, precision="fp16-mixed") as run:
        model = Overflows()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = data().tensors[0].clone()
        inputs[20] *= 1e4
        samples = torch.utils.data.TensorDataset(inputs, data().tensors[1])
        model, optimizer, loader = run.prepare(model, optimizer, samples, global_batch=16, micro_batch=4)
        digests, scales, losses = [run.weights_digest()], [], []
        for x, y in loader:
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            if run.step_done:
                digests.append(run.weights_digest())
                scales.append(run.values["loss_scale"])
                losses.append(run.values["loss"])
        return {"digests": digests, "scales": scales, "losses": losses}


def test_a_step_that_overflows_is_left_out_by_all_ranks() -> None:
    alone = run_world(1, overflow, "ddp")[0]
    kept = [before == after for before, after in zip(alone["digests"], alone["digests"][1:], strict=False)]
    assert kept.count(True) == 1, "one step moves nothing"
    where = kept.index(True)
    assert alone["scales"] == [65536.0] * (where + 1) + [32768.0] * (3 - where)
    for strategy, world_size in (("ddp", 3), ("zero1", 2), ("zero2", 2), ("zero3", 2)):
        assert run_world(world_size, overflow, strategy) == [alone] * world_size


def plain_backward() -> None:
    with unisono.init(precision="fp16-mixed") as run:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=4)
        for x, _ in loader:
            model(x).sum().backward()
            optimizer.step()


def test_a_loss_that_is_not_scaled_is_refused() -> None:
    outcome = outcomes_of_world(1, plain_backward)[0]
    assert "call run.backward(loss) in place of loss.backward()" in str(outcome.error)
