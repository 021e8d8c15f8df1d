"""A run's folder belongs to one run at a time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from unisono.errors import InputError


class FolderLock:
    """Held until `release`, or until this process and what it has forked are gone; no file is left behind.

    Where the file system knows no such locks, nothing is locked.

    Args:
        folder: The run's.
        timeout_s: How long to wait: processes of a run before, that were killed, may take a moment to go.

    Raises:
        InputError: another run has it.
    """

    def __init__(self, folder: Path, timeout_s: float = 10.0) -> None:
        self._file: int | None = None
        if sys.platform == "win32":
            return
        import fcntl

        file, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                os.close(file)
                raise InputError(
                    f"run folder {folder} is in use by another run: wait for its end, or choose another"
                ) from None
            except OSError:
                os.close(file)
                return
            self._file = file
            return

    def release(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
