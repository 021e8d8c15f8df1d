"""Surroundings: what has to be the same around all ranks, or equal recipes would give different weights.

Between ranks of one host little can differ; between hosts all of it does, sooner or later: an image that was not
pulled again, a host with an older processor, a file that was edited on one of them.
"""

from __future__ import annotations

import platform
import socket
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.comm.api import Collectives
from unisono.errors import InputError

_HINTS = {
    "torch": "install the same torch on all hosts",
    "unisono": "these are checksums of its files: install the same unisono on all hosts",
    "python": "run the same Python on all hosts",
    "device": "start ranks on devices of one kind",
    "processor": "their kernels round otherwise: set ATEN_CPU_CAPABILITY=avx2 (or default) for all ranks",
    "script": "these are checksums of it: copy the same file to all hosts",
    "recipe": "these are digests of it: copy the same recipe to all hosts, and give all the same options",
}


def surroundings(device: torch.device) -> dict[str, str]:
    """Returns what this rank sees, by name."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    return {
        "torch": torch.__version__,
        "unisono": _checksum(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "script": _checksum([script]) if script is not None and script.suffix == ".py" else "",
    }


def _checksum(files: list[Path]) -> str:
    total = 0
    for file in files:
        try:
            total = zlib.crc32(file.read_bytes(), total)
        except OSError:
            return ""
    return f"{total:08x}"


def check_same(comm: Collectives, mine: Mapping[str, Any]) -> list[str]:
    """Collective: compares what ranks have, by name; returns the hosts' names, by rank.

    Raises:
        InputError: they differ; on every rank, naming the first that differs from rank 0.
    """
    everyone = comm.gather_objects((socket.gethostname(), dict(mine)))
    (first_host, first), *_ = everyone
    for rank, (host, other) in enumerate(everyone):
        for name in first:
            if other.get(name) != first[name]:
                hint = _HINTS.get(name, "give all ranks the same")
                raise InputError(
                    f"rank {rank} ({host}) has {name} {other.get(name)}, and rank 0 ({first_host}) has {first[name]}: "
                    f"{hint}"
                )
    return [host for host, _ in everyone]
