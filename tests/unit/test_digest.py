"""The weights digest, against one computed from the bytes of a safetensors file."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unisono
from unisono.errors import InputError
from unisono.numerics.digest import SAFETENSORS_DTYPES, full_state


def digest_of_file(path: Path) -> str:
    """As anyone can compute it who knows the file format and nothing of unisono."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    digest = hashlib.sha256()
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        digest.update(name.encode("utf-8") + b"\x00" + header[name]["dtype"].encode() + b"\x00" + body[begin:end])
    return f"sha256:{digest.hexdigest()}"


def saved(state: dict[str, torch.Tensor], folder: Path) -> str:
    path = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return digest_of_file(path)


def filled(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    return torch.arange(120, dtype=torch.float32).sub(60 if dtype.is_signed else 0).view(2, 3, 4, 5).to(dtype)


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"weight": filled(dtype)}
    assert unisono.weights_digest(state) == saved(state, tmp_path)
    assert unisono.weights_digest({"weight": filled(dtype)[..., :1]}) != unisono.weights_digest(state)


def test_a_dtype_that_safetensors_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^phases has dtype torch\.complex128, .*persistent=False$"):
        unisono.weights_digest({"a": torch.ones(1), "phases": torch.ones(2, dtype=torch.complex128)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_parameter("größe", nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False))


def test_a_whole_model_with_tied_weights(tmp_path: Path) -> None:
    model = Net()
    state = full_state(model)
    names = set(model.state_dict()) - {"head.weight"}
    assert set(state) == names
    assert "scratch" not in state
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    assert unisono.weights_digest(state) == saved(state, tmp_path)
    # Anyone can write the file in other ways: torch's own state dict, tied weights left out, in another order.
    other = {name: value.clone() for name, value in reversed(model.state_dict().items()) if name in names}
    assert unisono.weights_digest(state) == saved(other, tmp_path)


def test_the_memory_format_cannot_show(tmp_path: Path) -> None:
    model = Net()
    before = unisono.weights_digest(full_state(model))
    model.to(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    assert unisono.weights_digest(full_state(model)) == before == saved(full_state(model), tmp_path)
    matrix = torch.randn(3, 5)
    assert unisono.weights_digest({"w": matrix.t()}) == unisono.weights_digest({"w": matrix.t().contiguous()})


def test_every_change_shows() -> None:
    state = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
    tiny = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    changed = [
        state,
        {"a": torch.tensor([-0.0, 1.0]), "b": state["b"]},
        {"a": torch.stack([torch.tensor(0.0), tiny]), "b": state["b"]},
        {"b": state["a"], "a": state["b"]},
        {"a": state["a"]},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"a": state["a"], "c": state["b"]},
        {"a": state["a"].double(), "b": state["b"]},
        {},
    ]
    assert len({unisono.weights_digest(each) for each in changed}) == len(changed)
    assert unisono.weights_digest(dict(reversed(state.items()))) == unisono.weights_digest(state)
