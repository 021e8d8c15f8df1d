"""Evaluation and prediction: each sample once, in dataset order, the same numbers on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from unisono.data.loader import LoaderOptions, MicroBatchLoader, from_dataloader
from unisono.data.samples import check_dataset
from unisono.data.schedule import MicroBatch, Schedule
from unisono.data.tensors import map_tensors
from unisono.errors import InputError, require_positive_int
from unisono.launch.session import Session
from unisono.numerics.seeds import derive_seed, preserved, seed_all
from unisono.numerics.sums import exact_sum

Metric = Callable[[nn.Module, Any], Any]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Eval mode without gradients; every module's own mode, and all buffers, are restored.

    Yields:
        What puts the buffers back at once: called before each micro-batch, it hides who computed the one before.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = _KeptBuffers(model)
    model.eval()
    try:
        with torch.no_grad():
            yield buffers.restore
    finally:
        for module, mode in modes:
            module.training = mode
        buffers.restore()


class _KeptBuffers:
    """The buffers of a model as they were, to be put back as often as needed.

    All are compared by value, since kernels and `.data` write without raising torch's version counter. That reads
    each buffer once, as a forward does, and nothing is written unless something has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, key, value)
            for module in model.modules()
            for key, value in module._buffers.items()
            if value is None or not is_lazy(value)  # a lazy one gets its memory in the first forward
        ]
        tensors = {id(value): value for _, _, value in self._places if value is not None}
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    def restore(self) -> None:
        """Puts the same tensors back into their modules, and their values into them."""
        for module, key, value in self._places:
            now = getattr(module, key, None)
            if now is not value and not _is_cache(module, key, now, value):
                module._buffers[key] = value
        with torch.no_grad():
            for tensor, value in self._values:
                if tensor.shape != value.shape:  # `.data` was assigned to, or it was resized
                    tensor.data = value.clone()
                elif not _equal(tensor, value):
                    tensor.copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except RuntimeError:  # not for sparse tensors and small floats: those are copied unseen
        return False


