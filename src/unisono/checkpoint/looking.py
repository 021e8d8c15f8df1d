"""What people ask of checkpoints that lie on a disk: what is there, is it whole, what changed, and may I have it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.format import MODEL
from unisono.checkpoint.reader import Checkpoint, DamagedError, TensorFile
from unisono.errors import InputError
from unisono.numerics.ulps import max_ulps


@dataclass(frozen=True)
class Change:
    """A tensor that differs between two checkpoints.

    Attributes:
        file: Where it is.
        name: Of the tensor.
        what: "only in the first", "only in the second", "shape", "dtype" or "values".
        elements: How many differ, where shapes agree.
        ulps: The largest distance, in representable numbers between.
    """

    file: str
    name: str
    what: str
    elements: int = 0
    ulps: int = 0


def rows(found: list[Path]) -> list[dict[str, Any]]:
    """Returns a summary of each checkpoint; of a damaged one, why it is."""
    listed: list[dict[str, Any]] = []
    for path in found:
        try:
            one = Checkpoint.open(path)
        except DamagedError as error:
            listed.append({"name": path.name, "error": str(error)})
            continue
        ledger = one.state["ledger"]
        listed.append(
            {
                "name": path.name,
                "step": one.step,
                "epoch": one.state["epoch"],
                "samples": ledger["samples"],
                "bytes": one.num_bytes,
                "loss": ledger["values"].get("loss"),
                "metrics": ledger["metrics"],
                "saved_by": one.state["saved_by"],
            }
        )
    return listed


def tensors(found: Checkpoint) -> list[dict[str, Any]]:
    """Returns what tensors a checkpoint holds."""
    return [
        {
            "file": file,
            "name": entry.name,
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": list(entry.shape),
            "bytes": entry.num_bytes,
        }
        for file in found.state["files"]
        for entry in found.tensors(file).layout.entries
    ]


def differences(one: Checkpoint, other: Checkpoint) -> list[Change]:
    """Compares all tensors of two checkpoints, bit by bit."""
    changes = []
    for file in dict.fromkeys([*one.state["files"], *other.state["files"]]):
        here = one.tensors(file) if file in one.state["files"] else {}
        there = other.tensors(file) if file in other.state["files"] else {}
        for name in sorted({*here, *there}):
            if change := _compare(file, name, here.get(name), there.get(name)):
                changes.append(change)
    return changes


def _compare(file: str, name: str, here: torch.Tensor | None, there: torch.Tensor | None) -> Change | None:
    if here is None or there is None:
        return Change(file, name, "only in the second" if here is None else "only in the first")
    if here.shape != there.shape or here.dtype != there.dtype:
        return Change(file, name, "shape" if here.shape != there.shape else "dtype")
    size = here.dtype.itemsize
    unlike = (here.reshape(-1, 1).view(torch.uint8) != there.reshape(-1, 1).view(torch.uint8)).view(-1, size).any(1)
    count = int(unlike.sum())
    return Change(file, name, "values", count, max_ulps({name: here}, {name: there})) if count else None


def export(found: Checkpoint, target: Path) -> Path:
    """Copies a checkpoint's weights: into a folder as model.safetensors, or into a file that `torch.load` opens.

    Args:
        found: The checkpoint.
        target: A name that ends with .pt, .pth or .bin for `torch.save`; else a folder, new or empty, as
            `from_pretrained` of Hugging Face's libraries takes it (beside a config.json, which is the user's).

    Returns:
        The file.

    Raises:
        InputError: it is there already, or cannot be written.
        DamagedError: the checkpoint is not whole.
    """
    found.check()
    try:
        if target.suffix in (".pt", ".pth", ".bin"):
            if target.exists():
                raise InputError(f"{target} is there already: choose another name")
            weights: TensorFile = found.tensors(MODEL)
            state = {name: tensor.clone() for name, tensor in weights.items()}
            state.update({name: state[first] for name, first in found.state["tied"].items()})
            torch.save(state, target)
            return target
        target.mkdir(parents=True, exist_ok=True)
        if (target / MODEL).exists():
            raise InputError(f"{target / MODEL} is there already: choose another folder")
        return Path(shutil.copyfile(found.folder / MODEL, target / MODEL))
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from None
