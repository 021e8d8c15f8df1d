"""Processes that end when their parent does, whatever ended it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent is gone; elsewhere it does nothing.

    A killed launcher cannot end its ranks, and elastic starts each in a session of its own, where not even a
    closed terminal reaches them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
