"""Run: the facade of door 1. It finds its place, prepares what the user has, and sums up at the end."""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from unisono.data.loader import LoaderOptions, MicroBatchLoader, from_dataloader
from unisono.data.samples import check_dataset
from unisono.data.schedule import Schedule
from unisono.data.stage import host_key, leader_first
from unisono.errors import InputError, nearest, require_positive_int
from unisono.evaluate import Metric, evaluate, predict
from unisono.launch.environment import detect, usable_cores
from unisono.launch.session import Session, open_session
from unisono.numerics.digest import full_state, weights_digest
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.observe.events import EvalRecord, Sink, StepRecord
from unisono.observe.jsonl import JsonlSink, write_json
from unisono.observe.timer import PhaseTimer
from unisono.recipe import PRECISIONS, check_micro_batch
from unisono.strategy.base import StrategyFactory
from unisono.strategy.replicated import ReplicatedStrategy
from unisono.strategy.stepper import StepOutcome, Stepper, Unit

STRATEGIES: Mapping[str, StrategyFactory] = {"ddp": ReplicatedStrategy}
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)


def init(
    *,
    seed: int = 0,
    threads: int = 1,
    strategy: str = "ddp",
    precision: str = "float32",
    timeout_s: float = 600.0,
    run_dir: str | Path | None = None,
) -> Run:
    """Joins the job that this process was started in; alone, it is a world of one.

    Args:
        seed: All generators are seeded from it, now and before each micro-batch and sample.
        threads: Intra-op threads. CPU kernels add in an order that depends on it, so it is part of a run's
            definition, and 1 is the number that every machine has. Use the other cores by `unisono run --nproc`.
        strategy: "ddp".
        precision: "float32".
        timeout_s: Longest wait for the other ranks in one call.
        run_dir: Where metrics.jsonl and summary.json go; None writes nothing, unless `unisono run` gave one.

    Flags of `unisono run` win over these arguments.

    Raises:
        InputError: an argument or the environment makes no sense.
        CommError: the other ranks did not come.
    """
    place = detect()
    strategy = place.flags.get("strategy", strategy)
    if strategy not in STRATEGIES:
        raise InputError(f"there is no strategy '{strategy}'{nearest(strategy, STRATEGIES)}: {', '.join(STRATEGIES)}")
    if precision not in PRECISIONS:
        raise InputError(f"there is no precision '{precision}': {', '.join(PRECISIONS)}")
    session = open_session(place, threads=require_positive_int(threads, "threads"), timeout_s=timeout_s)
    folder = place.run_dir or (Path(run_dir) if run_dir is not None else None)
    run = Run(session, seed=seed, threads=threads, strategy=strategy, run_dir=folder)
    if place.run_dir is None and folder is not None:
        run.claim(folder)
    if place.origin == "alone" and not place.job and session.device.type == "cpu" and usable_cores() > threads:
        name = Path(sys.argv[0]).name or "train.py"
        run.note(f"1 process, {threads} thread; `unisono run {name}` uses all {usable_cores()} cores, same weights")
    return run


