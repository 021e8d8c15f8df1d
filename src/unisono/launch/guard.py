"""Processes that end when their parent does, whatever ended it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent is gone; elsewhere it does nothing.

    A killed launcher cannot end its ranks, and elastic starts each in a session of its own, where not even a
    closed terminal reaches them.

    Args:
        parent: Its process id, if known: one that was gone before the request ends this process at once.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def leave_process_group() -> None:
    """Keeps signals that are meant for the parent from this process too.

    A terminal sends Ctrl-C to the whole foreground group, and elastic sends SIGTERM to a rank's whole group. A
    loader worker that died of it would end the step that its rank is still to finish.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpgid(0, 0)
