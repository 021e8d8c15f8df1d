"""Walking over the tensors of a batch."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from unisono.data.tensors import aligned, map_tensors, to_device

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    y: Any


class Encoding(UserDict):
    """Made like a Hugging Face BatchEncoding: a mapping that is no dict, with attributes of its own."""


def test_containers_keep_their_type_and_order() -> None:
    one = torch.ones(2)
    batch = {
        "z": [one, (one, "text")],
        "a": Pair(one, {"deep": Pair(one, None)}),
        "m": OrderedDict(k=one, j=3),
        "e": Encoding(input_ids=one, labels=[one]),
        "n": np.ones(2),
        "t": (),
    }
    found = map_tensors(lambda tensor: tensor + 1, batch)
    assert list(found) == list(batch)
    assert type(found["z"]) is list
    assert type(found["z"][1]) is tuple
    assert found["z"][1][1] == "text"
    assert type(found["a"]) is Pair
    assert type(found["a"].y["deep"]) is Pair
    assert found["a"].y["deep"].y is None
    assert type(found["m"]) is OrderedDict
    assert list(found["m"]) == ["k", "j"]
    assert type(found["e"]) is Encoding
    assert found["n"] is batch["n"]
    assert found["t"] == ()
    tensors: list[torch.Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, found)
    assert len(tensors) == 7
    assert all(torch.equal(tensor, torch.full((2,), 2.0)) for tensor in tensors)
    assert torch.equal(one, torch.ones(2))  # what came in is as it was


def test_a_mapping_with_another_constructor_becomes_a_dict() -> None:
    found = map_tensors(lambda tensor: tensor * 2, defaultdict(list, x=torch.ones(1)))
    assert found["x"].item() == 2


def test_a_tensor_alone() -> None:
    assert map_tensors(lambda tensor: tensor * 2, torch.ones(1)).item() == 2
    assert map_tensors(lambda tensor: tensor * 2, "text") == "text"


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    found = to_device(packed, CPU)
    assert type(found) is type(packed)
    assert torch.equal(found.data, packed.data)


class Graph:
    """A batch with a `to` of its own, as torch_geometric and others have them."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


def test_a_batch_that_moves_itself_is_asked_to() -> None:
    graph = Graph(torch.ones(1))
    assert to_device([graph, "text"], torch.device("meta"))[0].x.device.type == "meta"
    assert to_device(graph, CPU) is graph


@dataclass(frozen=True, slots=True)
class Sample:
    image: torch.Tensor
    label: Any
    name: str = "cat"


def test_a_dataclass_stays_one() -> None:
    batch = Sample(torch.ones(2), [torch.ones(1)])
    found = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(found) is Sample
    assert found.name == "cat"
    assert found.image.tolist() == [2, 2]
    assert found.label[0].item() == 2
    assert batch.image.tolist() == [1, 1]
    assert map_tensors(lambda tensor: tensor, Sample) is Sample
    moved = to_device(batch, torch.device("meta"))
    assert moved.image.device.type == moved.label[0].device.type == "meta"


def shifted(shape: tuple[int, ...], by: int) -> torch.Tensor:
    """A tensor whose *storage* starts `by` floats behind a multiple of 64 bytes, as numpy's memory may."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, dtype=np.float32)
    first = (-memory.ctypes.data // 4) % 16
    part = memory[first + by : first + by + size]
    part[:] = np.arange(size)
    return torch.from_numpy(part.reshape(shape))


@pytest.mark.parametrize("by", [0, 1, 4, 15])
def test_aligned(by: int) -> None:
    tensor = shifted((8, 6), by)
    assert (tensor.data_ptr() % 64 == 0) == (by == 0)
    found = aligned(tensor)
    assert torch.equal(found, tensor)
    assert found.data_ptr() % 64 == 0
    assert (found is tensor) == (by == 0)  # copied only if it must be


VIEWS = {
    "a column less": lambda tensor: tensor[:, :-1],
    "a column later": lambda tensor: tensor[:, 1:],
    "a row later": lambda tensor: tensor[1:],
    "transposed": lambda tensor: tensor.t(),
    "every second": lambda tensor: tensor[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_where_a_batch_came_from_cannot_show(view: Any) -> None:
    """A worker's memory is page-aligned, the training process's own is not: kernels must see the same tensor."""
    found = [aligned(view(shifted((65, 65), by))) for by in (0, 1, 4)]
    assert {tensor.stride() for tensor in found} == {found[0].stride()}
    assert {tensor.data_ptr() % 64 for tensor in found} == {0}
    assert all(torch.equal(tensor, found[0]) for tensor in found)
    weight = torch.randn(5, found[0].shape[1], generator=torch.Generator().manual_seed(0))
    results = [torch.nn.functional.linear(tensor, weight) for tensor in found]
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_aligned_leaves_alone() -> None:
    for tensor in (torch.empty(0), torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        assert aligned(tensor) is tensor
    assert aligned(shifted((1,), 3)[0]).item() == shifted((1,), 3)[0].item()
