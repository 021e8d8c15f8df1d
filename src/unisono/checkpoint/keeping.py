"""Keeping: when checkpoints are made, and which ones stay."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from unisono.checkpoint.format import STATE
from unisono.checkpoint.storage import Storage
from unisono.errors import InputError, require_positive_int
from unisono.execution import Execution

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SavePlan:
    """When checkpoints are made, and which ones stay.

    Attributes:
        every_steps: Steps between two, or None.
        every_s: Seconds between two, or None.
        keep: How many of the newest stay, or None for all.
        best: (metric, whether more is better) of one more that stays, or None.
    """

    every_steps: int | None = None
    every_s: float | None = None
    keep: int | None = None
    best: tuple[str, bool] | None = None

    @classmethod
    def of(cls, how: Execution) -> SavePlan:
        """Reads what the user said.

        Raises:
            InputError: it makes no sense.
        """
        steps, seconds = None, None
        if how.checkpoint_every is not None:
            found = re.fullmatch(r"(\d+)([smh]?)", str(how.checkpoint_every).strip())
            if not found or int(found[1]) == 0:
                raise InputError(
                    f"checkpoint_every '{how.checkpoint_every}' is neither a number of steps nor a time (30s, 10m, 1h)"
                )
            steps = None if found[2] else int(found[1])
            seconds = int(found[1]) * _UNITS[found[2]] if found[2] else None
        if how.snapshot_every is not None:
            require_positive_int(how.snapshot_every, "snapshot_every")
        if how.keep is not None:
            require_positive_int(how.keep, "keep")
        best = None
        if how.keep_best is not None:
            name, _, kind = how.keep_best.rpartition(":")
            if not name or kind not in ("max", "min"):
                raise InputError(f"keep_best '{how.keep_best}' is neither METRIC:max nor METRIC:min")
            best = (name, kind == "max")
        return cls(steps, seconds, how.keep, best)


def remove_partial(storage: Storage) -> None:
    """Removes what a killed run has left of checkpoints that were not whole."""
    for name in storage.list():
        if name.startswith(".step-"):
            storage.remove(name)


def prune(storage: Storage, plan: SavePlan) -> None:
    """Removes checkpoints that are not to stay."""
    if plan.keep is None:
        return
    names = sorted(name for name in storage.list() if name.startswith("step-"))
    staying = set(names[-plan.keep :])
    if plan.best is not None:
        scores = [(score, name) for name in names if (score := _score(storage, name, *plan.best)) is not None]
        staying.update(max(scores)[1:] if scores else ())
    for name in names:
        if name not in staying:
            storage.remove(name)


def _score(storage: Storage, name: str, metric: str, more: bool) -> float | None:
    """A checkpoint's metric, so that more is better; None where it has none, or is not whole."""
    try:
        value = float(json.loads(storage.get(f"{name}/{STATE}") or b"")["ledger"]["metrics"][metric])
    except (ValueError, KeyError, TypeError):
        return None
    return value if more else -value
