"""Models for the tests of forwards, which meet what a second or a compiled forward could get wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono.forward.options import ForwardOptions


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.into, self.blocks, self.out = nn.Linear(4, 16), nn.ModuleList(block() for _ in range(3)), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.out(x)


class Plain(nn.Module):
    """A block that can be pickled and traced."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.drop(self.linear(x).tanh()) * scale


def apply(model: nn.Module, **options: Any) -> list[str]:
    notes: list[str] = []
    ForwardOptions(**options).apply(model, "cpu", hooks_inside=False, on_note=notes.append)
    return notes


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def batch(n: int = 6) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * n).view(n, 4)
