"""Preparation: makes the user's model, optimizer and data work on all ranks, without replacing any of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from unisono.data.loader import LoaderOptions, MicroBatchLoader, from_dataloader
from unisono.data.samples import check_dataset
from unisono.data.schedule import MicroBatch, Schedule
from unisono.errors import InputError, nearest, require_positive_int
from unisono.forward.options import EAGER, ForwardOptions
from unisono.launch.session import Session
from unisono.numerics.digest import live_state, tied_names
from unisono.observe.timer import PhaseTimer
from unisono.recipe import BF16, check_clip_norm, check_micro_batch
from unisono.strategy.base import Setup
from unisono.strategy.catalog import STRATEGIES
from unisono.strategy.stepper import Stepper
from unisono.strategy.unit import Unit

_LOOKED_AT = 4096  # elements of a tensor

LOADING = ("global_batch", "micro_batch", "collate", "shuffle", "num_workers", "drop_last")


class Preparation:
    """What a run has prepared.

    Attributes:
        models: By name.
        micro_batch: Of the first loader: what evaluation uses too, so that no world size can show.
        forward: How the models' forwards are executed.
        seed: Of everything random.
        loaders: In the order of their preparation.
    """

    def __init__(
        self,
        session: Session,
        stepper: Stepper,
        timer: PhaseTimer,
        *,
        seed: int,
        strategy: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        forward: ForwardOptions = EAGER,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self._session, self._stepper, self._timer = session, stepper, timer
        self.seed, self._factory, self._options = seed, STRATEGIES[strategy], options
        self.forward, self._on_note = forward, on_note
        self.models: dict[str, nn.Module] = {}
        self.micro_batch: int | None = None
        self.loaders: list[MicroBatchLoader] = []

    def add_model(self, model: nn.Module, name: str | None) -> None:
        """Moves a model to the device, gives it rank 0's weights, and watches its forward.

        Raises:
            InputError: its name is taken, or it has a SyncBatchNorm.
        """
        if any(model is known for known in self.models.values()):
            return
        name = name or ("model" if not self.models else f"model{len(self.models) + 1}")
        if name in self.models:
            raise InputError(f"two models are named '{name}': give prepare another name=")
        for path, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise InputError(
                    f"{path or name} is a SyncBatchNorm, whose statistics would depend on the number of processes: use "
                    "BatchNorm, whose running statistics unisono averages"
                )
        model.to(self._session.device, torch.bfloat16 if self.forward.precision == BF16 else None)
        _give_own_memory(model)
        self.models[name] = model
        tensors = {id(tensor): tensor.detach() for tensor in [*model.parameters(), *model.buffers()]}
        self._session.comm.broadcast(list(tensors.values()))
        self.forward.apply(
            model,
            self._session.device.type,
            hooks_inside=self.shards_weights,
            loss_scale=self._stepper.loss_scale,
            on_note=self._on_note,
        )
        self._stepper.add_model(model)
        # A plain `loss.backward()` counts as forward time where there can be no hook: a scripted model takes none, and
        # under dp the clock is the main thread's.
        if not isinstance(model, torch.jit.ScriptModule) and not self._factory.in_threads:
            model.register_forward_hook(_BackwardWatch(self._timer))

    @property
    def shards_weights(self) -> bool:
        """Whether no rank keeps all weights."""
        return self._factory.shards_weights and self._session.comm.world_size > 1

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Collective: inside, every rank has all weights."""
        with ExitStack() as stack:
            for unit in self._stepper.units:
                stack.enter_context(unit.strategy.whole())
            yield

    @contextmanager
    def streaming(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Collective: inside, weights come one after the other; see `Strategy.streaming`."""
        with ExitStack() as stack:
            fetchers = [stack.enter_context(unit.strategy.streaming()) for unit in self._stepper.units]

            yield lambda tensor: reduce(lambda value, fetch: fetch(value), fetchers, tensor)

    @property
    def folder(self) -> Path | None:
        """Where files that stand for memory go; None for the system's place."""
        offload = self._options.get("offload")
        return None if offload is None else offload.folder

    def tied_names(self) -> dict[str, str]:
        """Returns further names of tied weights, with the one that `live_state` has."""
        found = {}
        for name, model in self.models.items():
            prefix = f"{name}." if len(self.models) > 1 else ""
            found.update({prefix + other: prefix + first for other, first in tied_names(model).items()})
        return found

    def live_state(self) -> dict[str, torch.Tensor]:
        """Returns the full state of all models as it hangs there, by name; of several, names start with the model's."""
        prefixes = {name: f"{name}." if len(self.models) > 1 else "" for name in self.models}
        return {prefixes[name] + k: v for name, model in self.models.items() for k, v in live_state(model).items()}

    @staticmethod
    def check_loading(data: Any, loading: Mapping[str, Any]) -> None:
        """Checks the names of `loader`'s arguments.

        Raises:
            InputError: there is none of that name, or no dataset.
        """
        if unknown := sorted(set(loading) - set(LOADING)):
            raise InputError(f"prepare has no argument '{unknown[0]}'{nearest(unknown[0], LOADING)}")
        if data is None and loading:
            raise InputError(f"prepare got {sorted(loading)[0]}, but no dataset that it could be for")

    @staticmethod
    def check(models: Sequence[Any], optimizer: Any, schedule: LRScheduler | None, clip_norm: float | None) -> None:
        """Checks before anything is changed.

        Raises:
            InputError: the models, optimizer, scheduler or norm cannot work.
        """
        for model in models:
            if not isinstance(model, nn.Module):
                raise InputError(f"prepare(model, optimizer, ...) got {type(model).__name__} as its model")
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"prepare(model, optimizer, ...) got {type(optimizer).__name__} as its optimizer")
        if isinstance(optimizer, LBFGS):
            raise InputError("LBFGS evaluates the loss several times a step, which unisono does not do: use another")
        check_clip_norm(clip_norm)
        if "_unisono" in optimizer.__dict__:
            raise InputError("this optimizer was prepared before: prepare each one once")
        if isinstance(schedule, ReduceLROnPlateau):
            raise InputError("ReduceLROnPlateau needs a metric: call its step(metric) yourself after an evaluation")

    def add_optimizer(
        self,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        clip_norm: float | None,
        on_note: Callable[[str], None],
    ) -> None:
        """Puts our `step` before the optimizer's own, and the scheduler's behind it."""
        models = self.models.items()
        prefixes = {name: f"{name}." if len(models) > 1 else "" for name, _ in models}
        names = {id(param): prefixes[m] + name for m, model in models for name, param in model.named_parameters()}
        taken = {id(p) for u in self._stepper.units for g in u.strategy.optimizer.param_groups for p in g["params"]}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if id(param) in taken:
                name = names.get(id(param), "a parameter")
                raise InputError(f"{name} is in two prepared optimizers: give each parameter to one of them")
        own = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
        if own:
            on_note(
                f"{len(own)} parameters of the optimizer are in no prepared model, so neither in its state nor its "
                "digest; several models of one optimizer go into one call: prepare((one, other), optimizer, ...)"
            )
        self._session.comm.broadcast([param.detach() for param in own])
        masters = self.forward.precision == BF16
        setup = Setup(
            comm=self._session.comm,
            optimizer=optimizer,
            names=names,
            on_note=on_note,
            masters=masters,
            **self._options,
        )
        strategy = self._factory(setup)
        strategy.attach(list(self.models.values()))
        unit = Unit(strategy, optimizer.step, clip_norm=clip_norm)
        if schedule is not None:
            unit.schedules.append(schedule.step)
            unit.schedulers.append(schedule)
            schedule.step = MethodType(_ignored_step, schedule)  # type: ignore[method-assign]
        self._stepper.add_unit(unit)
        optimizer.__dict__["_unisono"] = (self._stepper, unit)
        optimizer.step = MethodType(_step, optimizer)  # type: ignore[method-assign]

    def loader(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        drop_last: bool | None = None,
    ) -> MicroBatchLoader:
        """Returns a loader of this rank's micro-batches of a dataset, or of a `DataLoader`'s."""
        options = LoaderOptions(collate=collate, shuffle=shuffle is not False, num_workers=num_workers or 0)
        if isinstance(data, DataLoader):
            check_dataset(data.dataset, "the dataset")
            data, micro, drop, found = from_dataloader(data)
            micro_batch = micro if micro_batch is None else micro_batch
            drop_last = drop if drop_last is None else drop_last
            options = replace(
                found,
                collate=collate or found.collate,
                shuffle=found.shuffle if shuffle is None else shuffle,
                num_workers=found.num_workers if num_workers is None else num_workers,
            )
        flag = self._session.place.flags.get("num_workers")
        options = options if flag is None else replace(options, num_workers=flag)
        size = check_dataset(data, "the dataset")
        self._check_alike(data, size)
        global_batch = require_positive_int(micro_batch if global_batch is None else global_batch, "global_batch")
        micro_batch = check_micro_batch(global_batch, global_batch if micro_batch is None else micro_batch, "")
        place = (self._session.place.rank, self._session.place.world_size)
        check_world_size(place[1], global_batch, micro_batch)
        schedule = Schedule(
            num_samples=size,
            global_batch=global_batch,
            micro_batch=micro_batch,
            drop_last=bool(drop_last),
            strided=self._factory.strided,
        )
        if schedule.num_steps == 0:
            raise InputError(f"drop_last leaves no step: {size} samples, global_batch {global_batch}")
        self.micro_batch = self.micro_batch or micro_batch
        loader = MicroBatchLoader(
            data,
            schedule,
            place=place,
            seed=self.seed,
            device=self._session.device,
            options=options,
            on_fetch=lambda: self._timer.enter("data"),
            on_micro=lambda epoch, micro: self._begin(epoch, micro, schedule),
            on_end=lambda: self._stepper.end_epoch(schedule),
        )
        self.loaders.append(loader)
        return loader

    def _begin(self, epoch: int, micro: MicroBatch, schedule: Schedule) -> None:
        self._session.flight.at(self._stepper.step, micro.index)
        self._stepper.begin(epoch, micro, schedule)

    def _check_alike(self, data: Any, size: int) -> None:
        found = self._session.comm.gather_objects(_fingerprint(data, size))
        for rank, other in enumerate(found):
            if other != found[0]:
                raise InputError(
                    f"rank {rank} has another dataset than rank 0 (or another split or order of it): call "
                    "unisono.init() before anything random, give the split a generator of its own, and sort what a "
                    "folder is listed as"
                )


