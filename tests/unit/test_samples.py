"""Samples with seeds of their own, and errors that name them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from unisono.data.samples import NamedCollate, SeededBatches, SeededSamples, check_dataset, fetching, seeded
from unisono.errors import InputError


class Noise:
    """Samples that are nothing but random numbers."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Batched(Noise):
    """Fetches many at once, as Hugging Face's datasets do."""

    asked: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[tuple[float, ...]]:
        self.asked = [*getattr(self, "asked", []), indices]
        return [self[index] for index in indices]


def test_a_sample_depends_on_its_own_key_alone() -> None:
    samples = SeededSamples(Noise(), seed=3)
    first = samples[2, 7]
    assert first[0] == first[1][0] == 7
    random.random(), torch.rand(5), np.random.rand(2)
    for other in ((2, 6), (1, 7), (3, 7), (7, 2)):
        assert not set(samples[other][1][1:]) & set(first[1][1:])
    assert samples[2, 7] == first
    assert SeededSamples(Noise(), seed=3)[2, 7] == first
    assert not set(SeededSamples(Noise(), seed=4)[2, 7][1][1:]) & set(first[1][1:])


def test_a_sample_that_fails_is_named() -> None:
    class Broken(Noise):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such file") if index == 5 else InputError("bad label")

    samples = SeededSamples(Broken(), 0)
    with pytest.raises(KeyError) as caught:
        samples[2, 5]
    assert "sample 5 of epoch 2" in caught.value.__notes__[0]
    with pytest.raises(InputError, match=r"^bad label$"):
        samples[2, 6]


def test_a_dataset_that_fetches_many_at_once_is_asked_once_a_micro_batch() -> None:
    dataset = Batched()
    samples = seeded(dataset, 0)
    assert type(samples) is SeededBatches
    found = samples.__getitems__([(1, 4), (1, 2), (1, 9)])
    assert dataset.asked == [[4, 2, 9]]
    assert [index for index, _ in found] == [4, 2, 9]
    assert [sample[0] for _, sample in found] == [4, 2, 9]
    torch.rand(3)
    assert samples.__getitems__([(1, 4), (1, 2), (1, 9)]) == found
    assert samples.__getitems__([(2, 4), (2, 2), (2, 9)]) != found


def test_a_dataset_that_gives_too_few_is_refused() -> None:
    class Short(Batched):
        def __getitems__(self, indices: list[int]) -> list[tuple[float, ...]]:
            return super().__getitems__(indices)[:-1]

    with pytest.raises(ValueError, match="shorter"):
        seeded(Short(), 0).__getitems__([(0, 1), (0, 2)])


def test_a_subset_is_fetched_sample_by_sample() -> None:
    subset = Subset(Noise(), [9, 8, 7])
    assert type(seeded(subset, 0)) is SeededSamples
    assert seeded(subset, 0)[0, 1][1][0] == 8


def test_plain_tensors_are_taken_in_one_call_with_the_bits_of_torchs_way() -> None:
    dataset = TensorDataset(torch.randn(9, 3, 2), torch.arange(9), torch.randn(9).bfloat16())
    samples, collate = fetching(dataset, 0, None)
    keys = [(0, 4), (0, 0), (0, 8)]
    found = collate(samples.__getitems__(keys))
    wanted = default_collate([dataset[index] for _, index in keys])
    assert type(found) is type(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    # Only where nothing of the user's could be passed by.
    for data, own in ((dataset, lambda samples: samples), (Subset(dataset, [1]), None)):
        assert type(fetching(data, 0, own)[1]) is NamedCollate


# Collate


def test_collate_gets_the_samples() -> None:
    assert NamedCollate(None)([(4, torch.ones(2)), (2, torch.zeros(2))]).tolist() == [[1, 1], [0, 0]]
    assert NamedCollate(sorted)([(4, "b"), (2, "a")]) == ["a", "b"]


def blamed(samples: dict[int, Any], collate: Any = None) -> str:
    with pytest.raises(InputError) as caught:
        NamedCollate(collate)(list(samples.items()))
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_the_sample_that_is_unlike_the_others_is_named() -> None:
    message = blamed({4: torch.ones(3), 17: torch.ones(3), 8: torch.ones(5), 3: torch.ones(3)})
    assert message.startswith("sample 8 does not collate with sample 4: ")
    assert "stack" in message
    assert "your own collate" in message
    assert "\n" not in message
    message = blamed({1: {"x": 1}, 2: {"y": 1}})
    assert message.startswith("sample 2 does not collate with sample 1: KeyError")


def test_a_sample_that_never_collates_is_named() -> None:
    message = blamed({5: object(), 6: torch.ones(1)})
    assert message.startswith("sample 5 does not collate: TypeError")


def test_where_no_single_sample_is_to_blame_all_are_named() -> None:
    def at_most_two(samples: list[Any]) -> Any:
        if len(samples) > 2:
            raise MemoryError
        return samples

    assert blamed({5: 1, 6: 2, 9: 3}, at_most_two).startswith("samples [5, 6, 9] do not collate")


# What can be trained on


def test_a_dataset_is_counted() -> None:
    for data, size in (([1, 2, 3], 3), (Noise(7), 7), (Subset(Noise(), [1, 2]), 2), (torch.ones(4, 2), 4), ("ab", 2)):
        assert check_dataset(data, "it") == size


def test_what_is_no_map_style_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            yield 1

    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    class Odd(Endless):
        def __len__(self) -> int:
            raise TypeError("unknown")

    for data, message in (
        (Stream(), r"the data is iterable-style \(Stream\)"),
        (iter([1]), "the data is iterable-style"),
        (Endless(), r"the data \(Endless\) has no length"),
        (Odd(), r"the data \(Odd\) has no length"),
        ([], r"the data \(list\) is empty"),
    ):
        with pytest.raises(InputError, match=message):
            check_dataset(data, "the data")
