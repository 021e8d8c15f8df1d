"""Freed memory stays with the process, unless the user has said how to go about it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, torch
from unisono.launch.allocator import keep_freed_memory
kept = keep_freed_memory(large=True) if sys.argv[1] == "keep" else None
def touch():
    for _ in range(5):
        step = [torch.full((10_000_000,), 1.0) for _ in range(3)]
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
touch()
before = touch()
print(kept, touch() - before)
"""


def _faults(*words: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, *words], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")
def test_what_is_freed_is_used_again() -> None:
    kept, faults = _faults("keep")
    assert kept == "True"
    pages = 5 * 3 * 40_000_000 // 4096  # more than 32 MB each: always given back, if nothing is said
    assert faults < pages / 10
    assert _faults("leave")[1] > pages / 2


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.perturb=0")]
)
def test_what_the_user_has_tuned_stays(name: str, value: str) -> None:
    assert _faults("keep", **{name: value})[0] == "False"