def _is_cache(module: nn.Module, key: str, now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    """Says whether a buffer was made or grown in a forward and is no state: a table of positions, say."""
    made = now is not None and (before is None or now.shape != before.shape)
    return made and key in module._non_persistent_buffers_set


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated, and in which fixed units.

    Attributes:
        dataset: Map-style.
        micro_batch: Samples of one forward; never a function of the world size.
        seed: Of the generators before each micro-batch and sample.
        options: How samples become batches.
        lockstep: Whether a forward is collective, so that every rank makes as many.
    """

    dataset: Any
    micro_batch: int
    seed: int
    options: LoaderOptions
    lockstep: bool = False

    @classmethod
    def of(
        cls, data: Any, default_micro_batch: int | None, seed: int, given: Mapping[str, Any], lockstep: bool = False
    ) -> EvalPlan:
        """Reads a dataset or a `DataLoader`, and `micro_batch`, `collate` and `num_workers` where they are given.

        Raises:
            InputError: an argument is unknown or cannot work.
        """
        if unknown := sorted(set(given) - {"micro_batch", "collate", "num_workers"}):
            raise InputError(f"an evaluation has no argument '{unknown[0]}'")
        micro_batch = default_micro_batch or 64
        options = LoaderOptions(shuffle=False)
        if isinstance(data, DataLoader):
            check_dataset(data.dataset, "the evaluation dataset")
            data, micro_batch, _, options = from_dataloader(data)
        options = replace(
            options,
            shuffle=False,
            collate=given.get("collate") or options.collate,
            num_workers=options.num_workers if (workers := given.get("num_workers")) is None else workers,
        )
        size = check_dataset(data, "the evaluation dataset")
        micro_batch = require_positive_int(given.get("micro_batch") or micro_batch, "micro_batch", "evaluation")
        return cls(data, min(micro_batch, size), seed, options, lockstep)

    def own_micro_batches(self, session: Session) -> Iterator[tuple[MicroBatch, Any]]:
        """Yields (micro-batch, batch) of this rank's part of the dataset; shadows too if in lockstep."""
        size, place = len(self.dataset), (session.place.rank, session.place.world_size)
        loader = MicroBatchLoader(
            self.dataset,
            Schedule(num_samples=size, global_batch=size, micro_batch=self.micro_batch, strided=self.lockstep),
            place=place,
            seed=derive_seed(self.seed, "eval"),
            device=session.device,
            options=self.options,
        )
        for micro, batch in zip(loader.micro_batches(), loader, strict=True):
            seed_all(derive_seed(self.seed, "eval", micro.index), session.device)
            if self.lockstep or not micro.shadow:
                yield micro, batch


def evaluate(session: Session, model: nn.Module, metric: Metric, plan: EvalPlan) -> dict[str, float]:
    """Returns {name: sum / count} over the dataset, each sample counted once.

    Args:
        session: The ranks and their device.
        model: Evaluated in eval mode, without gradients.
        metric: `metric(model, batch)` returns {name: (sum, count)}, one (sum, count), or one number, which is
            then a mean over the batch's samples.
        plan: On what.

    Collective: every rank calls it.

    Determinism: totals are added exactly (`math.fsum`), so neither order nor world size matters.
    """
    own: list[tuple[int, dict[str, tuple[float, float]]]] = []
    with preserved(session.device), evaluating(model) as restore:
        for micro, batch in plan.own_micro_batches(session):
            restore()
            found = _pairs(metric(model, batch), micro.num_samples)
            own += [] if micro.shadow else [(micro.index, found)]
    everyone = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    names = dict.fromkeys(name for _, pairs in everyone for name in pairs)
    totals = {}
    for name in names:
        there = [pairs[name] for _, pairs in everyone if name in pairs]
        count = exact_sum(count for _, count in there)
        totals[name] = exact_sum(total for total, _ in there) / count if count else math.nan
    return totals


def _pairs(value: Any, num_samples: int) -> dict[str, tuple[float, float]]:
    if isinstance(value, Mapping):
        return {name: _pair(pair, num_samples) for name, pair in value.items()}
    return {"value": _pair(value, num_samples)}


def _pair(value: Any, num_samples: int) -> tuple[float, float]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]), float(value[1])
    try:
        mean = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"a metric returned {type(value).__name__}: return (sum, count), {{name: (sum, count)}}, or one number "
            "that is the batch's mean"
        ) from None
    return mean * num_samples, float(num_samples)


def predict(session: Session, model: nn.Module, function: Callable[[nn.Module, Any], Any], plan: EvalPlan) -> Any:
    """Returns `function(model, batch)` for the whole dataset, one result a sample, in dataset order, on every rank.

    Each call returns a tensor, whose first dimension is the samples, or a list; they are joined in order.

    Collective: every rank calls it.

    Raises:
        InputError: the function returned something else, or another number of results than the batch has samples.
    """
    own: list[tuple[int, Any]] = []
    with preserved(session.device), evaluating(model) as restore:
        for micro, batch in plan.own_micro_batches(session):
            restore()
            found = _results(function(model, batch), micro.num_samples)
            if not micro.shadow:
                own.append((micro.index, map_tensors(lambda tensor: tensor.detach().cpu(), found)))
    parts = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    results = [result for _, result in parts]
    if all(isinstance(result, torch.Tensor) for result in results):
        return torch.cat(results)
    return [x for result in results for x in result]


def _results(value: Any, num_samples: int) -> Any:
    if not isinstance(value, torch.Tensor | list):
        raise InputError(
            f"predict's function returned {type(value).__name__}: return a tensor or a list, with one result for each "
            "sample of the batch (which may be a tuple or a dict)"
        )
    count = len(value) if isinstance(value, list) or value.dim() else None
    if count != num_samples:
        given = "a tensor without dimensions" if count is None else f"{count} result{'s' * (count != 1)}"
        raise InputError(
            f"predict's function returned {given} for a batch of {num_samples} sample{'s' * (num_samples > 1)}: return "
            "one result for each sample"
        )
    return value
