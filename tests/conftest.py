"""A test that leaves something behind fails, here and now.

A leak shows up otherwise as another test's strange failure, much later. Each fixture guards one thing and puts it
right after the report, so that one leak is one failure. They are cheap: no fixture imports torch, and the slow looks
happen only after a cheap one found something.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest

T = TypeVar("T")

# What is still there after this long is left behind, not on its way out.
GRACE_S = 2.0

# Set for this session, so that a descendant that lost its parent can still be told from other people's processes.
TOKEN = "PYTEST_LEAK_TOKEN"

# pytest sets the first by phase; the others are set by scikit-learn and torch when they are first imported.
VARIABLES_OF_OTHERS = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}

# Daemon threads that a library starts once for the whole process: fsspec's event loop, what looks up hosts for it, and
# tqdm's monitor.
THREADS_OF_OTHERS = {"fsspecIO", "asyncio_0", "TMonitor"}

# Helpers that Python and joblib start once and end at exit.
HELPER_PROCESSES = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"loky.backend.resource_tracker",
)

SHARED_MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Mark this session's processes; an outer session's mark stays, since we are then its process.

    Not where sessions share the tests (pytest-xdist): one must not take another's processes for its own leaks.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        del os.environ[TOKEN]
    os.environ.setdefault(TOKEN, f"{os.getpid()}-{time.time_ns()}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need an accelerator where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("needs an accelerator, and torch finds none here")


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    names -= VARIABLES_OF_OTHERS
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if names:
        _fail(f"the test changed environment variables and did not put them back: {', '.join(sorted(names))}")


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield

    def left() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread not in before and not _is_of_others(thread)}

    if threads := _still_there(left):
        _fail(f"the test left threads running: {', '.join(sorted(map(repr, threads)))}")


@pytest.fixture(autouse=True)
def _processes_end() -> Iterator[None]:
    started_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    before = _children()
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield

    def left() -> set[int]:
        children = _children() - before
        # Looking at every process of the machine takes milliseconds: only a test that had processes pays for it.
        if children or resource.getrusage(resource.RUSAGE_CHILDREN) != reaped:
            children |= _marked_since(started_s) - before
        return {pid for pid in children if _is_living(pid)}

    if pids := _still_there(left):
        commands = [f"{pid} ({_command(pid)})" for pid in sorted(pids)]
        for pid in pids:
            _kill(pid)
        _fail(f"the test left processes running, now killed: {', '.join(commands)}")


@pytest.fixture(autouse=True)
def _shared_memory_is_freed() -> Iterator[None]:
    before = _shared_names()
    yield

    def left() -> set[str]:
        return _shared_names() - before

    if _still_there(left) and (names := left() - _names_in_use_elsewhere()):
        _fail(f"the test left files in {SHARED_MEMORY}: {', '.join(sorted(names))}")


@pytest.fixture(autouse=True)
def _process_group_is_destroyed() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        _fail("the test left the default process group of torch.distributed initialised")


@pytest.fixture(autouse=True)
def _num_threads_stays() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    if after != before:
        torch.set_num_threads(before)
        _fail(f"the test changed torch.get_num_threads() from {before} to {after}")


@pytest.fixture(autouse=True)
def _generators_are_restored() -> Iterator[None]:
    """Restored, not reported: to draw from the default generators is what ordinary training code does."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    yield
    random.setstate(python_state)
    if numpy is not None:
        numpy.random.set_state(numpy_state)
    if torch is not None:
        torch.set_rng_state(torch_state)


def _fail(message: str) -> NoReturn:
    # The stack would show this file, which is not where the leak is.
    pytest.fail(message, pytrace=False)


def _still_there(look: Callable[[], set[T]]) -> set[T]:
    """Return what `look` still finds after the grace time; at once when it finds nothing."""
    if not look():
        return set()
    # An abandoned iterator or executor in a reference cycle ends what it owns when it is collected.
    gc.collect()
    deadline_s = time.monotonic() + GRACE_S
    while found := look():
        if time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)
    return set()


def _is_of_others(thread: threading.Thread) -> bool:
    # A dummy thread is a C++ thread that once called into Python; nobody can join it.
    if isinstance(thread, threading._DummyThread):
        return True
    return thread.daemon and (thread.name in THREADS_OF_OTHERS or type(thread).__name__ in THREADS_OF_OTHERS)


def _children() -> set[int]:
    """Return the children of this process, whichever of its threads started them."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, file.read_text().split()))
        except OSError:  # the thread ended meanwhile
            continue
    return found


def _marked_since(started_s: float) -> set[int]:
    """Return the processes of this session that started after `started_s`, also those that lost their parent."""
    mark = f"{TOKEN}={os.environ[TOKEN]}".encode()
    # /proc counts in whole ticks: rounded up, a process of the test's first moment would pass for an older one.
    since_ticks = int(started_s * os.sysconf("SC_CLK_TCK"))
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            started_ticks = int(_stat_fields(int(folder.name))[19])
        except (OSError, IndexError):  # not ours to read, or gone meanwhile
            continue
        if started_ticks >= since_ticks:
            found.add(int(folder.name))
    return found - {os.getpid()}


def _is_living(pid: int) -> bool:
    try:
        state = _stat_fields(pid)[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, IndexError):
        return False
    return state not in "ZX" and not any(helper in command for helper in HELPER_PROCESSES)


def _stat_fields(pid: int) -> list[str]:
    # The name, in parentheses, may itself hold spaces and parentheses: the fields start behind the last one.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "gone meanwhile"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended after all
        return


def _shared_names() -> set[str]:
    try:
        # Semaphores of multiprocessing have a name for an instant only, and no holder that /proc could tell: those
        # seen here are another program's, or are gone before anyone could miss them.
        found = {name for name in os.listdir(SHARED_MEMORY) if not name.startswith("sem.mp-")}
    except FileNotFoundError:
        return set()
    # Where sessions share the tests (pytest-xdist), a launcher's snapshots may be another session's: their own tests
    # say when they have to be gone.
    return {name for name in found if not name.startswith("unisono-")} if "PYTEST_XDIST_WORKER" in os.environ else found


def _names_in_use_elsewhere() -> set[str]:
    """Return the names in shared memory that a process outside this session holds: another program's, not a leak."""
    mark = f"{TOKEN}={os.environ[TOKEN]}".encode()
    ours = _children() | {os.getpid()}
    prefix = f"{SHARED_MEMORY}/"
    names: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) in ours:
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                continue
            held = [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
            held += [os.readlink(link) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        names.update(path.removeprefix(prefix) for path in held if path.startswith(prefix))
    return names
