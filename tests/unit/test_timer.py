"""The timer of a step's phases, with a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unisono.observe import timer
from unisono.observe.timer import PHASES, PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=found.perf_counter))
    return found


def test_each_phase_gets_its_time(clock: Clock) -> None:
    phases = PhaseTimer(torch.device("cpu"))
    for phase, seconds in [
        ("data", 1.0),
        ("forward", 2.0),
        ("backward", 3.0),
        (None, 10.0),  # nobody's
        ("data", 0.5),
        ("forward", 0.25),
        ("reduce", 4.0),
        ("optimizer", 5.0),
        ("reduce", 0.125),
    ]:
        phases.enter(phase)
        assert phases.phase == phase
        clock.now += seconds
    phases.enter(None)
    found = phases.take()()
    assert found == {
        "step_s": 25.875,
        "data_s": 1.5,
        "forward_s": 2.25,
        "backward_s": 3.0,
        "reduce_s": 4.125,
        "optimizer_s": 5.0,
    }


def test_a_step_begins_where_the_last_one_ended(clock: Clock) -> None:
    phases = PhaseTimer(torch.device("cpu"))
    clock.now += 100  # between the run's opening and its first batch: no step's time
    phases.enter("data")
    clock.now += 7
    phases.enter(None)
    first = phases.take()
    phases.enter("forward")
    clock.now += 2
    phases.enter(None)
    clock.now += 1
    second = phases.take()
    third = phases.take()
    # Resolved late, and each still its own.
    assert first()["step_s"] == 7
    assert second() == {"step_s": 3, "forward_s": 2, "data_s": 0, "backward_s": 0, "reduce_s": 0, "optimizer_s": 0}
    assert set(third().values()) == {0}


def test_an_evaluation_counts_for_no_step_and_no_phase(clock: Clock) -> None:
    phases = PhaseTimer(torch.device("cpu"))
    phases.enter("forward")
    clock.now += 2
    with phases.paused():
        clock.now += 50
    clock.now += 1
    phases.enter(None)
    times = phases.take()()
    assert times == {"step_s": 3, "forward_s": 3, "data_s": 0, "backward_s": 0, "reduce_s": 0, "optimizer_s": 0}


def test_the_names_are_those_of_the_records() -> None:
    assert list(PhaseTimer(torch.device("cpu")).take()()) == ["step_s", *(f"{phase}_s" for phase in PHASES)]


@pytest.mark.gpu
def test_on_a_device_phases_are_measured_in_its_stream() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    phases = PhaseTimer(device)
    matrix = torch.randn(4096, 4096, device=device)
    phases.enter("forward")
    for _ in range(20):
        matrix = matrix @ matrix / 64
    phases.enter(None)
    found = phases.take()()
    assert found["forward_s"] > 0
    assert found["data_s"] == found["backward_s"] == 0
