"""Workloads: a model, in-memory data and a loss, each bound by something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        about: One line for the table.
        model: Makes the model.
        dataset: Makes the data.
        loss: Mean loss of a batch.
        micro_batch: Samples a rank and step.
        blocks: The model's repeated blocks, which FSDP2 is to shard one by one, as its documentation says.
        bytes_a_rank: About, with AdamW's state: how many can be measured at once.
    """

    about: str
    model: Callable[[], nn.Module]
    dataset: Callable[[], TensorDataset]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    micro_batch: int
    blocks: Callable[[nn.Module], list[nn.Module]]
    bytes_a_rank: int = 500_000_000


class GPT(nn.Module):
    """About 5 M parameters."""

    def __init__(self, width: int = 256, depth: int = 6, vocabulary: int = 512, context: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens), mask=self.mask, is_causal=True))
        return logits


def _cnn() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    first = nn.Sequential(*block(3, 32), *block(32, 64), nn.MaxPool2d(2))
    second = nn.Sequential(*block(64, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(first, second, nn.Linear(96, 100))


def _mlp(width: int, depth: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    return make


def _images(n: int, size: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(n, 3, size, size), torch.randint(0, 100, (n,)))


def _vectors(n: int, width: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(n, width), torch.randint(0, 10, (n,)))


def _tokens(n: int, context: int) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randint(0, 512, (n, context)), torch.randint(0, 512, (n, context)))


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _children(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.body.layers)  # type: ignore[union-attr,arg-type]


WORKLOADS = {
    "tiny": Workload("0.01 M, nothing but overhead", _mlp(64, 2), _vectors(65536, 64), _classify, 16, _children),
    "mlp": Workload("5.8 M, bound by what is exchanged", _mlp(1200, 4), _vectors(8192, 1200), _classify, 64, _children),
    "gpt": Workload("5 M, bound by what is computed", GPT, _tokens(2048, 128), _next_token, 8, _layers),
    "cnn": Workload("0.09 M, convolutions", _cnn, _images(2048, 32), _classify, 32, _children),
    "wide": Workload(
        "100 M, bound by memory", _mlp(5000, 4), _vectors(512, 5000), _classify, 8, _children, 2_600_000_000
    ),
}
