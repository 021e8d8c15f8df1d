"""`weights_digest`: one hash of a model's weights that anyone can recompute from `model.safetensors`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from unisono.errors import InputError

# The names that the safetensors format gives to torch's dtypes.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers by name; tied weights once, by the name registered first."""
    return {name: value.detach() for name, value in live_state(model).items()}


def live_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same as the model has them, not detached."""
    seen: set[int] = set()
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            state[name] = value
    return state


def tied_names(model: nn.Module) -> dict[str, str]:
    """Returns further names of tied weights, with the name that `full_state` has them under."""
    first: dict[int, str] = {}
    tied = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
    return tied


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the raw bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def weights_digest(weights: Mapping[str, torch.Tensor] | nn.Module) -> str:
    """Returns "sha256:" + hex over name, NUL, safetensors dtype, NUL, raw little-endian bytes, in name order.

    Args:
        weights: Tensors by name, or a model, whose `full_state` is then taken.

    Determinism: depends on nothing but the weights, so it is the same for every world size and strategy.

    Raises:
        InputError: a tensor has a dtype that safetensors cannot hold.
    """
    return digest_of(full_state(weights) if isinstance(weights, nn.Module) else weights)


def digest_of(
    state: Mapping[str, torch.Tensor], fetch: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> str:
    """The same; `fetch` returns what is to be read."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise InputError(
                f"{name} has dtype {tensor.dtype}, which safetensors cannot hold, so the weights have no digest: keep "
                "it in another dtype (complex numbers as torch.view_as_real), or make it a buffer with persistent=False"
            )
        digest.update(name.encode() + b"\0" + SAFETENSORS_DTYPES[tensor.dtype].encode() + b"\0")
        if tensor.numel():
            digest.update(tensor_bytes(fetch(tensor)))
    return "sha256:" + digest.hexdigest()
