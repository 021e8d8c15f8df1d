"""The records of a run: frozen, plain, and the same for every sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class StepOutcome:
    """A finished step.

    Attributes:
        step: Updates done, this one included.
        epoch: From 0.
        num_samples: Samples of the step.
        grad_norm: Reads that of the first optimizer; None if it was not stepped.
        lr: Of the first optimizer, as used in this step.
        values: Means of the logged values.
        times: Resolves to this rank's times.
        loads: Of each rank, seconds a micro-batch: waited for data, and computed.
    """

    step: int
    epoch: int
    num_samples: int
    grad_norm: Callable[[], float] | None
    lr: float
    values: dict[str, float]
    times: Callable[[], dict[str, float]]
    loads: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Counted over the run, from 1: the number of updates done.
        epoch: From 0.
        samples: Samples seen since the run began.
        loss: Weighted mean over the step's micro-batches, or None where nobody said.
        lr: Of the first parameter group.
        grad_norm: L2 norm of the whole gradient before clipping.
        times: step_s, data_s, forward_s, backward_s, reduce_s, optimizer_s on rank 0, in seconds.
        samples_per_s: Of the whole job.
        slowest_rank: Whose own work (data, forward, backward) took longest a micro-batch.
        imbalance: Its time over the mean of all: 1.0 is even.
        values: Further logged values, averaged like the loss.
    """

    step: int
    epoch: int
    samples: int
    loss: float | None
    lr: float
    grad_norm: float | None
    times: dict[str, float]
    samples_per_s: float
    slowest_rank: int = 0
    imbalance: float = 1.0
    values: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """As one JSON object."""
        record = asdict(self)
        return {**{k: v for k, v in record.items() if k not in ("times", "values")}, **self.times, **self.values}


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation.

    Attributes:
        step: Updates done before it.
        epoch: Epochs finished before it.
        metrics: Each total divided once by its count.
        eval_s: Seconds.
    """

    step: int
    epoch: int
    metrics: dict[str, float]
    eval_s: float

    def flat(self) -> dict[str, Any]:
        """As one JSON object."""
        return {"event": "eval", **asdict(self)}


class Sink(Protocol):
    """Where records go. Called on rank 0 only, between steps; it must not block."""

    def record(self, event: StepRecord | EvalRecord) -> None:
        """Takes one record."""
        ...

    def rewind(self, step: int) -> None:
        """Told that the run goes on after `step`: what it holds of later ones will come again."""
        ...

    def close(self) -> None:
        """Flushes; idempotent."""
        ...
