"""Gradients that are laid out during backward are what the loop sees, and what it makes of them is what counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.worlds import run_world
from unisono.strategy import landing

F = nn.functional
GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(
    torch.randn(24, 6, generator=GENERATOR), torch.randint(0, 3, (24,), generator=GENERATOR)
)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3))


def plain(model: nn.Module, batch: Any) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def twice(model: nn.Module, batch: Any) -> None:
    plain(model, batch)
    plain(model, batch)


def clipped(model: nn.Module, batch: Any) -> None:
    plain(model, batch)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def two_losses(model: nn.Module, batch: Any) -> None:
    """As those do that combine gradients: what the first loss gave has to outlive the second's."""
    plain(model, batch)
    first = [param.grad for param in model.parameters()]
    model.zero_grad()
    model(batch[0]).square().mean().backward()
    for param, grad in zip(model.parameters(), first, strict=True):
        param.grad = param.grad + 2 * grad


def exchanged(model: nn.Module, batch: Any) -> None:
    """Two biases of one shape give each other their gradients."""
    plain(model, batch)
    one, other = model[0].bias, model[2].bias
    one.grad, other.grad = other.grad, one.grad


def dropped(model: nn.Module, batch: Any) -> None:
    plain(model, batch)
    model[2].weight.grad = None


LOOPS = [plain, twice, clipped, two_losses, exchanged, dropped]


def bare(loop: Any) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loop(model, DATA[:])
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def trained(loop: Any, micro_batch: int) -> tuple[str, list[torch.Tensor]]:
    assert sum(p.numel() for p in net().parameters()) * 4 > landing.LEAST_BYTES
    with unisono.init(timeout_s=20) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(
            model, optimizer, DATA, global_batch=24, micro_batch=micro_batch, shuffle=False
        )
        for _ in range(2):
            for batch in loader:
                loop(model, batch)
                optimizer.step()
                optimizer.zero_grad()
        return run.weights_digest(), [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_loop_does_with_its_gradients_counts(loop: Any) -> None:
    expected, _ = run_world(1, trained, loop, 12)[0]
    for world_size, strategy in ((2, "ddp"), (2, "zero1")):
        for digest, _ in run_world(world_size, trained, loop, 12, strategy=strategy):
            assert digest == expected, f"{world_size} {strategy}"
    _, weights = run_world(1, trained, loop, 24)[0]
    for own, other, first in zip(weights, bare(loop), net().parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
        assert not torch.equal(own, first) or loop is dropped
