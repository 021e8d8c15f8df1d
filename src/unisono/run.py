"""Run: the facade of door 1. It finds its place, prepares what the user has, and sums up at the end."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.comm.flight import FLIGHT
from unisono.data.first import host_key, leader_first
from unisono.data.loader import MicroBatchLoader
from unisono.data.stage import stage
from unisono.errors import CommError, InputError
from unisono.execution import DEFAULT, Execution
from unisono.forward.options import EAGER, ForwardOptions
from unisono.judging import Judging
from unisono.launch.failure import describe
from unisono.launch.lock import FolderLock
from unisono.launch.session import Session
from unisono.numerics.seeds import derive_seed, seed_all
from unisono.numerics.sums import weighted_mean
from unisono.observe.events import StepOutcome
from unisono.observe.jsonl import JsonlSink, write_json
from unisono.observe.ledger import Ledger
from unisono.observe.stragglers import Stragglers
from unisono.observe.timer import PhaseTimer
from unisono.prepare import Preparation
from unisono.recipe import FP16_MIXED
from unisono.saving import Saving
from unisono.strategy.backward import check_finite, check_loss
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.stepper import Stepper

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


class Run(Judging, Saving):
    """A run of one process among `world_size`; `unisono.init()` makes one.

    Attributes:
        seed: Of everything random.
        device: Where models and batches go.
        strategy: Its name.
        run_dir: Folder of the run, or None.
        ledger: Records, their sinks, and what the summary says.
    """

    def __init__(
        self,
        session: Session,
        *,
        seed: int,
        strategy: str,
        options: Mapping[str, Any] = MappingProxyType({}),
        forward: ForwardOptions = EAGER,
        how: Execution = DEFAULT,
        hosts: Sequence[str] = (),
    ) -> None:
        self._session = session
        self.seed, self.strategy, self.run_dir = seed, strategy, session.place.run_dir
        self.device = session.device
        self.timer = PhaseTimer(session.device)
        self.ledger = Ledger()
        self._stragglers = Stragglers(hosts)
        self._occasions = 0
        self._closed = False
        self._lock: FolderLock | None = None
        self._stepper = Stepper(
            session.comm,
            session.device,
            seed=seed,
            timer=self.timer,
            on_step=self._on_step,
            on_note=self.note,
            on_boundary=self._on_boundary,
            loss_scale=LossScale() if forward.precision == FP16_MIXED else None,
        )
        self._prepared = Preparation(
            session,
            self._stepper,
            self.timer,
            seed=seed,
            strategy=strategy,
            options=options,
            forward=forward,
            on_note=self.note,
        )
        threads = torch.get_num_threads()
        self._start_saving(how, {"threads": threads, "precision": forward.precision, "compile": forward.compile})
        seed_all(derive_seed(seed, "init"), session.device)
        if self.run_dir is not None:
            self._take(self.run_dir)
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
    def micro_batch(self) -> int | None:
        """The index of the present micro-batch in its step, None for a shadow and outside of the loop."""
        micro = self._stepper.micro
        return None if micro is None else micro.leaf

    @property
    def step_done(self) -> bool:
        """Whether the last `optimizer.step()` ended a step: true on every rank once a step.

        `if run.step_done and run.step % 100 == 0:` is the place for an evaluation in mid-epoch. With several
        optimizers ask after all have been stepped: the step ends here, if they all were.
        """
        return self._stepper.step_done()

    @property
    def values(self) -> dict[str, float]:
        """Means of the last step's logged values, over all micro-batches of all ranks."""
        return self.ledger.values

    def _on_step(self, outcome: StepOutcome) -> None:
        self.ledger.step(outcome)
        if sentence := self._stragglers.step(outcome.loads):
            self.note(sentence)
        self._watch_the_clock()

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 only."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def note(self, sentence: str) -> None:
        """Tells the user something once, on rank 0, on standard error."""
        if self.is_main:
            print(f"unisono: {sentence}", file=sys.stderr, flush=True)

    def claim(self, folder: Path, again: bool = False) -> None:
        """Makes a new run folder, on rank 0.

        Args:
            folder: Where.
            again: It may be there already.

        Raises:
            InputError: there is one of that name; on every rank.
        """
        error = None
        if self.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=again)
                self._lock = FolderLock(folder)
            except InputError as reason:
                error = str(reason)
            except OSError as reason:
                error = f"run folder {folder} cannot be made: {reason.strerror}; choose another, or give resume=True"
        if error := next((e for e in self._session.comm.gather_objects(error) if e), None):
            raise InputError(error)
        self.run_dir = folder
        self._take(folder)

    def _take(self, folder: Path) -> None:
        if self.is_main:
            self._lock = self._lock or FolderLock(folder)
            self.ledger.sinks.append(JsonlSink(folder / "metrics.jsonl"))
        if self.world_size > 1:
            self._session.flight.keep_in(folder / FLIGHT)

    # Preparation

    @overload
    def prepare(self, model: M, optimizer: Opt, **options: Any) -> tuple[M, Opt]: ...

    @overload
    def prepare(self, model: M, optimizer: Opt, data: Any, **options: Any) -> tuple[M, Opt, MicroBatchLoader]: ...

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        data: Any = None,
        *,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        name: str | None = None,
        **loading: Any,
    ) -> Any:
        """Makes a model, its optimizer and a dataset work together on all ranks.

        The model and the optimizer are the same objects as before, with the same names. `optimizer.step()` is to
        be called once for each batch of the loader; at a step's last one it sums the gradients and updates.

        Args:
            model: Moved to this rank's device; all ranks start from rank 0's weights. A tuple of models where one
                optimizer trains several.
            optimizer: Of any kind but LBFGS.
            data: A map-style dataset, or a `DataLoader` (its batch size is then the micro-batch). Without it,
                only (model, optimizer) are returned, and they share the loader of another call.
            schedule: An LR scheduler that is to step once an optimizer step; its own `step` then does nothing.
            clip_norm: Largest L2 norm of the whole gradient.
            name: Of the model, where there are several.
            **loading: `global_batch`, `micro_batch`, `collate`, `shuffle`, `num_workers`, `drop_last`.

        Collective: every rank calls it.

        Raises:
            InputError: an argument cannot work; the sentence says which and why.
        """
        models = list(model) if isinstance(model, tuple | list) else [model]
        self._prepared.check(models, optimizer, schedule, clip_norm)
        self._prepared.check_loading(data, loading)
        loader = None if data is None else self._prepared.loader(data, **loading)
        for one in models:
            self._prepared.add_model(one, name)
        self._prepared.add_optimizer(optimizer, schedule, clip_norm, self.note)
        return (model, optimizer) if loader is None else (model, optimizer, loader)

    # The loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yields 0 .. num_epochs - 1. Each pass over the loader has its own order, with or without this.

        A run that was resumed begins with the epoch that it is in.
        """
        loaders = self._prepared.loaders
        for epoch in range(loaders[0].position[0] if loaders and self._resumed > 0 else 0, num_epochs):
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
        stepper = self._stepper
        check_loss(loss, stepper.where())
        if weight is not None:
            stepper.set_weight(float(weight))
        # Not under a loss scale, where a forward may overflow, and the step is left out.
        if self.device.type == "cpu" and stepper.weight > 0 and stepper.loss_scale is None:
            check_finite(loss, stepper.where(), self.step)
        self.log(loss=loss.detach())
        self.timer.enter("backward")
        stepper.backward(loss)

    def log(self, **values: Any) -> None:
        """Notes numbers of this micro-batch, before `optimizer.step()`: metrics.jsonl gets their mean over the step."""
        self._stepper.log(values)

    def mean(self, value: Any, weight: float = 1.0) -> float:
        """Returns the weighted mean of one number of every rank. Collective: every rank calls it."""
        return weighted_mean(self._session.comm.gather_objects((float(value), float(weight))))

    def barrier(self, what: str = "run.barrier()") -> None:
        """Waits for all ranks; the error names the missing."""
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

    def stage(self, source: str, target: str, *, timeout_s: float | None = None, **options: Any) -> None:
        """Copies data once a host, as `unisono.stage` does, while the host's other ranks wait.

        Args:
            source: A file or folder, wherever fsspec finds it.
            target: A folder of the host.
            timeout_s: Longest wait of the others; default: that of the run.
            **options: Of `unisono.stage`.

        Raises:
            InputError, StageError: on the rank that copies; CommError on those that waited for it.
        """
        with self.rank0_first(timeout_s=timeout_s):
            if self._session.place.local_rank == 0:
                stage(source, target, **options)

    def stop(self) -> None:
        """Asks all ranks to stop after the present step, from a signal handler say: the loader raises Interrupted."""
        self._stepper.requests.stop = True

    @property
    def stopping(self) -> bool:
        """Whether a rank has asked to stop and the step since then has ended."""
        return self._stepper.requests.stopping

    def flush(self) -> None:
        """Collective: ends what is still under way, so that records are complete."""
        self._stepper.settle()
        self._stepper.flush()

    # Records and the end

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json holds."""
        return {
            "steps": self.step,
            "weights_digest": self.weights_digest() if self._prepared.models else None,
            "nproc": self.world_size,
            "strategy": self.strategy,
            **asdict(self._prepared.forward),
            "restarts": self._session.place.restarts,
            **self.ledger.summary(),
        }

    def close(self, failed: bool = False, wait: bool = True) -> None:
        """Ends the run: pending updates, summary.json, connections. Idempotent; called at exit.

        Args:
            failed: Waits for nobody, and tells the others.
            wait: Waits for the other ranks to come here too.

        Collective unless `failed`.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if failed:
                self._stepper.abandon()
            else:
                self.flush()
                self.save_at_the_end()
            if self.run_dir is not None and not (failed and self._stepper.shards_weights):
                summary = self.summary() if self.is_main or self._stepper.shards_weights else {}
                if self.is_main:
                    write_json(self.run_dir / "summary.json", {**summary, "finished": not failed})
            self._push_records()
        finally:
            self.ledger.close()
            self._stepper.close()
            self._session.close(failed, wait)
            if self._lock is not None:
                self._lock.release()

    def _at_exit(self) -> None:
        # A script that calls sys.exit() on one rank comes here too: it must not wait where nobody comes.
        error = getattr(sys, "last_value", None)
        self._note_failure(error)
        self.close(failed=error is not None, wait=not self._session.place.launcher_has_store)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._note_failure(error)
        self.close(failed=error is not None)

    def _note_failure(self, error: BaseException | None) -> None:
        if error is not None:
            self._session.flight.fail(describe(error), isinstance(error, CommError))