def _give_own_memory(model: nn.Module) -> None:
    """Copies expanded buffers (stride 0): one number in several places cannot be received, nor put back."""
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for key, value in module._buffers.items():
            if value is not None and _is_expanded(value):
                module._buffers[key] = copies.setdefault(id(value), value.contiguous())


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fingerprint(data: Any, size: int) -> tuple[Any, ...]:
    """What can be told of a dataset without a sample of it: to get one may open files, which workers must not share."""
    if isinstance(data, Subset):
        indices = ",".join(str(int(index)) for index in data.indices)
        return size, "Subset", zlib.crc32(indices.encode()), _fingerprint(data.dataset, 0)
    if isinstance(data, ConcatDataset):
        return size, "ConcatDataset", *[_fingerprint(part, 0) for part in data.datasets]
    if isinstance(data, TensorDataset):
        return size, "TensorDataset", *[(tuple(t.shape), str(t.dtype), _checksum(t)) for t in data.tensors]
    named = getattr(data, "samples", None)  # torchvision's folders: (path, class), in the order that the system gave
    if isinstance(named, list) and named and isinstance(named[0], tuple):
        text = ";".join(f"{Path(str(path)).name},{rest}" for path, *rest in named)
        return size, type(data).__name__, zlib.crc32(text.encode())
    return size, type(data).__name__


