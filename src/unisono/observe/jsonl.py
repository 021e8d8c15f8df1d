"""metrics.jsonl: one JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from unisono.observe.events import EvalRecord, StepRecord


class JsonlSink:
    """Appends every record to a file, whole lines at a time, so that a killed run leaves a readable one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def record(self, event: StepRecord | EvalRecord) -> None:
        self._file.write(json.dumps(plain(event.flat())) + "\n")

    def close(self) -> None:
        self._file.close()


def plain(value: Any) -> Any:
    """Returns `value` as strict JSON has it: NaN and infinities, which JSON lacks, become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(plain(value), indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(path)
