"""What a person sees while a run goes on: one progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unisono.observe.events import EvalRecord, StepRecord
from unisono.observe.timer import PHASES

_LINE_EVERY_S = 5.0


class ConsoleSink:
    """A progress bar on a terminal; otherwise a line every few seconds. Plain lines also go to `log`.

    Args:
        stream: Where to: standard error.
        num_steps: Steps that the run is to have.
        log: A file for the plain lines, or None.
    """

    def __init__(self, stream: TextIO, num_steps: int, log: TextIO | None = None) -> None:
        self._console = Console(file=stream)
        self._num_steps, self._log = num_steps, log
        self._last: StepRecord | None = None
        self._line_due = 0.0
        self._shares = dict.fromkeys(PHASES, 0.0)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[now]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                refresh_per_second=4,
                transient=False,
            )
            self._task = self._progress.add_task("", total=num_steps, now="starting")
            self._progress.start()

    def record(self, event: StepRecord | EvalRecord) -> None:
        if isinstance(event, EvalRecord):
            found = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            self._line(f"eval after step {event.step}: {found} ({event.eval_s:.1f} s)")
            return
        self._last = event
        for phase in PHASES:
            # A running mean: single steps jump too much to be read.
            self._shares[phase] = 0.9 * self._shares[phase] + 0.1 * event.times[f"{phase}_s"]
        if self._progress is not None:
            self._progress.update(self._task, completed=event.step, now=self._now(event))
        now = time.monotonic()
        if now >= self._line_due or event.step == self._num_steps:
            self._line_due = now + _LINE_EVERY_S
            self._line(f"step {event.step}/{self._num_steps}  {self._now(event)}", bar=True)

    def _now(self, event: StepRecord) -> str:
        loss = "" if event.loss is None else f"loss {event.loss:.4f}  "
        return f"epoch {event.epoch}  {loss}{event.samples_per_s:.0f} samples/s  {self._where()}"

    def _where(self) -> str:
        total = sum(self._shares.values()) or 1.0
        parts = [f"{phase} {100 * seconds / total:.0f}%" for phase, seconds in self._shares.items()]
        return " ".join(parts)

    def _line(self, text: str, bar: bool = False) -> None:
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()
        if self._progress is None:
            self._console.file.write(text + "\n")
            self._console.file.flush()
        elif not bar:
            self._progress.console.print(text, highlight=False)

    def rewind(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