class Run:
    """A run of one process among `world_size`; `unisono.init()` makes one.

    Attributes:
        seed: Of everything random.
        device: Where models and batches go.
        strategy: Its name.
        run_dir: Folder of the run, or None.
        sinks: Where records go, on rank 0.
        values: Means of the last step's logged values, over all ranks.
        samples: Samples seen so far.
    """

    def __init__(self, session: Session, *, seed: int, threads: int, strategy: str, run_dir: Path | None) -> None:
        self._session = session
        self.seed, self.threads, self.strategy, self.run_dir = seed, threads, strategy, run_dir
        self.device = session.device
        self.timer = PhaseTimer(session.device)
        self.sinks: list[Sink] = []
        self.values: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.samples = 0
        self.last_record: StepRecord | None = None
        self._started = self._last_told = time.perf_counter()
        self._models: dict[str, nn.Module] = {}
        self._micro_batch: int | None = None
        self._occasions = 0
        self._closed = False
        self._stepper = Stepper(
            session.comm, session.device, seed=seed, timer=self.timer, on_step=self._tell, on_note=self.note
        )
        seed_all(derive_seed(seed, "init"), session.device)
        if run_dir is not None and self.is_main and run_dir.is_dir():
            self.sinks.append(JsonlSink(run_dir / "metrics.jsonl"))
        atexit.register(self._at_exit)

    # Place

    @property
    def rank(self) -> int:
        return self._session.place.rank

    @property
    def world_size(self) -> int:
        return self._session.place.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Updates done so far: inside a micro-batch, the index of its step. The same on every rank."""
        return self._stepper.step

    @property
    def step_done(self) -> bool:
        """Whether the last `optimizer.step()` ended a step: true on every rank once a step.

        `if run.step_done and run.step % 100 == 0:` is the place for an evaluation in mid-epoch.
        """
        return self._stepper.micro is not None and self._stepper.finished

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 only."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def note(self, sentence: str) -> None:
        """Tells the user something once, on rank 0, on standard error."""
        if self.is_main:
            print(f"unisono: {sentence}", file=sys.stderr, flush=True)

    def claim(self, folder: Path) -> None:
        """Makes a new run folder, on rank 0.

        Raises:
            InputError: there is one of that name; on every rank.
        """
        error = None
        if self.is_main:
            try:
                folder.mkdir(parents=True)
                self.sinks.append(JsonlSink(folder / "metrics.jsonl"))
            except OSError as reason:
                there = isinstance(reason, FileExistsError)
                error = f"run folder {folder} exists: choose another" if there else f"run folder {folder}: {reason}"
        if error := next((e for e in self._session.comm.gather_objects(error) if e), None):
            raise InputError(error)

    # Preparation

    @overload
    def prepare(self, model: M, optimizer: O, **options: Any) -> tuple[M, O]: ...

    @overload
    def prepare(self, model: M, optimizer: O, data: Any, **options: Any) -> tuple[M, O, MicroBatchLoader]: ...

    def prepare(self, model: M, optimizer: O, data: Any = None, **options: Any) -> Any:
        """Makes a model, its optimizer and a dataset work together on all ranks.

        The model and the optimizer are the same objects as before, with the same names. `optimizer.step()` is to
        be called once for each batch of the loader; at a step's last one it sums the gradients and updates.

        Args:
            model: Moved to this rank's device; all ranks start from rank 0's weights.
            optimizer: Of any kind but LBFGS.
            data: A map-style dataset, or a `DataLoader` (its batch size is then the micro-batch). Without it,
                only (model, optimizer) are returned, and they share the loader of another call.
            **options: `global_batch`, `micro_batch`, `collate`, `shuffle`, `num_workers`, `drop_last` for the
                data; `schedule`, an LR scheduler that is to step once an optimizer step (its own `step` then does
                nothing); `clip_norm`; `name` of the model where there are several.

        Collective: every rank calls it.

        Raises:
            InputError: an argument cannot work; the sentence says which and why.
        """
        unknown = set(options) - _PREPARE_OPTIONS
        if unknown:
            name = sorted(unknown)[0]
            raise InputError(f"prepare has no argument '{name}'{nearest(name, _PREPARE_OPTIONS)}")
        self._add_model(model, options.get("name"))
        self._add_optimizer(model, optimizer, options.get("schedule"), options.get("clip_norm"))
        data_options = {k: v for k, v in options.items() if k not in ("schedule", "clip_norm", "name")}
        if data is None:
            if data_options:
                raise InputError(f"prepare got {sorted(data_options)[0]} but no dataset that it could be for")
            return model, optimizer
        return model, optimizer, self.loader(data, **data_options)

    def _add_model(self, model: nn.Module, name: str | None) -> None:
        if any(model is known for known in self._models.values()):
            return
        name = name or ("model" if not self._models else f"model{len(self._models) + 1}")
        if name in self._models:
            raise InputError(f"two models are named '{name}': give prepare another name=")
        model.to(self.device)
        self._models[name] = model
        tensors = list({id(t): t.detach() for t in [*model.parameters(), *model.buffers()]}.values())
        self._session.comm.broadcast(tensors)
        self._stepper.add_model(model)
        model.register_forward_hook(self._watch_backward)

    def _watch_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Sees backward begin in a plain `loss.backward()`: the first gradient to reach the model's output."""
        if self.timer.phase != "forward" or not torch.is_grad_enabled():
            return
        found = _first_with_grad(output)
        if found is not None:
            found.register_hook(self._backward_begins)

    def _backward_begins(self, grad: torch.Tensor) -> None:
        if self.timer.phase == "forward":
            self.timer.enter("backward")

    def _add_optimizer(
        self, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, clip_norm: float | None
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise InputError("LBFGS evaluates the loss several times a step, which unisono does not do: use another")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
        if getattr(optimizer.step, "__func__", None) is _step:
            raise InputError("this optimizer was prepared before: prepare each one once")
        names = {id(param): name for name, param in model.named_parameters()}
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        self._session.comm.broadcast([param.detach() for param in own])
        unit = Unit(STRATEGIES[self.strategy](self._session.comm, optimizer, names), optimizer.step, clip_norm=clip_norm)
        if schedule is not None:
            if isinstance(schedule, ReduceLROnPlateau):
                raise InputError("ReduceLROnPlateau needs a metric: call its step(metric) yourself after an evaluation")
            unit.schedules.append(schedule.step)
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
        """Returns a loader of this rank's micro-batches; see `prepare`."""
        options = LoaderOptions(collate=collate, shuffle=shuffle is not False, num_workers=num_workers or 0)
        if isinstance(data, DataLoader):
            data, micro, drop, found = from_dataloader(data)
            check_dataset(data, "the dataset")
            micro_batch = micro if micro_batch is None else micro_batch
            drop_last = drop if drop_last is None else drop_last
            options = LoaderOptions(
                collate=collate or found.collate,
                shuffle=found.shuffle if shuffle is None else shuffle,
                num_workers=found.num_workers if num_workers is None else num_workers,
                extra=found.extra,
            )
        options = self._with_flags(options)
        size = check_dataset(data, "the dataset")
        global_batch = micro_batch if global_batch is None else global_batch
        global_batch = require_positive_int(global_batch, "global_batch")
        micro_batch = check_micro_batch(global_batch, global_batch if micro_batch is None else micro_batch, "")
        schedule = Schedule(
            num_samples=size, global_batch=global_batch, micro_batch=micro_batch, drop_last=bool(drop_last)
        )
        check_world_size(self.world_size, global_batch, micro_batch)
        self._micro_batch = self._micro_batch or micro_batch
        return MicroBatchLoader(
            data,
            schedule,
            place=(self.rank, self.world_size),
            seed=self.seed,
            device=self.device,
            options=options,
            on_fetch=lambda: self.timer.enter("data"),
            on_micro=lambda epoch, micro: self._stepper.begin(epoch, micro, schedule),
            on_end=self._stepper.settle,
        )

    def _with_flags(self, options: LoaderOptions) -> LoaderOptions:
        workers = self._session.place.flags.get("num_workers")
        if workers is None:
            return options
        return replace(options, num_workers=workers)

    # The loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yields 0 .. num_epochs - 1. Each pass over the loader has its own order, with or without this."""
        for epoch in range(num_epochs):
            yield epoch
            self._stepper.settle()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """`loss.backward()`, for a mean that is not over samples, and to have the loss in metrics.jsonl.

        Args:
            loss: The micro-batch's mean loss, a scalar.
            weight: What it is a mean over: the number of valid tokens, say. The step's gradient is
                sum(weight * gradient) / sum(weight) over the global batch, whatever the split. Default: samples.

        Raises:
            InputError: the loss is no scalar, needs no gradient, or is not finite; the weights stay as they were.
        """
        where = self._stepper.where()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError(f"the loss in {where} must be a scalar tensor, got {kind}: return its mean")
        if not loss.requires_grad:
            raise InputError(f"the loss in {where} needs no gradient: compute it from the model's output, undetached")
        if weight is not None:
            self._stepper.set_weight(float(weight))
        if self.device.type == "cpu" and self._stepper.weight > 0 and not math.isfinite(loss.item()):
            raise InputError(
                f"the loss in {where} is {loss.item()}; the weights are still those after step {self.step - 1}"
                if self.step
                else f"the loss in {where} is {loss.item()}; the weights are still the initial ones"
            )
        self.log(loss=loss.detach())
        self.timer.enter("backward")
        loss.reshape(()).backward()

    def log(self, **values: Any) -> None:
        """Notes numbers of this micro-batch: their weighted mean over the step goes to `values` and metrics.jsonl."""
        self._stepper.log(values)

    def mean(self, value: Any, weight: float = 1.0) -> float:
        """Returns the weighted mean of one number of every rank. Collective: every rank calls it."""
        pairs = self._session.comm.gather_objects((float(value), float(weight)))
        total = math.fsum(weight for _, weight in pairs)
        return math.fsum(value * weight for value, weight in pairs) / total if total else math.nan

    def barrier(self, what: str = "run.barrier()") -> None:
        """Waits for all ranks; the error names those that did not come."""
        self._session.comm.barrier(what)

    @contextlib.contextmanager
    def rank0_first(self, *, per_host: bool = True, timeout_s: float | None = None) -> Iterator[None]:
        """Lets one rank of each host (or of the job) do something first, a download say, while the others wait.

        Raises:
            CommError: the first rank failed or took longer than `timeout_s`; on all that waited for it.
        """
        self._occasions += 1
        leads = self._session.place.local_rank == 0 if per_host else self.rank == 0
        timeout = self._session.timeout_s if timeout_s is None else timeout_s
        key = f"unisono/first/{self._occasions}/{host_key(per_host)}"
        with leader_first(self._session.store, rank=self.rank, leads=leads, key=key, timeout_s=timeout):
            yield

    # Judging

    def evaluate(self, model: nn.Module, data: Any, metric: Metric, **options: Any) -> Any:
        """Evaluates on a dataset (or a `DataLoader`'s), each sample counted once, on all ranks together.

        Args:
            metric: `metric(model, batch)` returns {name: (sum, count)}, one (sum, count), or the batch's mean.
            **options: `micro_batch` (default: that of training), `collate`, `num_workers`.

        Returns:
            {name: sum / count}, or the number itself if the metric has no names. The same on every rank.

        Collective: every rank calls it.
        """
        started, phase = time.perf_counter(), self.timer.phase
        self._settle_before_reading()
        self.timer.enter(None)
        dataset, settings = self._eval_settings(data, options)
        found = evaluate(self._session, model, dataset, metric, seed=self.seed, **settings)
        self.metrics.update(found)
        record = EvalRecord(
            step=self.step, epoch=self._stepper.epoch, metrics=found, eval_s=time.perf_counter() - started
        )
        for sink in self.sinks:
            sink.record(record)
        self.timer.enter(phase)
        return found["value"] if list(found) == ["value"] else found

    def predict(self, model: nn.Module, data: Any, function: Callable[[nn.Module, Any], Any], **options: Any) -> Any:
        """Returns `function(model, batch)` for the whole dataset: one result a sample, in order, on every rank.

        Args:
            **options: As for `evaluate`.

        Collective: every rank calls it.
        """
        self._settle_before_reading()
        dataset, settings = self._eval_settings(data, options)
        return predict(self._session, model, dataset, function, seed=self.seed, **settings)

    def _settle_before_reading(self) -> None:
        """Updates that wait for the end of the micro-batch are due before anyone looks at the weights."""
        if self._stepper.micro is not None and self._stepper.stepped_here:
            self._stepper.settle()

    def _eval_settings(self, data: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        unknown = sorted(set(options) - {"micro_batch", "collate", "num_workers"})
        if unknown:
            raise InputError(f"evaluate has no argument '{unknown[0]}'")
        micro_batch = options.get("micro_batch") or self._micro_batch or 64
        loading = LoaderOptions(
            collate=options.get("collate"), shuffle=False, num_workers=options.get("num_workers") or 0
        )
        if isinstance(data, DataLoader):
            data, micro, _, found = from_dataloader(data)
            micro_batch = options.get("micro_batch") or micro
            loading = LoaderOptions(collate=found.collate, shuffle=False, num_workers=found.num_workers)
        return data, {"micro_batch": require_positive_int(micro_batch, "micro_batch"), "options": loading}

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the full model state by name; with several models, names start with the model's."""
        self._settle_before_reading()
        if len(self._models) == 1:
            return full_state(next(iter(self._models.values())))
        return {f"{name}.{k}": v for name, model in self._models.items() for k, v in full_state(model).items()}

    def weights_digest(self) -> str:
        """Returns the digest of `state()`: equal on every rank, and for every number of ranks."""
        return weights_digest(self.state())

    # Records and the end

    def _tell(self, outcome: StepOutcome) -> None:
        self.samples += outcome.num_samples
        self.values = dict(outcome.values)
        if not self.sinks:
            return
        times = outcome.times()
        values = dict(outcome.values)
        record = StepRecord(
            step=outcome.step,
            epoch=outcome.epoch,
            samples=self.samples,
            loss=values.pop("loss", None),
            lr=outcome.lr,
            grad_norm=None if outcome.grad_norm is None else outcome.grad_norm.item(),
            times=times,
            samples_per_s=outcome.num_samples / times["step_s"],
            values=values,
        )
        self.last_record = record
        for sink in self.sinks:
            sink.record(record)

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json holds."""
        wall_s = time.perf_counter() - self._started
        return {
            "steps": self.step,
            "samples": self.samples,
            "loss": self.values.get("loss"),
            "eval": self.metrics,
            "weights_digest": self.weights_digest() if self._models else None,
            "samples_per_s": self.samples / wall_s if wall_s else 0.0,
            "nproc": self.world_size,
            "strategy": self.strategy,
            "restarts": self._session.place.restarts,
            "wall_s": wall_s,
        }

    def close(self, failed: bool = False) -> None:
        """Ends the run: pending updates, summary.json, connections. Idempotent; called at exit.

        Collective unless `failed`.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if not failed:
                self._stepper.settle()
                self._stepper.flush()
            if self.run_dir is not None and self.is_main and self.run_dir.is_dir():
                write_json(self.run_dir / "summary.json", {**self.summary(), "finished": not failed})
        finally:
            for sink in self.sinks:
                sink.close()
            self._session.close(failed)

    def _at_exit(self) -> None:
        self.close(failed=getattr(sys, "last_value", None) is not None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(failed=error is not None)


_PREPARE_OPTIONS = frozenset(
    "global_batch micro_batch collate shuffle num_workers drop_last schedule clip_norm name".split()
)


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
    stepper, unit = optimizer.__dict__["_unisono"]
    return stepper.request(unit, closure)


def _ignored_step(schedule: LRScheduler, *args: Any) -> None:
    """`step` of a scheduler that was passed to `prepare`: it is stepped with the optimizer."""


def _first_with_grad(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    items: Sequence[Any] = ()
    if isinstance(output, Mapping):
        items = list(output.values())
    elif isinstance(output, list | tuple):
        items = output
    return next((found for item in items if (found := _first_with_grad(item)) is not None), None)
