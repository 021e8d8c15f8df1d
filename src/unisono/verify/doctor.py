"""Doctor: what this machine has, what will go wrong on it, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from unisono.errors import InputError
from unisono.launch.environment import detect, tuning, usable_cores
from unisono.launch.hosts import addresses
from unisono.launch.memory import left_behind
from unisono.verify.probe import ProbeError, all_reduce, memory_bandwidth

_LEAST_FILES = 4096  # descriptors: loader workers and sockets of many ranks take hundreds each
_LEAST_SHM = 1_000_000_000  # bytes: loader workers hand batches over in /dev/shm
_UNSYNCHRONISED = 5  # ntp_adjtime's TIME_ERROR


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: It.
        found: What is there.
        advice: What to do; empty where all is well.
        wrong: Whether a run will fail, and not only be slower or need care.
    """

    what: str
    found: str
    advice: str = ""
    wrong: bool = False


def examine() -> Iterator[Finding]:
    """Looks at this machine; runs nothing. What it cannot find out it leaves out."""
    for look in (
        _versions,
        _torch,
        _place,
        _cores,
        _variables,
        _memory,
        _shared_memory,
        _left_behind,
        _files,
        _network,
        _clock,
    ):
        yield from look()


def _versions() -> Iterator[Finding]:
    found = [f"Python {platform.python_version()}"]
    for name in ("unisono", "torch", "numpy", "safetensors", "fsspec"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    yield Finding("versions", ", ".join(found))


def _torch() -> Iterator[Finding]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backends = [name for name in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(name)]
    yield Finding(
        "backends", ", ".join(backends) or "none", "" if backends else "this torch cannot run processes", not backends
    )
    yield Finding("processor", f"{platform.machine()}, torch's kernels for {torch.backends.cpu.get_cpu_capability()}")
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        count = torch.accelerator.device_count()
        yield Finding("devices", f"{count} of {accelerator.type}: {module.get_device_name(0)}")
        return
    built = torch.version.cuda or torch.version.hip
    if built and Path("/dev/nvidia0").exists():
        yield Finding(
            "devices", "none, and there is a GPU", "torch does not see it: is its driver older than torch's CUDA?", True
        )
    elif shutil.which("nvidia-smi") and not built:
        yield Finding("devices", "none: this torch is built for CPUs", "install a torch with CUDA to use the GPU")
    else:
        yield Finding("devices", "none, so training runs on the CPU")


def _place() -> Iterator[Finding]:
    try:
        place = detect()
    except InputError as error:
        yield Finding("environment", "variables of a launcher that do not fit each other", str(error), True)
        return
    alone = "one process by itself"
    said = alone if place.origin == "alone" else f"rank {place.rank} of {place.world_size}, says {place.origin}"
    yield Finding("place", said)


def _cores() -> Iterator[Finding]:
    usable, there, quota = usable_cores(), os.cpu_count() or 1, _cpu_quota()
    said = f"{usable} of {there}" if usable < there else str(there)
    if quota is not None and quota < usable:
        yield Finding(
            "cores",
            f"{said}, and a quota of {quota:g}",
            f"--nproc {max(1, int(quota))}: more ranks than the quota wait in turn",
        )
    else:
        yield Finding("cores", said)


def _cpu_quota() -> float | None:
    """What a container may use, in cores."""
    with contextlib.suppress(OSError, ValueError):
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    return None


def _variables() -> Iterator[Finding]:
    given = tuning()
    if not given:
        return
    advice = ""
    if given.get("OMP_NUM_THREADS", "1") != "1":
        advice = "OMP_NUM_THREADS is not asked: the recipe has the number of threads (init(threads=)), 1 by default"
    elif any(name.startswith("MALLOC_") for name in given):
        advice = "with MALLOC_... set, unisono does not ask the C library to keep a step's memory: slower"
    yield Finding("variables", ", ".join(f"{name}={value}" for name, value in given.items()), advice)


def _memory() -> Iterator[Finding]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kinds = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        said = f"{kinds['MemAvailable'] / 1e9:.1f} of {kinds['MemTotal'] / 1e9:.1f} GB free"
        limit = _memory_limit()
        if limit is not None and limit < kinds["MemTotal"]:
            yield Finding(
                "memory",
                f"{said}, and a limit of {limit / 1e9:.1f} GB",
                "all ranks of this host share the limit: above it the system kills one (exit -9)",
            )
        else:
            yield Finding("memory", said)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            "address space",
            f"limited to {soft / 1e9:.1f} GB",
            "ulimit -v unlimited: torch maps much more than it uses",
            True,
        )


