"""Evaluation and prediction: each sample once, in dataset order, the same numbers on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unisono.data.loader import LoaderOptions, MicroBatchLoader, from_dataloader
from unisono.data.samples import check_dataset
from unisono.data.schedule import Schedule
from unisono.data.tensors import map_tensors, num_samples
from unisono.errors import InputError, require_positive_int
from unisono.launch.session import Session
from unisono.numerics.seeds import derive_seed, preserved, seed_all

Metric = Callable[[nn.Module, Any], Any]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated, and in which fixed units.

    Attributes:
        dataset: Map-style.
        micro_batch: Samples of one forward; never a function of the world size.
        seed: Of the generators before each micro-batch and sample.
        options: How samples become batches.
    """

    dataset: Any
    micro_batch: int
    seed: int
    options: LoaderOptions

    @classmethod
    def of(cls, data: Any, default_micro_batch: int | None, seed: int, given: Mapping[str, Any]) -> EvalPlan:
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
        return cls(data, min(micro_batch, size), seed, options)

    def own_micro_batches(self, session: Session) -> Iterator[tuple[int, Any]]:
        """Yields (micro-batch index, batch) of this rank's part of the dataset, in dataset order."""
        size, place = len(self.dataset), (session.place.rank, session.place.world_size)
        loader = MicroBatchLoader(
            self.dataset,
            Schedule(num_samples=size, global_batch=size, micro_batch=self.micro_batch),
            place=place,
            seed=derive_seed(self.seed, "eval"),
            device=session.device,
            options=self.options,
        )
        for micro, batch in zip(loader.micro_batches(), loader, strict=True):
            seed_all(derive_seed(self.seed, "eval", micro.index), session.device)
            if not micro.shadow:
                yield micro.index, batch


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
    with preserved(session.device), evaluating(model):
        for index, batch in plan.own_micro_batches(session):
            own.append((index, _pairs(metric(model, batch), batch)))
    found = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    names = dict.fromkeys(name for _, pairs in found for name in pairs)
    totals = {}
    for name in names:
        there = [pairs[name] for _, pairs in found if name in pairs]
        count = math.fsum(count for _, count in there)
        totals[name] = math.fsum(total for total, _ in there) / count if count else math.nan
    return totals


def _pairs(value: Any, batch: Any) -> dict[str, tuple[float, float]]:
    if isinstance(value, Mapping):
        return {name: _pair(pair, batch) for name, pair in value.items()}
    return {"value": _pair(value, batch)}


def _pair(value: Any, batch: Any) -> tuple[float, float]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]), float(value[1])
    count = num_samples(batch)
    try:
        mean = float(value)
    except (TypeError, ValueError, RuntimeError):
        mean, count = math.nan, None
    if count is None:
        raise InputError(
            f"a metric returned {type(value).__name__}: return (sum, count), {{name: (sum, count)}}, or one number "
            "that is the batch's mean"
        )
    return mean * count, float(count)


def predict(session: Session, model: nn.Module, function: Callable[[nn.Module, Any], Any], plan: EvalPlan) -> Any:
    """Returns `function(model, batch)` for the whole dataset, one result a sample, in dataset order, on every rank.

    Results that are tensors are concatenated along their first dimension; lists are joined.

    Collective: every rank calls it.

    Raises:
        InputError: a batch gave another number of results than it has samples.
    """
    own: list[tuple[int, Any]] = []
    with preserved(session.device), evaluating(model):
        for index, batch in plan.own_micro_batches(session):
            own.append((index, map_tensors(lambda tensor: tensor.detach().cpu(), function(model, batch))))
    parts = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    results = [result for _, result in parts]
    joined = torch.cat(results) if isinstance(results[0], torch.Tensor) else [x for part in results for x in part]
    if len(joined) != len(plan.dataset):
        raise InputError(
            f"predict's function gave {len(joined)} results for {len(plan.dataset)} samples: return one for each"
        )
    return joined
