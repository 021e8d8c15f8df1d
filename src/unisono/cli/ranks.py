"""What every rank's process does around its work: logs, and a word to the launcher when it fails."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from unisono.errors import InputError, Interrupted, UnisonoError
from unisono.launch.environment import Place
from unisono.launch.failure import write_failure


class Tee:
    """A text stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(folder: Path | None, rank: int) -> Iterator[TextIO | None]:
    """Sends what rank 0 prints to the terminal and its log, what other ranks print to theirs alone."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.log").open("a", buffering=1, encoding="utf-8") as log:
        before = sys.stdout, sys.stderr
        if rank:
            # Descriptors, so that what native libraries print goes there too.
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        else:
            sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
        try:
            yield log
        except Interrupted:
            raise
        except Exception:
            traceback.print_exc(file=log)
            raise
        finally:
            sys.stdout, sys.stderr = before


@contextlib.contextmanager
def reported(place: Place) -> Iterator[None]:
    """Leaves word of an error for the launcher before anything is torn down, then ends the process.

    The launcher shows the traceback of the rank that failed first; shown here too, another rank's would come before.
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            kind = InputError if error.code == InputError.exit_code else UnisonoError  # argparse exits with 2 as well
            _report(place, kind(f"the script called sys.exit({error.code!r})"))
            sys.last_value = error  # so that what runs at exit knows
        raise
    except BaseException as error:
        if not _report(place, error):
            traceback.print_exc()
        sys.last_value = error
        sys.exit(error.exit_code if isinstance(error, UnisonoError) else 1)


def _report(place: Place, error: BaseException) -> bool:
    try:
        write_failure(Path(place.job["error_dir"]) / f"rank-{place.local_rank}.error.json", place.rank, error)
    except (OSError, KeyError):  # the launcher is gone, or is not ours
        return False
    return True
