"""What a person sees: plain lines in a file or a pipe, one bar on a terminal."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.observe import console
from unisono.observe.console import ConsoleSink
from unisono.observe.events import EvalRecord, StepRecord

TIMES = {"step_s": 1.0, "data_s": 0.0, "forward_s": 0.25, "backward_s": 0.5, "reduce_s": 0.25, "optimizer_s": 0.0}


def record(step: int, **changes: Any) -> StepRecord:
    fields = {
        "epoch": 3,
        "samples": 8,
        "loss": 1.25,
        "lr": 0.1,
        "grad_norm": 2.0,
        "times": TIMES,
        "samples_per_s": 1234.4,
    }
    return StepRecord(step=step, **{**fields, **changes})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test turns."""
    clock = SimpleNamespace(at=1000.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.at))
    return clock


@pytest.fixture(autouse=True)
def _a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_plain_lines_where_there_is_no_terminal(now: SimpleNamespace) -> None:
    stream, log = io.StringIO(), io.StringIO()
    sink = ConsoleSink(stream, 100, log)
    for step in range(1, 101):
        sink.record(record(step))
        now.at += 0.25
    sink.close()
    found = stream.getvalue().splitlines()
    # 25 seconds at a line every five, and the last step, which is always told.
    assert [line.split()[1] for line in found] == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]
    assert "epoch 3" in found[0]
    assert "loss 1.2500" in found[0]
    assert "1234 samples/s" in found[0]
    assert "forward 25% backward 50% reduce 25%" in found[0]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert log.getvalue() == stream.getvalue()


def test_a_step_without_a_loss_says_none(now: SimpleNamespace) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, 10)
    sink.record(record(1, loss=None))
    assert "loss" not in stream.getvalue()
    assert "samples/s" in stream.getvalue()


def test_an_evaluation_is_always_told(now: SimpleNamespace) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, 10)
    for step in (2, 4):
        sink.record(EvalRecord(step=step, epoch=0, metrics={"accuracy": 0.98765, "loss": 0.1}, eval_s=1.25))
    found = stream.getvalue().splitlines()
    assert len(found) == 2
    assert found[0].startswith("eval after step 2: accuracy 0.9877  loss 0.1000")


def test_one_bar_on_a_terminal(now: SimpleNamespace) -> None:
    stream, log = Terminal(), io.StringIO()
    sink = ConsoleSink(stream, 4, log)
    for step in range(1, 5):
        now.at += 10
        sink.record(record(step))
        if step == 2:
            sink.record(EvalRecord(step=2, epoch=0, metrics={"accuracy": 0.5}, eval_s=1.0))
    sink.close()
    sink.close()
    # What is left on the screen: each drawing of the bar erases the one before.
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(stream.getvalue().split("\r")[-2:]))
    assert screen.count("step 4/4") == 1
    assert "step 1/4" not in screen
    assert "\x1b[" in stream.getvalue()
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).count("eval after step 2: accuracy 0.5000") == 1
    # The log has whole lines whatever the screen shows.
    assert [line.split()[1] for line in log.getvalue().splitlines()] == ["1/4", "2/4", "after", "3/4", "4/4"]
    assert "\x1b" not in log.getvalue()
    # Steps are drawn in the one bar, not printed beside it.
    printed = [line for line in stream.getvalue().replace("\r", "\n").split("\n") if "samples/s" in line]
    assert all("\u2501" in line for line in printed)


def test_a_bar_that_is_never_fed_ends_too(now: SimpleNamespace) -> None:
    stream = Terminal()
    sink = ConsoleSink(stream, 4)
    sink.close()
    assert "step 0/4" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
