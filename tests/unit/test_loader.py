"""The loader of micro-batches, with torch's own DataLoader beneath."""

from __future__ import annotations

import multiprocessing
import random
import time
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unisono.data.loader import LoaderOptions, MicroBatchLoader, from_dataloader
from unisono.data.schedule import MicroBatch, Schedule
from unisono.errors import InputError

CPU = torch.device("cpu")


class Noisy:
    """Samples that hold their index and random numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        return {"index": index, "noise": noise, "name": f"n{index}"}


def loader_of(dataset: Any, batch: int = 4, micro: int = 2, **changes: Any) -> MicroBatchLoader:
    schedule = Schedule(num_samples=len(dataset), global_batch=batch, micro_batch=micro)
    fields = {"place": (0, 1), "seed": 5, "device": CPU, "options": LoaderOptions()}
    return MicroBatchLoader(dataset, schedule, **{**fields, **changes})


def indices(loader: MicroBatchLoader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


# One epoch after the other


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    loader = loader_of(Noisy(23))
    epochs = [indices(loader) for _ in range(4)]
    for epoch in epochs:
        assert sorted(chain.from_iterable(epoch)) == list(range(23))
        assert [len(batch) for batch in epoch] == [2] * 11 + [1]
        assert len(loader) == len(epoch)
    assert len({tuple(chain.from_iterable(epoch)) for epoch in epochs}) == 4
    again = loader_of(Noisy(23))
    assert [indices(again) for _ in range(4)] == epochs
    assert indices(loader_of(Noisy(23), seed=6)) != epochs[0]


def test_without_shuffling_the_order_is_the_datasets() -> None:
    loader = loader_of(Noisy(5), options=LoaderOptions(shuffle=False))
    for _ in range(2):
        assert indices(loader) == [[0, 1], [2, 3], [4]]


def test_the_ranks_share_an_epoch() -> None:
    alone = {tuple(batch) for batch in indices(loader_of(Noisy(26), batch=8))}
    for world_size in (2, 3, 4):
        schedule = Schedule(num_samples=26, global_batch=8, micro_batch=2)
        shared: list[tuple[int, ...]] = []
        for rank in range(world_size):
            loader = loader_of(Noisy(26), batch=8, place=(rank, world_size))
            batches = indices(loader)
            assert len(loader) == len(batches)
            micros = list(schedule.rank_micro_batches(rank, world_size))
            shared += [tuple(b) for b, micro in zip(batches, micros, strict=True) if not micro.shadow]
        assert sorted(shared) == sorted(alone)


def test_noise_is_the_samples_own_and_new_in_each_epoch() -> None:
    def noise(loader: MicroBatchLoader) -> dict[int, list[float]]:
        pairs = [(batch["index"], batch["noise"]) for batch in loader]
        return {i: row for rows, values in pairs for i, row in zip(rows.tolist(), values.tolist(), strict=True)}

    loader = loader_of(Noisy(12))
    first, second = noise(loader), noise(loader)
    assert not {value for row in first.values() for value in row} & {value for row in second.values() for value in row}
    assert noise(loader_of(Noisy(12), batch=6, micro=3)) == first


def test_two_iterations_at_once_are_two_epochs() -> None:
    loader = loader_of(Noisy(9))
    wanted = list(loader), list(loader)
    loader = loader_of(Noisy(9))
    first, second = iter(loader), iter(loader)
    found: tuple[list[Any], list[Any]] = ([], [])
    for one, other in zip(first, second, strict=True):
        found[0].append(one)
        found[1].append(other)
    for number in range(2):
        assert all(same(a, b) for a, b in zip(found[number], wanted[number], strict=True))


def test_an_iteration_that_was_left_is_an_epoch() -> None:
    loader = loader_of(Noisy(9))
    next(iter(loader))
    second = indices(loader)
    loader = loader_of(Noisy(9))
    indices(loader)
    assert indices(loader) == second


def test_the_owner_is_told_of_each_micro_batch_before_it_is_handed_over() -> None:
    told: list[Any] = []
    loader = loader_of(
        Noisy(5),
        on_fetch=lambda: told.append("fetch"),
        on_micro=lambda epoch, micro: told.append((epoch, micro.step, micro.index, micro.is_last)),
        on_end=lambda: told.append("end"),
    )
    for epoch in range(2):
        for _ in loader:
            told.append("batch")
        one, two, three = (epoch, 0, 0, False), (epoch, 0, 1, True), (epoch, 1, 0, True)
        assert told == ["fetch", one, "batch", "fetch", two, "batch", "fetch", three, "batch", "end"]
        told.clear()


# Workers


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_cannot_show(persistent: bool) -> None:
    alone = loader_of(Noisy(11))
    extra = {"persistent_workers": persistent, "prefetch_factor": 3}
    helped = loader_of(Noisy(11), options=LoaderOptions(num_workers=2, extra=extra))
    for _ in range(2):
        pairs = list(zip(alone, helped, strict=True))
        assert len(pairs) == 6
        for one, other in pairs:
            assert same(one, other)
            assert one["name"] == [f"n{index}" for index in one["index"].tolist()]
    started = time.monotonic()
    del helped  # its workers end here, and not when a garbage collector comes by
    assert not multiprocessing.active_children()
    assert time.monotonic() - started < 4  # torch waits five seconds for a worker that is not told to end


class Ragged:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("gone")
        return torch.ones(2 if index == 3 else 1)


def failure(loader: MicroBatchLoader) -> tuple[type[Exception], str, int]:
    """The kind of error that ends an epoch, what it says, and after how many batches."""
    batches = 0
    try:
        for _ in loader:
            batches += 1
    except Exception as error:
        error.__traceback__ = None  # torch's frames hold the error and its workers in one cycle
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])]), batches
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_says_the_same_wherever_it_was_raised(num_workers: int) -> None:
    options = LoaderOptions(shuffle=False, num_workers=num_workers)
    kind, message, batches = failure(loader_of(Ragged(), options=options))
    assert (kind, batches) == (InputError, 1)
    assert message.startswith("sample 3 does not collate with sample 2: RuntimeError: stack expects")
    assert message.endswith("make all samples alike, or give your own collate")
    assert "\n" not in message
    assert "Traceback" not in message
    kind, message, batches = failure(loader_of(Subset(Ragged(), [0, 1, 5]), options=options))
    assert (kind, batches) == (KeyError, 1)
    assert "gone" in message
    assert "sample 2 of epoch 0" in message  # of the dataset that was given, here a Subset


# Datasets of all kinds


def test_a_list_is_a_dataset() -> None:
    loader = loader_of([(torch.full((2,), float(n)), n) for n in range(5)], options=LoaderOptions(shuffle=False))
    found = list(loader)
    assert [labels.tolist() for _, labels in found] == [[0, 1], [2, 3], [4]]
    assert found[1][0].tolist() == [[2, 2], [3, 3]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_hugging_face_datasets(num_workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[float(n), 2.0 * n] for n in range(7)], "y": list(range(7))})
    loader = loader_of(data.with_format("torch"), options=LoaderOptions(num_workers=num_workers))
    found = list(loader)
    assert sorted(chain.from_iterable(batch["y"].tolist() for batch in found)) == list(range(7))
    for batch in found:
        assert batch["x"].tolist() == [[float(y), 2.0 * y] for y in batch["y"].tolist()]
    plain = loader_of([{"y": n} for n in range(7)])
    assert [batch["y"].tolist() for batch in plain] == [batch["y"].tolist() for batch in found]


def test_a_tensor_dataset_gives_the_same_as_any_other_of_its_samples() -> None:
    data = TensorDataset(torch.randn(9, 3), torch.arange(9))
    quick, slow = loader_of(data), loader_of([data[n] for n in range(9)])
    for one, other in zip(quick, slow, strict=True):
        assert type(one) is type(other)
        assert all(same(a, b) for a, b in zip(one, other, strict=True))


def test_a_dataset_without_samples_is_refused() -> None:
    schedule = Schedule(num_samples=0, global_batch=4, micro_batch=2)
    with pytest.raises(InputError, match="is empty"):
        MicroBatchLoader([], schedule, place=(0, 1), seed=0, device=CPU, options=LoaderOptions())


def test_steps_per_epoch_is_the_same_for_every_rank() -> None:
    for place in ((0, 1), (0, 2), (1, 2)):
        assert loader_of(Noisy(9), place=place).steps_per_epoch == 3


# A DataLoader as people have it


def collate(samples: list[Any]) -> Any:
    return samples


def initialise(worker: int) -> None:
    return None


def test_a_dataloader_is_taken_apart() -> None:
    data = Noisy(10)
    options = {"collate_fn": collate, "num_workers": 2, "worker_init_fn": initialise, "prefetch_factor": 5}
    dataset, micro, drop, found = from_dataloader(
        DataLoader(data, batch_size=3, shuffle=True, drop_last=True, timeout=7, persistent_workers=True, **options)
    )
    assert dataset is data
    assert (micro, drop) == (3, True)
    assert (found.collate, found.shuffle, found.num_workers) == (collate, True, 2)
    assert found.extra is not None
    kept = {name: found.extra[name] for name in ("timeout", "worker_init_fn", "persistent_workers", "prefetch_factor")}
    assert kept == {
        "timeout": 7,
        "worker_init_fn": initialise,
        "persistent_workers": True,
        "prefetch_factor": 5,
    }


def test_an_unshuffled_dataloader_stays_one() -> None:
    data = Noisy(10)
    for loader in (DataLoader(data), DataLoader(data, batch_size=1, sampler=SequentialSampler(data))):
        _, micro, drop, found = from_dataloader(loader)
        assert (micro, drop, found.shuffle, found.num_workers) == (1, False, False, 0)
    assert from_dataloader(DataLoader(data, sampler=RandomSampler(data)))[3].shuffle
    generator = torch.Generator()
    assert from_dataloader(DataLoader(data, shuffle=True, generator=generator))[3].shuffle


class EveryOther(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(range(0, len(self.data_source), 2))


def test_a_sampler_of_ones_own_is_refused_with_the_way_out() -> None:
    data = Noisy(10)
    for sampler in (
        SubsetRandomSampler([1, 2]),
        WeightedRandomSampler([1.0] * 10, 10),
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=4),
        EveryOther(data),
        [3, 1, 2],
    ):
        with pytest.raises(InputError, match=rf"custom sampler \({type(sampler).__name__}\).*Subset"):
            from_dataloader(DataLoader(data, batch_size=2, sampler=sampler))


def test_a_dataloader_without_a_batch_size_is_refused() -> None:
    data = Noisy(10)
    for loader in (
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False)),
        DataLoader(data, batch_size=None),
    ):
        with pytest.raises(InputError, match="no batch_size"):
            from_dataloader(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataloaders_workers_may_be_set_anew(num_workers: int) -> None:
    given = DataLoader(Noisy(6), batch_size=2, num_workers=2, timeout=9, persistent_workers=True, prefetch_factor=3)
    dataset, micro, _, options = from_dataloader(given)
    changed = LoaderOptions(collate=options.collate, num_workers=num_workers, extra=options.extra)
    found = list(loader_of(dataset, micro=micro, options=changed))
    assert all(same(a, b) for a, b in zip(found, loader_of(Noisy(6)), strict=True))
    given = DataLoader(Noisy(6), batch_size=2)
    dataset, micro, _, options = from_dataloader(given)
    changed = LoaderOptions(collate=options.collate, num_workers=num_workers, extra=options.extra)
    assert len(list(loader_of(dataset, micro=micro, options=changed))) == 3


def test_a_users_worker_init_is_called_in_each_worker() -> None:
    options = LoaderOptions(num_workers=2, extra={"worker_init_fn": mark_worker})
    found = {value for batch in loader_of(Marked(), options=options) for value in batch.tolist()}
    assert found == {100, 101}


MARK = -1


def mark_worker(worker: int) -> None:
    global MARK
    MARK = 100 + worker


class Marked(Noisy):
    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return MARK


def test_micro_batches_are_plain_values() -> None:
    told: list[MicroBatch] = []
    for _ in loader_of(Noisy(4), on_micro=lambda epoch, micro: told.append(micro)):
        pass
    assert [(micro.start, micro.stop, micro.num_samples) for micro in told] == [(0, 2, 2), (2, 4, 2)]
