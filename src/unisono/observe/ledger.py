"""Ledger: what a run has to show for itself, step by step and at the end."""

from __future__ import annotations

import time
from typing import Any

from unisono.observe.events import EvalRecord, Sink, StepOutcome, StepRecord
from unisono.observe.stragglers import uneven


class Ledger:
    """Turns outcomes into records for the sinks, and keeps what the summary needs.

    Attributes:
        sinks: Where records go; empty on all ranks but 0.
        values: Means of the last step's logged values, over all ranks.
        metrics: The last evaluation's, by name.
        samples: Samples seen so far.
        extra: Further entries of the summary.
        evaluated: After which step the last evaluation was, or None.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.values: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.extra: dict[str, Any] = {}
        self.samples = 0
        self.evaluated: int | None = None
        self._first_loss: float | None = None
        self._started = time.perf_counter()

    def step(self, outcome: StepOutcome) -> None:
        """Takes a finished step."""
        self.samples += outcome.num_samples
        self.values = dict(outcome.values)
        if self._first_loss is None:
            self._first_loss = self.values.get("loss")
        if self.sinks:
            self._send(self._record(outcome))

    def _record(self, outcome: StepOutcome) -> StepRecord:
        times, values = outcome.times(), dict(outcome.values)
        slowest, imbalance = uneven(outcome.loads)
        return StepRecord(
            step=outcome.step,
            epoch=outcome.epoch,
            samples=self.samples,
            loss=values.pop("loss", None),
            lr=outcome.lr,
            grad_norm=None if outcome.grad_norm is None else outcome.grad_norm(),
            times=times,
            samples_per_s=outcome.num_samples / times["step_s"],
            slowest_rank=slowest,
            imbalance=imbalance,
            values=values,
        )

    def evaluation(self, record: EvalRecord) -> None:
        """Takes a finished evaluation."""
        self.metrics.update(record.metrics)
        self.evaluated = record.step
        self._send(record)

    def _send(self, record: StepRecord | EvalRecord) -> None:
        for sink in self.sinks:
            sink.record(record)

    def summary(self) -> dict[str, Any]:
        """Returns what is known of the whole run.

        Units: seconds since the run began, evaluation included.
        """
        wall_s = time.perf_counter() - self._started
        return {
            "samples": self.samples,
            "loss": self.values.get("loss"),
            "first_loss": self._first_loss,
            "eval": self.metrics,
            "samples_per_s": self.samples / wall_s,
            "wall_s": wall_s,
            **self.extra,
        }

    def position(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""
        return {
            "samples": self.samples,
            "first_loss": self._first_loss,
            "values": self.values,
            "metrics": self.metrics,
            "evaluated": self.evaluated,
        }

    def go_on(self, step: int, position: dict[str, Any]) -> None:
        """Goes on after a step of an earlier run; records of later steps are dropped."""
        self.samples, self._first_loss = position["samples"], position["first_loss"]
        self.values, self.metrics = dict(position["values"]), dict(position["metrics"])
        self.evaluated = position["evaluated"]
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Drops records of later steps: they will come again."""
        for sink in self.sinks:
            sink.rewind(step)

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self.sinks:
            sink.close()
