"""MicroBatchLoader: this rank's micro-batches, each sample exactly once an epoch over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from unisono.data.order import permutation
from unisono.data.samples import Key, check_dataset, fetching
from unisono.data.schedule import MicroBatch, Schedule
from unisono.data.tensors import to_device
from unisono.errors import InputError
from unisono.launch.guard import die_with_parent, leave_process_group

# Micro-batches whose order is computed in one vectorised call: it costs about as much as for a single one.
_ORDER_CHUNK = 32
# Arguments of a DataLoader that it takes only with workers.
_OF_WORKERS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout", "worker_init_fn")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples become batches. None of it can show in the weights, but for `collate` and `shuffle`.

    Attributes:
        collate: Makes a micro-batch of a list of samples; None is torch's default.
        shuffle: Each epoch in an order of its own, else in the dataset's order.
        num_workers: Loader processes of each rank; 0 fetches in the training process.
        extra: Further arguments of `torch.utils.data.DataLoader`.
    """

    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    num_workers: int = 0
    extra: dict[str, Any] | None = None


def from_dataloader(loader: DataLoader[Any]) -> tuple[Any, int, bool, LoaderOptions]:
    """Takes a `DataLoader` as people have it apart.

    Returns:
        Its dataset, its batch size (the micro-batch), its drop_last, and the rest.

    Raises:
        InputError: it has a sampler of its own, or no batch size.
    """
    if loader.batch_size is None:
        raise InputError(
            "the DataLoader has no batch_size (a batch_sampler, or batch_size=None): which samples form a "
            "micro-batch is unisono's to say; give a batch_size, or the dataset itself"
        )
    sampler = loader.sampler
    plain_random = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    if not plain_random and type(sampler) is not SequentialSampler:
        raise InputError(
            f"the DataLoader has a custom sampler ({type(sampler).__name__}): unisono gives each sample exactly once "
            "an epoch, in an order that no number of processes can change; drop it and use shuffle=True, and put a "
            "selection or a weighting into the dataset (torch.utils.data.Subset, or an index list)"
        )
    extra = {
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers and loader.prefetch_factor is not None:
        extra["prefetch_factor"] = loader.prefetch_factor
    options = LoaderOptions(
        collate=loader.collate_fn, shuffle=bool(plain_random), num_workers=loader.num_workers, extra=extra
    )
    return loader.dataset, loader.batch_size, loader.drop_last, options


@dataclass(frozen=True)
class _WorkerStart:
    """What a loader worker does first: only its rank may end it, and it ends when its rank does.

    Attributes:
        own: The user's `worker_init_fn`.
    """

    own: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        leave_process_group()
        die_with_parent()
        if self.own is not None:
            self.own(worker)


@dataclass
class _Keys:
    """The batch sampler: lists of (epoch, index), one a micro-batch, computed as they are asked for.

    It knows its loader's values, not the loader: a cycle of references would leave the workers to the garbage
    collector, where torch waits five seconds for each (persistent ones, torch 2.13).

    Attributes:
        schedule: Which positions form which micro-batch.
        place: (rank, world size).
        seed: Of the order.
        shuffle: Whether there is an order but the dataset's.
        epoch: The one that the next iteration is.
        first_step: Where it begins; of an epoch that another run began.
    """

    schedule: Schedule
    place: tuple[int, int]
    seed: int
    shuffle: bool
    epoch: int = -1
    first_step: int = 0

    def __iter__(self) -> Iterator[list[Key]]:
        return self._keys(self.epoch, self.first_step)  # two iterations may go on at once

    def _keys(self, epoch: int, first_step: int) -> Iterator[list[Key]]:
        order = permutation(self.seed, epoch, self.schedule.num_samples)
        micros = self.schedule.rank_micro_batches(*self.place, first_step)
        while chunk := list(islice(micros, _ORDER_CHUNK)):
            positions = np.concatenate([np.arange(micro.start, micro.stop) for micro in chunk])
            indices = (order(positions) if self.shuffle else positions).tolist()
            for micro in chunk:
                yield [(epoch, index) for index in indices[: micro.num_samples]]
                del indices[: micro.num_samples]

    def __len__(self) -> int:
        return self.schedule.num_rank_micro_batches(*self.place)


class MicroBatchLoader:
    """Iterates over this rank's micro-batches of one epoch; every new iteration is the next epoch.

    A real `torch.utils.data.DataLoader` works beneath: loader workers, pinned memory and prefetching are its own.
    Nobody calls `set_epoch`: epochs count themselves.

    Args:
        dataset: Map-style.
        schedule: Which positions form which micro-batch.
        place: (rank, world size).
        seed: Of the order and of each sample's generators.
        device: Where batches go.
        options: How samples become batches.
        on_fetch: Called before a batch is waited for.
        on_micro: Called with (epoch, micro-batch) before its batch is handed over.
        on_end: Called when the epoch is over.

    Determinism: batches depend on (dataset, schedule, seed, epoch) alone.
    """

    def __init__(
        self,
        dataset: Any,
        schedule: Schedule,
        *,
        place: tuple[int, int],
        seed: int,
        device: torch.device,
        options: LoaderOptions,
        on_fetch: Callable[[], None] = lambda: None,
        on_micro: Callable[[int, MicroBatch], None] = lambda epoch, micro: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        check_dataset(dataset, "the dataset")
        self.dataset, self.schedule, self.seed, self.device, self.options = dataset, schedule, seed, device, options
        self._keys = _Keys(schedule, place, seed, options.shuffle)
        self._next = (0, 0)
        self._on_fetch, self._on_micro, self._on_end = on_fetch, on_micro, on_end
        extra = dict(options.extra or {})
        if device.type != "cpu":
            extra.setdefault("pin_memory", True)
        if options.num_workers:
            extra["worker_init_fn"] = _WorkerStart(extra.get("worker_init_fn"))
        else:
            extra = {k: v for k, v in extra.items() if k not in _OF_WORKERS}
        samples, collate = fetching(dataset, seed, options.collate)
        self._loader: DataLoader[Any] = DataLoader(
            samples,
            batch_sampler=self._keys,
            collate_fn=collate,
            num_workers=options.num_workers,
            **extra,
        )

    def __len__(self) -> int:
        """Micro-batches that this rank will see in an epoch."""
        return len(self._keys)

    @property
    def epoch(self) -> int:
        """The epoch of the last iteration that was begun, from 0."""
        return self._keys.epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, whatever the number of processes: what an LR schedule needs."""
        return self.schedule.num_steps

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and step in it where another run would go on; between two steps."""
        return self._next

    @position.setter
    def position(self, place: tuple[int, int]) -> None:
        self._next = place
        self._keys.epoch, self._keys.first_step = place[0] - 1, place[1]

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an epoch, in order."""
        return self.schedule.rank_micro_batches(*self._keys.place, self._keys.first_step)

    def __iter__(self) -> Iterator[Any]:
        self._keys.epoch += 1
        epoch = self._keys.epoch
        batches, micros = iter(self._loader), self.micro_batches()
        self._keys.first_step = 0
        try:
            for micro in micros:
                self._on_fetch()
                batch = to_device(_next(batches), self.device)
                self._on_micro(epoch, micro)
                if micro.is_last:
                    step = micro.step + 1
                    self._next = (epoch, step) if step < self.schedule.num_steps else (epoch + 1, 0)
                yield batch
        except GeneratorExit:  # `break`: the loop's next pass is the next epoch
            self._next = (epoch + 1, 0)
            raise
        self._on_end()


def _next(batches: Iterator[Any]) -> Any:
    try:
        return next(batches)
    except InputError as error:
        # A loader worker's error arrives as its whole traceback in one string: keep its last sentence.
        text = str(error)
        if "Original Traceback" not in text:
            raise
        error.__traceback__ = None  # torch's frames hold the error and the workers in one cycle
    mark = f"{InputError.__module__}.{InputError.__qualname__}: "
    raise InputError(text.rsplit(mark, 1)[-1].strip())