def _memory_limit() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        said = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if said == "max" else int(said)
    return None


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        if sys.platform == "linux":
            yield Finding("/dev/shm", "missing", "loader workers need it: mount a tmpfs there, or num_workers=0", True)
        return
    space = shutil.disk_usage(folder)
    advice = ""
    if space.free < _LEAST_SHM:
        advice = (
            "gradients need none of it, but loader workers hand batches over there: docker run --shm-size=8g, or "
            "num_workers=0"
        )
    yield Finding("/dev/shm", f"{space.free / 1e9:.2f} of {space.total / 1e9:.2f} GB free", advice)


def _left_behind() -> Iterator[Finding]:
    names = [folder.name for folder in left_behind()]
    if names:
        yield Finding(
            "left behind", ", ".join(names), "of launchers that were killed; the next unisono train removes it"
        )


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _LEAST_FILES
    advice = f"ulimit -n {hard if hard < 65536 else 65536}: many loader workers need more" if few else ""
    yield Finding("open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}", advice)


def _network() -> Iterator[Finding]:
    there = addresses()
    if there:
        yield Finding("interfaces", ", ".join(f"{name} {address}" for name, address in there))
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding("host name", f"{name}, which has no address", "give --rdzv an address, not this name")
        return
    outside = [one for _, one in there if not one.startswith("127.")]
    if address.startswith("127.") and outside:
        yield Finding(
            "host name",
            f"{name} is {address} here",
            f"other hosts cannot reach that: give --rdzv {outside[0]}:PORT, and unisono takes the interface that leads "
            "there; under another launcher set GLOO_SOCKET_IFNAME",
        )
    else:
        yield Finding("host name", f"{name} is {address}")


def _clock() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).ntp_adjtime(ctypes.create_string_buffer(512))  # modes 0: only asks
        if state == _UNSYNCHRONISED:
            yield Finding(
                "clock",
                "not synchronised",
                "times in the logs of several hosts cannot be compared; weights do not depend on it",
            )
        elif state >= 0:
            yield Finding("clock", "synchronised")


def measure(on_event: Callable[[str], None] = lambda what: None) -> Iterator[Finding]:
    """Measures memory, and ranks of this host. Takes some ten seconds.

    Args:
        on_event: Told what is next.
    """
    on_event("measuring memory")
    yield Finding("memory bandwidth", f"{memory_bandwidth() / 1e9:.1f} GB/s by one core, read and written")
    ranks = max(2, min(4, usable_cores()))
    for transport in ("auto", "gloo"):
        on_event(f"measuring {ranks} ranks")
        try:
            by, large_s, small_s = all_reduce(transport, ranks)
        except ProbeError as error:
            yield Finding(f"{ranks} ranks, {transport}", "failed", str(error), True)
            continue
        said = f"all-reduce of 16 MB {1e3 * large_s:.1f} ms, of {4 * ranks} bytes {1e6 * small_s:.0f} us"
        slow = transport == "auto" and by != "shm"
        advice = (
            "ranks cannot read each other's memory here (a container without ptrace rights?): slower" if slow else ""
        )
        yield Finding(f"{ranks} ranks, {by}", said, advice)
