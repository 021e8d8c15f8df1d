"""Recomputation: less is kept, and nothing else can be told."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.forwards import Net, Plain, apply, batch, seed
from unisono.errors import InputError

F = nn.functional


class Block(nn.Module):
    """All that a second forward could get wrong: buffers of three kinds, generators of three kinds, a keyword."""

    count: torch.Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", None)
        self.register_buffer("sum", torch.zeros(width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.count = self.count + 1
        self.sum.add_(x.detach().sum(0))
        self.seen = x.detach().mean() if self.seen is None else self.seen + x.detach().mean()
        y = self.out(self.drop(F.gelu(self.into(self.norm(x)))))
        if random.random() < 0.5:
            y = y.tanh()
        return x + y * scale * float(np.random.rand()) / self.count + self.seen * self.sum.mean().clone()


def trajectory(options: dict[str, Any], *, calls: int = 1, backwards: int = 1) -> list[Any]:
    """Everything that three steps leave behind."""
    seed()
    model = Net(Block)
    apply(model, **options)
    found: list[Any] = []
    for step in range(3):
        model.zero_grad()
        loss = torch.stack([model(batch() * (step + call + 1)).square().mean() for call in range(calls)]).sum()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        found += [loss.item(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
        found += [random.random(), float(np.random.rand()), torch.rand(())]
    return found


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize(("calls", "backwards"), [(1, 1), (2, 1), (1, 2)])
def test_recomputation_cannot_show(precision: str, calls: int, backwards: int) -> None:
    expected = trajectory({"precision": precision}, calls=calls, backwards=backwards)
    found = trajectory({"precision": precision, "recompute": True}, calls=calls, backwards=backwards)
    assert len(found) == len(expected) > 60
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_spectral_norm_goes_on_from_the_first_forward() -> None:
    found = []
    for recompute in (False, True):
        seed()
        blocks = [nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*blocks)
        apply(model, recompute=recompute)
        for _ in range(3):
            model(batch()).sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of what autograd keeps between forward and backward, but for the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    found = sum(kept.values())
    loss.backward()
    return found


def test_less_is_kept() -> None:
    model = Net(Block)
    whole = kept_bytes(model, batch(64))
    apply(model, recompute=True)
    assert 0 < kept_bytes(model, batch(64)) < whole / 4


def test_a_block_runs_once_more_only_where_there_is_a_backward() -> None:
    calls: list[str] = []

    class Counted(Plain):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            calls.append("forward")
            return super().forward(x, scale)

    model = Net(Counted)
    model.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
    apply(model, recompute=True)
    model(batch()).sum().backward()
    assert (calls.count("forward"), calls.count("hook")) == (6, 1)
    for context, mode in ((torch.no_grad(), True), (torch.enable_grad(), False)):
        calls.clear()
        with context:
            loss = model.train(mode)(batch()).sum()
        if loss.requires_grad:
            loss.backward()
        assert calls.count("forward") == 3


def test_what_cannot_be_run_twice_is_refused() -> None:
    class Large(Plain):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(16_385))

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            self.table += 1
            return super().forward(x, scale)

    class Writes(Plain):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            x += 1
            return super().forward(x, scale)

    for block, what in ((Large, r"buffer table \(more than 16384 elements\)"), (Writes, "input")):
        model = Net(block)
        apply(model, recompute=True)
        with pytest.raises(InputError, match=f"^recompute runs {block.__name__} twice, and it writes to its {what}: "):
            model(batch())
