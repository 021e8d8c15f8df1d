"""Contents: what a checkpoint holds of a run, taken out of it and put back in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.format import MODEL, OPTIMIZER, TRACKED, Entry, FileLayout
from unisono.checkpoint.plain import from_plain, to_plain
from unisono.checkpoint.reader import Checkpoint, TensorFile
from unisono.checkpoint.snapshot import Part
from unisono.errors import InputError
from unisono.prepare import Preparation
from unisono.strategy.saved import Held, Shard
from unisono.strategy.stepper import Stepper
from unisono.strategy.unit import Unit

# What a rank tells the others of a tensor that it has: dtype, shape, and whether it has all of it.
Told = dict[str, dict[str, tuple[torch.dtype, tuple[int, ...], bool]]]


@dataclass
class Contents:
    """What this rank has of a checkpoint.

    Attributes:
        held: Tensors by file and name.
        state: The rest, as JSON can hold it.
        values: Of each optimizer, what its state has beside tensors, by parameter and key: on the rank that has it.
    """

    held: dict[str, dict[str, Held]] = field(default_factory=lambda: {MODEL: {}, OPTIMIZER: {}})
    state: dict[str, Any] = field(default_factory=dict)
    values: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def told(self) -> tuple[Told, list[dict[str, dict[str, Any]]]]:
        """What the other ranks have to know."""
        tensors = {
            file: {name: (held.dtype, held.shape, held.whole) for name, held in found.items()}
            for file, found in self.held.items()
        }
        return tensors, self.values

    def add_tensors(self, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes in tensors that are here as a whole."""
        self.held.setdefault(file, {}).update({name: Held.all_of(tensor) for name, tensor in tensors.items()})


def collect(prepared: Preparation, stepper: Stepper, tracked: Mapping[str, Any]) -> Contents:
    """Takes out what is to be saved, between two steps. Collective where tracked objects are."""
    found = Contents()
    with prepared.streaming():
        shards = {key: held for unit in stepper.units for key, held in unit.strategy.held_weights().items()}
        for name, tensor in prepared.live_state().items():
            found.held[MODEL][name] = shards.get(id(tensor)) or Held.all_of(tensor)
        found.state["tied"] = prepared.tied_names()
    found.state["optimizers"] = [
        _collect_unit(found, unit, number, len(stepper.units)) for number, unit in enumerate(stepper.units)
    ]
    tensors: dict[str, torch.Tensor] = {}
    found.state["tracked"] = {name: to_plain(thing.state_dict(), name, tensors) for name, thing in tracked.items()}
    if tensors:
        found.add_tensors(TRACKED, tensors)
    return found


def _collect_unit(found: Contents, unit: Unit, number: int, count: int) -> dict[str, Any]:
    optimizer, names, extra = unit.strategy.optimizer, parameter_names(unit, number, count), dict[str, torch.Tensor]()
    held = unit.strategy.held_state()
    values: dict[str, dict[str, Any]] = {}
    for (owner, key), tensor in held.tensors.items():
        found.held[OPTIMIZER][f"{names[owner]}/{key}"] = tensor
    for (owner, key), value in held.values.items():
        values.setdefault(names[owner], {})[key] = to_plain(value, f"{names[owner]}/{key}", extra)
    found.values.append(values)
    where = f"optimizers.{number}"
    record = {
        "class": type(optimizer).__name__,
        "param_groups": [
            {
                **to_plain({k: v for k, v in group.items() if k != "params"}, f"{where}.param_groups.{k}", extra),
                "params": [names[id(param)] for param in group["params"]],
            }
            for k, group in enumerate(optimizer.param_groups)
        ],
        "common": to_plain(held.common, f"{where}.common", extra),
        "schedules": [
            to_plain(schedule_state(schedule), f"{where}.schedules.{k}", extra)
            for k, schedule in enumerate(unit.schedulers)
        ],
    }
    found.add_tensors(OPTIMIZER, extra)
    return record


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """The state of an LR scheduler, without the methods that hang in it."""
    return {key: value for key, value in schedule.state_dict().items() if not callable(value)}


def parameter_names(unit: Unit, number: int, count: int) -> dict[int, str]:
    """Names of an optimizer's parameters by id; those of no model are counted."""
    params = [param for group in unit.strategy.optimizer.param_groups for param in group["params"]]
    prefix = f"optimizer {number} " if count > 1 else ""
    return {id(p): unit.strategy.setup.names.get(id(p), f"{prefix}parameter {k}") for k, p in enumerate(params)}


def layouts_of(everyone: Sequence[Told]) -> dict[str, FileLayout]:
    """Lays out the files, from what all ranks have."""
    found: dict[str, dict[str, Entry]] = {}
    for told in everyone:
        for file, tensors in told.items():
            entries = found.setdefault(file, {})
            for name, (dtype, shape, _) in tensors.items():
                entries.setdefault(name, Entry(name, dtype, shape))
    return {file: FileLayout.of(entries.values()) for file, entries in found.items()}


