"""The C library's memory: what a step frees, the next step needs again.

By default glibc gives large pieces back to the system when they are freed, and the system has to clear new pages for
the next step: up to half of a plain step's time (100 M parameters: 918 ms, and 425 ms without; docs/design/0008).
Nothing of this can show in the weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h
_MOST_KEPT = 2**31 - 1  # free bytes at the heap's end; a C int
_MOST_IN_HEAP = 32 * 1024 * 1024  # the largest threshold that glibc takes


def keep_freed_memory(*, large: bool) -> bool:
    """Asks glibc to keep freed memory for this process; another C library is left alone.

    Also where the user has tuned it: by MALLOC_... or GLIBC_TUNABLES in the environment.

    Args:
        large: Also pieces of more than 32 MB. Faster still, and such pieces leave gaps: 5 to 10 % more memory at the
            peak with whole gradients, up to 50 % where weights come and go (zero3).

    Returns:
        Whether it does.
    """
    if _tuned(os.environ):
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        done = mallopt(_TRIM_THRESHOLD, _MOST_KEPT) and mallopt(_MMAP_THRESHOLD, _MOST_IN_HEAP)
        return bool(done and (not large or mallopt(_MMAP_MAX, 0)))
    return False


def _tuned(environment: Mapping[str, str]) -> bool:
    named = any(name.startswith("MALLOC_") and name.endswith("_") for name in environment)
    return named or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
