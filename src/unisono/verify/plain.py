"""The same recipe in plain PyTorch on one process, without the engine: only seeds and the order of samples are ours.

Each micro-batch's gradient is kept and neighbours are added, so that an optimizer whose update does not depend on a
tensor's length gives the engine's bits; others (fused ones) differ in the last places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.reader import weights_file
from unisono.data.loader import LoaderOptions, MicroBatchLoader
from unisono.data.schedule import MicroBatch, Schedule
from unisono.forward.mixed import Narrow
from unisono.forward.options import AUTOCAST
from unisono.numerics.digest import full_state, weights_digest
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.recipe import BF16, FP16_MIXED, Recipe, dataset_of
from unisono.strategy.loss_scale import LossScale
from unisono.verify.trace import Trace, hash_of

_AVERAGED = ("running_mean", "running_var")


def train_plain(recipe: Recipe, device: torch.device, folder: Path, save_at: int | None) -> None:
    """Trains and writes a trace.

    Args:
        recipe: With `steps`.
        device: Where to.
        folder: Where the trace goes.
        save_at: After which step the weights are kept.
    """
    torch.set_num_threads(recipe.threads)
    trace = Trace(threads=torch.get_num_threads())
    seed_all(derive_seed(recipe.seed, "init"), device)
    data = dataset_of(recipe.train)
    seed_all(derive_seed(recipe.seed, "model"), device)
    low = recipe.precision == BF16
    model = recipe.model().to(device, torch.bfloat16 if low else None)
    if recipe.init_from is not None:
        file = weights_file(recipe.init_from)
        with torch.no_grad():
            for name, tensor in full_state(model).items():
                tensor.copy_(file[name])
    if low:
        Narrow(model)
    optimizer = recipe.optimizer(model.parameters())
    masters = _master_weights(optimizer) if low else {}
    loss_scale = LossScale() if recipe.precision == FP16_MIXED else None
    schedule = recipe.schedule(optimizer) if recipe.schedule else None
    model.train()
    for step, batches in enumerate(itertools.islice(_steps(recipe, data, device), recipe.steps)):
        _step(recipe, model, optimizer, masters, loss_scale, device, trace, step, batches)
        if schedule is not None:
            schedule.step()
        trace.step(full_state(model), folder, save_at)
    trace.digest = weights_digest(model)
    trace.write(folder, 0)


def _steps(recipe: Recipe, data: Any, device: torch.device) -> Iterator[list[tuple[MicroBatch, Any]]]:
    """Yields the micro-batches of one step after the other, epoch after epoch."""
    micro_batch = recipe.micro_batch or recipe.global_batch
    plan = Schedule(
        num_samples=len(data), global_batch=recipe.global_batch, micro_batch=micro_batch, drop_last=recipe.drop_last
    )
    options = LoaderOptions(collate=recipe.collate)
    loader = MicroBatchLoader(data, plan, place=(0, 1), seed=recipe.seed, device=device, options=options)
    while True:
        pairs = zip(loader.micro_batches(), loader, strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].step):
            yield list(group)


def _step(
    recipe: Recipe,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    masters: dict[torch.Tensor, torch.Tensor],
    loss_scale: LossScale | None,
    device: torch.device,
    trace: Trace,
    step: int,
    batches: list[tuple[MicroBatch, Any]],
) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if masters:
        params = list(masters)
    scaling = 1.0 if loss_scale is None else loss_scale.value
    begin = {name: buffer.clone() for name, buffer in model.named_buffers()}
    grads: list[list[torch.Tensor | None]] = []
    left: list[dict[str, torch.Tensor]] = []
    scales = []
    for micro, batch in batches:
        for name, buffer in model.named_buffers():
            if name in begin and buffer.shape == begin[name].shape:
                buffer.data.copy_(begin[name])
        for param in params:
            param.grad = None
        seed_all(derive_seed(recipe.seed, "micro-batch", step, micro.index), device)
        seen = hash_of(batch)
        autocast = AUTOCAST.get(recipe.precision)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            found = recipe.loss(model, batch)
        loss, weight = found if isinstance(found, tuple) else (found, None)
        trace.micro(step, micro.index, seen, loss)
        (loss * scaling).backward()
        scale = float(micro.num_samples if weight is None else weight) / (recipe.micro_batch or recipe.global_batch)
        scales.append(scale)
        grads.append([None if p.grad is None else p.grad if scale == 1.0 else p.grad * scale for p in params])
        left.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    total = sum(scales)
    for param, parts in zip(params, zip(*grads, strict=True), strict=True):
        found_any = any(part is not None for part in parts)
        whole = [torch.zeros_like(param) if part is None else part for part in parts]
        param.grad = _pairwise(whole) / (total * scaling) if found_any else None
    for name, buffer in model.named_buffers():
        values = [buffers[name] for buffers in left]
        if name.rpartition(".")[2] in _AVERAGED and buffer.is_floating_point():
            buffer.copy_((_pairwise([value.double() for value in values]) / len(values)).to(buffer.dtype))
        elif name in begin and buffer.shape == begin[name].shape:
            buffer.data.copy_(values[0])
    norm = torch.nn.utils.clip_grad_norm_(params, recipe.clip_norm or float("inf"))
    if loss_scale is not None:
        loss_scale.end_step(bool(norm.isfinite()))
        if not norm.isfinite():
            return
    for param, master in masters.items():
        master.grad = None if param.grad is None else param.grad.float()
    optimizer.step()
    for param, master in masters.items():
        param.detach().copy_(master)


def _master_weights(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Lets the optimizer work on float32 copies; returns them by parameter."""
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        own = {param: torch.nn.Parameter(param.detach().float()) for param in group["params"]}
        group["params"] = list(own.values())
        masters.update(own)
    return masters


def _pairwise(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        pairs = [parts[k] + parts[k + 1] for k in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]