def parts_of(contents: Contents, layouts: Mapping[str, FileLayout], everyone: Sequence[Told], rank: int) -> list[Part]:
    """Returns what this rank writes: its shards, what it alone has, and a share of what all have."""
    own, common = [], []
    for file, layout in layouts.items():
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        common.append(Part(file, 0, header))
        for entry in layout.entries:
            held = contents.held.get(file, {}).get(entry.name)
            if held is None:
                continue
            holders = [r for r, told in enumerate(everyone) if told.get(file, {}).get(entry.name, (0, 0, False))[2]]
            parts = [_part(file, layout.starts[entry.name], entry, shard) for shard in held.shards]
            parts = [part for part in parts if part.values.numel()]
            if len(holders) == len(everyone):
                common += parts
            elif not holders or holders[0] == rank:
                own += parts
    return own + list(_share(common, rank, len(everyone)))


def _part(file: str, start: int, entry: Entry, shard: Shard) -> Part:
    return Part(file, start + shard.start * entry.dtype.itemsize, shard.values)


def _share(parts: Sequence[Part], rank: int, world_size: int) -> Iterator[Part]:
    total = sum(part.values.nbytes for part in parts)
    first, last, offset = total * rank // world_size, total * (rank + 1) // world_size, 0
    for part in parts:
        start, stop = max(first - offset, 0), min(last - offset, part.values.nbytes)
        if start < stop:
            yield part.cut(part.offset + start, part.offset + stop)
        offset += part.values.nbytes


# The way back


def check_fits(found: Checkpoint, prepared: Preparation, stepper: Stepper) -> None:
    """Checks that a checkpoint is of these models and optimizers, before anything is changed.

    Raises:
        InputError: it is not; the first tensor that differs is named.
    """
    with prepared.streaming():
        check_weights(found.tensors(MODEL), prepared.live_state())
    saved, now = found.state["optimizers"], stepper.units
    if len(saved) != len(now):
        raise InputError(f"{found.folder} has {len(saved)} optimizers, and this run prepared {len(now)}")
    for number, (record, unit) in enumerate(zip(saved, now, strict=True)):
        optimizer, names = unit.strategy.optimizer, parameter_names(unit, number, len(now))
        if record["class"] != type(optimizer).__name__:
            raise InputError(
                f"{found.folder} was written with {record['class']}, this run has {type(optimizer).__name__}"
            )
        groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        if [group["params"] for group in record["param_groups"]] != groups:
            raise InputError(
                f"{found.folder} was written with other parameter groups than optimizer {number} has now: make the "
                "optimizer as it was made, add_param_group included, before run.resume()"
            )


def check_weights(file: TensorFile, state: Mapping[str, torch.Tensor]) -> None:
    """Checks names and shapes of a file's tensors.

    Raises:
        InputError: they are not the model's.
    """
    for name, tensor in state.items():
        if name not in file:
            raise InputError(f"{file.path} has no tensor {name}, which the model has: it is of another model")
        if file[name].shape != tensor.shape:
            shapes = f"shape {tuple(file[name].shape)} in {file.path}, and {tuple(tensor.shape)} in the model"
            raise InputError(f"{name} has {shapes}: it is of another model")
    if extra := [name for name in file if name not in state]:
        raise InputError(f"{file.path} has a tensor {extra[0]}, which the model has not: it is of another model")


@torch.no_grad()
def restore_weights(file: TensorFile, prepared: Preparation) -> None:
    """Puts the file's tensors into the models. Collective where weights are sharded already."""
    with prepared.whole():
        for name, tensor in prepared.live_state().items():
            tensor.copy_(file[name])


def restore(found: Checkpoint, prepared: Preparation, stepper: Stepper, tracked: Mapping[str, Any]) -> None:
    """Puts back what `collect` took out."""
    restore_weights(found.tensors(MODEL), prepared)
    file = found.tensors(OPTIMIZER)
    for number, unit in enumerate(stepper.units):
        _restore_unit(found.state["optimizers"][number], unit, parameter_names(unit, number, len(stepper.units)), file)
    with _tracked_file(found) as fetch:
        for name, thing in tracked.items():
            if name not in found.state["tracked"]:
                raise InputError(
                    f"{found.folder} has no '{name}', which is tracked now: call run.track before it is saved"
                )
            thing.load_state_dict(from_plain(found.state["tracked"][name], fetch))


def _restore_unit(record: Mapping[str, Any], unit: Unit, names: Mapping[int, str], file: TensorFile) -> None:
    optimizer = unit.strategy.optimizer
    unit.strategy.forget_state()
    by_param: dict[str, dict[str, Any]] = {}
    for name in file:
        owner, slash, key = name.rpartition("/")
        if slash:
            by_param.setdefault(owner, {})[key] = file[name]
    for owner, values in record["values"].items():
        by_param.setdefault(owner, {}).update(from_plain(values, lambda name: file[name].clone()))
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if state := by_param.get(names[id(param)]):
            optimizer.state[param] = unit.strategy.own_state(param, state)
    common = from_plain(record["common"], lambda name: file[name].clone())
    optimizer.state.update(common)
    for group, saved in zip(optimizer.param_groups, record["param_groups"], strict=True):
        settings = {key: value for key, value in saved.items() if key != "params"}
        group.update(from_plain(settings, lambda name: file[name].clone()))
    for schedule, saved in zip(unit.schedulers, record["schedules"], strict=True):
        schedule.load_state_dict(from_plain(saved, lambda name: file[name].clone()))


@contextmanager
def _tracked_file(found: Checkpoint) -> Iterator[Callable[[str], torch.Tensor]]:
    file = found.tensors(TRACKED) if TRACKED in found.state["files"] else None

    def fetch(name: str) -> torch.Tensor:
        assert file is not None
        return file[name].clone()

    yield fetch
