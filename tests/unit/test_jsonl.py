"""metrics.jsonl and JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pytest

from unisono.observe.events import EvalRecord, StepRecord
from unisono.observe.jsonl import JsonlSink, plain, write_json

TIMES = {f"{name}_s": 0.5 for name in ("step", "data", "forward", "backward", "reduce", "optimizer")}


def record(step: int, **changes: Any) -> StepRecord:
    fields = {
        "epoch": 0,
        "samples": 8,
        "loss": 1.25,
        "lr": 0.1,
        "grad_norm": 2.0,
        "times": TIMES,
        "samples_per_s": 16.0,
    }
    return StepRecord(step=step, **{**fields, **changes})


def refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_record_is_a_line_with_the_documented_fields(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.record(record(1, values={"accuracy": 0.5}))
    # On disk at once: a killed run leaves what it had.
    (found,) = lines(tmp_path / "metrics.jsonl")
    assert found == {
        "step": 1,
        "epoch": 0,
        "samples": 8,
        "loss": 1.25,
        "lr": 0.1,
        "grad_norm": 2.0,
        "step_s": 0.5,
        "data_s": 0.5,
        "forward_s": 0.5,
        "backward_s": 0.5,
        "reduce_s": 0.5,
        "optimizer_s": 0.5,
        "samples_per_s": 16.0,
        "slowest_rank": 0,
        "imbalance": 1.0,
        "accuracy": 0.5,
    }
    sink.record(EvalRecord(step=1, epoch=0, metrics={"accuracy": 0.75, "größe": 1.0}, eval_s=0.1))
    sink.close()
    sink.close()
    assert lines(tmp_path / "metrics.jsonl")[1] == {
        "event": "eval",
        "step": 1,
        "epoch": 0,
        "metrics": {"accuracy": 0.75, "größe": 1.0},
        "eval_s": 0.1,
    }


def test_a_second_sink_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.record(record(step))
        sink.close()
    assert [found["step"] for found in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_what_json_has_no_word_for_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.record(record(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, values={"x": math.nan}))
    sink.record(record(2, loss=None, grad_norm=None))
    sink.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert [first[name] for name in ("loss", "grad_norm", "lr", "x")] == [None] * 4
    assert second["loss"] is second["grad_norm"] is None
    assert plain({"a": [1.0, math.nan, ("x", math.inf)], "b": True}) == {"a": [1.0, None, ["x", None]], "b": True}


def test_a_json_file_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"loss": math.nan, "path": tmp_path, "n": 3})
    assert json.loads(path.read_text(), parse_constant=refuse) == {"loss": None, "path": str(tmp_path), "n": 3}
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {(1, 2): "a key that JSON cannot have"})
    assert path.read_bytes() == before
    with monkeypatch.context() as patch:  # killed when all is written, but for the last call
        patch.delattr(Path, "replace")
        with pytest.raises(AttributeError):
            write_json(path, {"n": 5})
    assert path.read_bytes() == before
    write_json(path, {"n": 4})
    assert json.loads(path.read_text()) == {"n": 4}
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]
