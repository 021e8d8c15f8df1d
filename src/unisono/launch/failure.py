"""How a rank tells the launcher why it ended: one JSON file, in the form that torch elastic also reads."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import CommError, UnisonoError

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TYPER = f"{os.sep}typer{os.sep}"  # the command line's library, between ours and the user's


@dataclass(frozen=True, order=True)
class Failure:
    """Why one rank ended. Sorted so that the cause comes before its consequences.

    Attributes:
        consequence: It ended because a peer did.
        time_s: When, in seconds since the epoch.
        rank: Which rank.
        exit_code: 2 where the user's input is wrong, 130 after a stop, else 1.
        message: One sentence.
        traceback: The rank's own traceback, from the user's first frame on; empty where it called `sys.exit`.
        killed: By a signal that was not our own.
    """

    consequence: bool
    time_s: float
    rank: int
    exit_code: int
    message: str
    traceback: str
    killed: bool = False


def describe(error: BaseException) -> str:
    """One sentence for a person."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, UnisonoError) else f"{type(error).__name__}: {text}"


def write_failure(path: Path, rank: int, error: BaseException) -> None:
    """Writes the record whole or not at all, before anything is torn down."""
    text = "" if error.__traceback__ is None else own_traceback(error)
    message = describe(error)
    record = {
        "message": {"message": message, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}},
        "unisono": {
            "consequence": isinstance(error, CommError),
            "time_s": time.time(),
            "rank": rank,
            "exit_code": error.exit_code if isinstance(error, UnisonoError) else 1,
            "message": message,
            "traceback": text,
        },
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    os.replace(partial, path)


def own_traceback(error: BaseException) -> str:
    """Leaves out the frames that led to the user's code; all are kept where there is none of the user's."""
    frame = error.__traceback__
    while frame and _is_on_the_way(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _is_on_the_way(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen ")) or _TYPER in file or file.endswith(f"{os.sep}unisono")


def read_failures(paths: Iterable[Path]) -> list[Failure]:
    """Returns the records that are there, the cause first; one that is no record of ours says nothing."""
    found = []
    for path in paths:
        # Elastic's own `record`, around the user's main function, writes to the same path in its own form.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(Failure(**json.loads(path.read_text())["unisono"]))
    return sorted(found)
