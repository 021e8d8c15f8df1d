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
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def record(self, event: StepRecord | EvalRecord) -> None:
        self._file.write(json.dumps(plain(event.flat())) + "\n")

    def rewind(self, step: int) -> None:
        self._file.close()
        kept = [
            line for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True) if _is_until(line, step)
        ]
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self._path)
        self._file = self._path.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def _is_until(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):  # torn, by a kill in mid-write
        return False


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
