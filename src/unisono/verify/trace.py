"""Trace: what a run did, micro-batch by micro-batch and step by step, in hashes that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from unisono.numerics.digest import tensor_bytes
from unisono.recipe import Recipe

WEIGHTS = "weights.safetensors"


@dataclass
class Trace:
    """What one rank saw.

    Attributes:
        threads: Intra-op threads.
        micros: By "step/micro-batch": a hash of the batch, and the loss as `float.hex`.
        steps: For each step, a hash of every tensor of the model's state by name; on rank 0 only.
        digest: `weights_digest` in the end.
    """

    threads: int
    micros: dict[str, tuple[str, str]] = field(default_factory=dict)
    steps: list[dict[str, str]] = field(default_factory=list)
    digest: str = ""

    def micro(self, step: int, index: int, batch_hash: str, loss: Any) -> None:
        """Notes one micro-batch."""
        value = loss[0] if isinstance(loss, tuple) else loss
        shown = float(value.detach()).hex() if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
        self.micros[f"{step}/{index}"] = (batch_hash, shown)

    def step(self, state: Mapping[str, torch.Tensor], folder: Path, save_at: int | None) -> None:
        """Notes the state after a step; keeps its tensors after step `save_at`."""
        self.steps.append({name: hash_of(tensor) for name, tensor in state.items()})
        if len(self.steps) == save_at:
            save_file({name: tensor.cpu().contiguous().clone() for name, tensor in state.items()}, folder / WEIGHTS)

    def write(self, folder: Path, rank: int, part: str = "") -> None:
        """Writes it where `read_traces` finds it.

        Args:
            folder: Where.
            rank: Whose it is.
            part: Of a run that had several; they sort as they followed each other.
        """
        (folder / f"trace-{part}{rank}.json").write_text(json.dumps(asdict(self)))


def read_traces(folder: Path) -> Trace:
    """Returns what all ranks saw together.

    Raises:
        ValueError: two ranks computed the same micro-batch.
    """
    whole: Trace | None = None
    for file in sorted(folder.glob("trace-*.json")):
        part = Trace(**json.loads(file.read_text()))
        part.micros = {key: (batch, loss) for key, (batch, loss) in part.micros.items()}
        if whole is None:
            whole = part
            continue
        if twice := whole.micros.keys() & part.micros.keys():
            raise ValueError(f"micro-batch {min(twice)} was computed by two ranks")
        whole.micros.update(part.micros)
        whole.steps += part.steps
        whole.digest = whole.digest or part.digest
    if whole is None:
        raise ValueError(f"no trace in {folder}")
    return whole


def traced(recipe: Recipe, trace: Trace, position: Callable[[], tuple[int, int] | None]) -> Recipe:
    """Returns the recipe with a loss that notes what it sees.

    Args:
        position: Returns the present step and micro-batch, None for a shadow.
    """

    def loss(model: nn.Module, batch: Any) -> Any:
        where, seen = position(), hash_of(batch)  # before the loss, which might write to the batch
        found = recipe.loss(model, batch)
        if where is not None:
            trace.micro(*where, seen, found)
        return found

    return replace(recipe, loss=loss, sample=None)


def hash_of(value: Any) -> str:
    """Returns a short hash of all tensors, numbers and texts in `value`."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel() and not value.is_sparse:
            digest.update(tensor_bytes(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, str | bytes | int | float | bool):
        digest.update(repr(value).encode())
