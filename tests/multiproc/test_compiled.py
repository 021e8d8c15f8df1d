"""Compiled runs: the same bits as one another on any number of ranks, and those of an uncompiled run but for rounding.

Kernels take seconds each to build, so all is in few worlds, and slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.multiproc.test_strategies import Tied, data
from tests.worlds import run_world

F = nn.functional


class Whole(nn.Module):
    """No repeated blocks; statistics, dropout, and a shape that only some ranks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.drop, self.out = (
            nn.Linear(6, 24),
            nn.BatchNorm1d(24),
            nn.Dropout(0.2),
            nn.Linear(24, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(F.gelu(self.norm(self.into(x)))))


MODELS: dict[str, Any] = {"blocks": Tied, "whole": Whole}


def train(strategy: str, model_name: str, how: dict[str, Any]) -> dict[str, Any]:
    with unisono.init(seed=3, strategy=strategy, **how) as run:
        model = MODELS[model_name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # 16 = 5 + 5 + 5 + 1, and 2 in the last step: shapes that some ranks never meet, or in another order.
        model, optimizer, loader = run.prepare(model, optimizer, data(), global_batch=16, micro_batch=5)
        before, losses = run.weights_digest(), []
        for _ in run.epochs(2):
            for x, y in loader:
                if len(x) == 1:
                    x, y = x.repeat(3, 1), y.repeat(3)  # BatchNorm needs more than one
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if run.step_done:
                    losses.append(run.values["loss"])
        accuracy = run.evaluate(model, data(), lambda m, b: float(F.cross_entropy(m(b[0]), b[1])), micro_batch=7)
        after = run.weights_digest()
        assert before != after
        return {"after": after, "losses": losses, "eval": accuracy}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_runs_are_the_same_everywhere(model: str) -> None:
    plain = run_world(1, train, "ddp", model, {})[0]
    alone = run_world(1, train, "ddp", model, {"compile": True}, timeout_s=400)[0]
    assert alone["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert alone["eval"] == pytest.approx(plain["eval"], rel=1e-3)
    worlds = [("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero2", 3), *([("zero3", 2)] if model == "blocks" else [])]
    for strategy, world_size in worlds:
        found = run_world(world_size, train, strategy, model, {"compile": True}, timeout_s=400)
        assert found == [alone] * world_size, (strategy, world_size)


@pytest.mark.slow
def test_compiled_blocks_in_bfloat16_may_be_recomputed() -> None:
    how = {"compile": True, "precision": "bf16-mixed"}
    alone = run_world(1, train, "ddp", "blocks", how, timeout_s=400)[0]
    for strategy, world_size in (("ddp", 1), ("zero2", 2), ("zero3", 3)):
        found = run_world(world_size, train, strategy, "blocks", {**how, "recompute": True}, timeout_s=400)
        assert found == [alone] * world_size, (strategy, world_size)
