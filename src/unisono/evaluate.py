"""Evaluation and prediction: each sample once, in dataset order, the same numbers on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unisono.data.loader import LoaderOptions, MicroBatchLoader
from unisono.data.samples import check_dataset
from unisono.data.schedule import Schedule
from unisono.data.tensors import map_tensors, num_samples
from unisono.errors import InputError
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


def _own_micro_batches(
    session: Session, dataset: Any, micro_batch: int, seed: int, options: LoaderOptions
) -> Iterator[tuple[int, Any]]:
    """Yields (micro-batch index, batch) of this rank's part of the dataset, in dataset order."""
    size = check_dataset(dataset, "the evaluation dataset")
    schedule = Schedule(num_samples=size, global_batch=size, micro_batch=min(micro_batch, size))
    place = (session.place.rank, session.place.world_size)
    loader = MicroBatchLoader(
        dataset, schedule, place=place, seed=derive_seed(seed, "eval"), device=session.device, options=options
    )
    for micro, batch in zip(loader.micro_batches(), loader, strict=True):
        seed_all(derive_seed(seed, "eval", micro.index), session.device)
        if not micro.shadow:
            yield micro.index, batch


def evaluate(
    session: Session,
    model: nn.Module,
    dataset: Any,
    metric: Metric,
    *,
    micro_batch: int,
    seed: int = 0,
    options: LoaderOptions | None = None,
) -> dict[str, float]:
    """Returns {name: sum / count} over the dataset, each sample counted once.

    Args:
        metric: `metric(model, batch)` returns {name: (sum, count)}, one (sum, count), or one number, which is
            then a mean over the batch's samples.
        micro_batch: Samples of one forward: fixed by the caller, so that no world size can show.

    Collective: every rank calls it.

    Determinism: totals are added exactly (`math.fsum`), so neither order nor world size matters.
    """
    own: list[tuple[int, dict[str, tuple[float, float]]]] = []
    with preserved(session.device), evaluating(model):
        for index, batch in _own_micro_batches(session, dataset, micro_batch, seed, options or LoaderOptions()):
            own.append((index, _pairs(metric(model, batch), batch)))
    found = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    names = dict.fromkeys(name for _, pairs in found for name in pairs)
    totals = {}
    for name in names:
        pairs = [pair[name] for _, pair in found if name in pair]
        count = math.fsum(count for _, count in pairs)
        totals[name] = math.fsum(total for total, _ in pairs) / count if count else math.nan
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


def predict(
    session: Session,
    model: nn.Module,
    dataset: Any,
    function: Callable[[nn.Module, Any], Any],
    *,
    micro_batch: int,
    seed: int = 0,
    options: LoaderOptions | None = None,
) -> Any:
    """Returns `function(model, batch)` for the whole dataset, one result a sample, in dataset order, on every rank.

    Results that are tensors are concatenated along their first dimension; lists are joined.

    Collective: every rank calls it.

    Raises:
        InputError: a batch gave another number of results than it has samples.
    """
    own: list[tuple[int, Any]] = []
    with preserved(session.device), evaluating(model):
        for index, batch in _own_micro_batches(session, dataset, micro_batch, seed, options or LoaderOptions()):
            own.append((index, map_tensors(lambda tensor: tensor.detach().cpu(), function(model, batch))))
    parts = sorted((item for part in session.comm.gather_objects(own) for item in part), key=lambda item: item[0])
    results = [result for _, result in parts]
    joined = torch.cat(results) if isinstance(results[0], torch.Tensor) else [x for part in results for x in part]
    if len(joined) != len(dataset):
        raise InputError(
            f"predict's function gave {len(joined)} results for {len(dataset)} samples: return one for each sample"
        )
    return joined
