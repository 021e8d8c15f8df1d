"""PhaseTimer: where a step's time goes, without stalling the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

PHASES = ("data", "forward", "backward", "reduce", "optimizer")


class PhaseTimer:
    """Adds up the time of each phase of a step.

    On a CPU the clock is read at each change of phase. On an accelerator an event is recorded in the stream
    instead and read one step later, when it has long happened; only the wait for data is the host's time.

    Args:
        device: Where the model runs.

    Attributes:
        phase: The present one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type != "cpu"
        self._device = device
        self.phase: str | None = None
        self._since = 0.0
        self._mark: torch.Event | None = None
        self._host = dict.fromkeys(PHASES, 0.0)
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []
        self._step_started: float | None = None
        self._last: dict[str, float] = {}

    def enter(self, phase: str | None) -> None:
        """Ends the present phase and starts another; None is time that belongs to nobody."""
        now = time.perf_counter()
        if self._step_started is None:
            self._step_started = now  # the first step begins here, not where the run was opened
        if self.phase is not None and (not self._events or self.phase == "data"):
            self._host[self.phase] += now - self._since
        if self._events:
            mark = torch.Event(self._device, enable_timing=True)
            mark.record()
            if self.phase not in (None, "data") and self._mark is not None:
                self._spans.append((self.phase or "", self._mark, mark))
            self._mark = mark
        self.phase, self._since = phase, now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside, an evaluation say, counts for no phase and no step."""
        started, phase, in_step = time.perf_counter(), self.phase, self._step_started is not None
        self.enter(None)
        try:
            yield
        finally:
            self.enter(phase)
            if in_step and self._step_started is not None:
                self._step_started += time.perf_counter() - started
            else:
                self._step_started = None

    def own_work(self) -> tuple[float, float]:
        """What this rank has done by itself in the present step: waited for data, and computed.

        Units: seconds. On an accelerator the second is that of the last step whose times were read.
        """
        own = self._last if self._events else self._host
        return self._host["data"], own.get("forward", 0.0) + own.get("backward", 0.0)

    def take(self) -> Callable[[], dict[str, float]]:
        """Ends a step; the function it returns gives {"step_s", "data_s", ...}.

        Units: seconds.
        """
        now = time.perf_counter()
        step_s, self._step_started = now - (now if self._step_started is None else self._step_started), now
        host, self._host = self._host, dict.fromkeys(PHASES, 0.0)
        spans, self._spans = self._spans, []

        def resolve() -> dict[str, float]:
            for phase, start, stop in spans:
                stop.synchronize()
                host[phase] += start.elapsed_time(stop) / 1e3
            self._last = host
            return {"step_s": step_s, **{f"{phase}_s": seconds for phase, seconds in host.items()}}

        return resolve
