"""Judging: what a run does with its weights beside training them: evaluate, predict, show, and sum up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.evaluate import EvalPlan, Metric, evaluate, predict
from unisono.launch.session import Session
from unisono.numerics.digest import digest_of
from unisono.observe.events import EvalRecord
from unisono.observe.ledger import Ledger
from unisono.observe.timer import PhaseTimer
from unisono.prepare import Preparation
from unisono.strategy.mapped import Mapped
from unisono.strategy.stepper import Stepper


class Judging:
    """The half of a `Run` that reads its weights."""

    _session: Session
    _stepper: Stepper
    _prepared: Preparation
    ledger: Ledger
    timer: PhaseTimer

    def evaluate(self, model: nn.Module, data: Any, metric: Metric, **options: Any) -> Any:
        """Evaluates on a dataset (or a `DataLoader`'s), each sample counted once, on all ranks together.

        Args:
            metric: `metric(model, batch)` returns {name: (sum, count)}, one (sum, count), or the batch's mean.
            **options: `micro_batch` (default: that of training), `collate`, `num_workers`.

        Returns:
            {name: sum / count}, or the number itself if the metric has no names. The same on every rank.

        Collective: every rank calls it.
        """
        started = time.perf_counter()
        self._stepper.settle_before_reading()
        plan = EvalPlan.of(data, self._prepared.micro_batch, self._prepared.seed, options, self._stepper.shards_weights)
        with self.timer.paused():
            found = evaluate(self._session, model, metric, plan)
        seconds = time.perf_counter() - started
        self.ledger.evaluation(
            EvalRecord(step=self._stepper.step, epoch=self._stepper.epoch, metrics=found, eval_s=seconds)
        )
        return found["value"] if list(found) == ["value"] else found

    def predict(self, model: nn.Module, data: Any, function: Callable[[nn.Module, Any], Any], **options: Any) -> Any:
        """Returns `function(model, batch)` for the whole dataset: one result a sample, in order, on every rank.

        Args:
            **options: As for `evaluate`.

        Collective: every rank calls it.
        """
        self._stepper.settle_before_reading()
        plan = EvalPlan.of(data, self._prepared.micro_batch, self._prepared.seed, options, self._stepper.shards_weights)
        return predict(self._session, model, function, plan)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the full model state by name; with several models, names start with the model's.

        Collective under zero3: every rank calls it.
        """
        self._stepper.settle_before_reading()
        with self.whole():
            state = {name: value.detach() for name, value in self._prepared.live_state().items()}
            # What is on loan goes back.
            return {name: value.clone() for name, value in state.items()} if self._stepper.shards_weights else state

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Inside, every rank has all weights: for what runs on one rank only, or looks at parameters.

        Collective under zero3, where each rank holds a part; other strategies do nothing here.
        """
        return self._prepared.whole()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Under zero3, a model that is made inside lies in mapped files, so it need not fit; its bits are the same.

        Recipes are built so.
        """
        return Mapped(self._prepared.folder) if self._prepared.shards_weights else contextlib.nullcontext()

    def weights_digest(self) -> str:
        """Returns the digest of `state()`, without its memory: equal on every rank, and for every number of ranks."""
        self._stepper.settle_before_reading()
        with self._prepared.streaming() as fetch:
            return digest_of(self._prepared.live_state(), fetch)