def _checksum(tensor: torch.Tensor) -> int:
    """Of some elements from everywhere."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _LOOKED_AT)].cpu()
    return zlib.crc32(some.contiguous().view(torch.uint8).numpy().tobytes()) if some.numel() else 0


def check_world_size(world_size: int, global_batch: int, micro_batch: int) -> None:
    """Checks that a full step has a micro-batch for every process.

    Raises:
        InputError: it has not.
    """
    num_micro = -(-global_batch // micro_batch)
    if world_size > num_micro:
        raise InputError(
            f"{world_size} processes are more than the {num_micro} micro-batch{'es' * (num_micro > 1)} of a step "
            f"(global_batch {global_batch}, micro_batch {micro_batch}): start at most {num_micro}, or choose a smaller "
            "micro_batch"
        )


def _step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """`optimizer.step` of a prepared optimizer."""
    optimizer.__dict__["_opt_called"] = True  # what LR schedulers look for
    stepper, unit = optimizer.__dict__["_unisono"]
    return stepper.request(unit, closure)


# So that a scheduler made before or after `prepare` leaves our `step` alone; torch's own mark for its wrapper.
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _ignored_step(schedule: LRScheduler, *args: Any) -> None:
    """`step` of a scheduler that was passed to `prepare`: it is stepped with the optimizer."""


class _BackwardWatch:
    """A forward hook that sees backward begin, in a plain `loss.backward()`: a gradient reaches the output.

    Copies of the model (an average of its weights, say) and pickles get a watch of nothing.
    """

    def __init__(self, timer: PhaseTimer | None = None) -> None:
        self._timer = timer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._timer is not None and self._timer.phase == "forward" and torch.is_grad_enabled():
            found = _first_with_grad(output)
            if found is not None:
                found.register_hook(self._begins)  # type: ignore[no-untyped-call]

    def _begins(self, grad: torch.Tensor) -> None:
        if self._timer is not None and self._timer.phase == "forward":
            self._timer.enter("backward")

    def __reduce__(self) -> tuple[type[_BackwardWatch], tuple[()]]:
        return _BackwardWatch, ()


def _first_with_grad(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    items: Sequence[Any] = ()
    if isinstance(output, Mapping):
        items = list(output.values())
    elif isinstance(output, list | tuple):
        items = output
    return next((found for item in items if (found := _first_with_grad(item)) is not None), None)
