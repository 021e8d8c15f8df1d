"""A folder in the host's memory that outlives the ranks, and not their launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/dev/shm")
_PREFIX = "unisono-"


@contextlib.contextmanager
def shared_memory_folder() -> Iterator[Path | None]:
    """Yields a name for a folder in memory, to be made when it is needed; it is gone at the end.

    What a launcher that was killed has left is removed by the next one: the name says whose it is. Yields None where
    the system has no such place.
    """
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        yield None
        return
    for folder in left_behind():
        shutil.rmtree(folder, ignore_errors=True)
    folder = _MEMORY / f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def left_behind() -> list[Path]:
    """Returns the folders of launchers that were killed."""
    found = []
    for folder in _MEMORY.glob(f"{_PREFIX}*"):
        pid, _, started = folder.name.removeprefix(_PREFIX).partition("-")
        if pid.isdigit() and started and started != _started(int(pid)):
            found.append(folder)
    return found


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the host did: ids come again, and this does not. None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
