"""Python state as strict JSON and tensors: nothing in a checkpoint is a pickle, so reading one runs no code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from unisono.errors import InputError

# Objects with one key of these stand for what JSON lacks.
_TENSOR, _TUPLE, _SET, _PAIRS, _COUNTER, _FLOAT, _NUMPY = (
    "$tensor",
    "$tuple",
    "$set",
    "$pairs",
    "$counter",
    "$float",
    "$numpy",
)
_MARKS = (_TENSOR, _TUPLE, _SET, _PAIRS, _COUNTER, _FLOAT, _NUMPY)


def to_plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as JSON can hold it.

    Args:
        value: Numbers, texts, None, lists, tuples, sets, dicts and tensors, one inside the other.
        name: Of the value, for tensors' names and for messages.
        tensors: Gets the tensors that were found, under names that begin with `name`.

    Raises:
        InputError: there is something else in it.
    """
    if isinstance(value, np.generic | np.ndarray):
        return {_NUMPY: to_plain(torch.from_numpy(np.array(value)), name, tensors)}
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, list):
        return [to_plain(item, f"{name}.{k}", tensors) for k, item in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        return {_TUPLE if isinstance(value, tuple) else _SET: to_plain(items, name, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value) and not isinstance(value, Counter):
            return {key: to_plain(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = [[to_plain(k, name, tensors), to_plain(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
    raise InputError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: let its state_dict() give numbers, "
        "texts, lists, dicts and tensors"
    )


def from_plain(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """Returns what `to_plain` was given; `fetch` returns a tensor by name."""
    if isinstance(value, list):
        return [from_plain(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or next(iter(value)) not in _MARKS:
        return {key: from_plain(item, fetch) for key, item in value.items()}
    ((mark, inner),) = value.items()
    if mark == _TENSOR:
        return fetch(inner)
    if mark == _FLOAT:
        return float(inner)
    found = from_plain(inner, fetch)
    if mark == _NUMPY:
        array = found.numpy()
        return array[()] if array.ndim == 0 else array
    kinds: dict[str, Callable[[Any], Any]] = {_TUPLE: tuple, _SET: set, _PAIRS: dict, _COUNTER: _counter}
    return kinds[mark](found)


def _counter(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter(dict(map(tuple, pairs)))
