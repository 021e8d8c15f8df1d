"""Hosts on this machine: network namespaces with an address, a name and a hosts file each, on one bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def need_namespaces() -> None:
    """Skips the test where this user may not make namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2, and root to make network namespaces")
    if _run("ip", "netns", "add", name := f"probe{uuid.uuid4().hex[:6]}", check=False).returncode:
        pytest.skip("this kernel lets nobody make network namespaces")
    _run("ip", "netns", "del", name)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=30)


@dataclass(frozen=True)
class Host:
    """One of them."""

    name: str
    address: str
    space: str

    def command(self, *arguments: str) -> list[str]:
        """What runs `arguments` there, under the host's own name."""
        inside = f'hostname {self.name}; exec "$@"'
        return ["ip", "netns", "exec", self.space, "unshare", "-u", "sh", "-c", inside, "sh", *arguments]

    def sent_bytes(self) -> int:
        """Through its network interface, since it was made."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.space, "cat", path).stdout)

    def link(self, state: str) -> None:
        """Pulls its cable ("down"), or puts it back ("up")."""
        _run("ip", "-n", self.space, "link", "set", "eth0", state)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Makes hosts, and takes them away again."""
    mark = uuid.uuid4().hex[:5]
    switch = f"sw{mark}"
    found = [Host(f"n{k}", f"10.77.0.{k}", f"n{k}{mark}") for k in range(1, number + 1)]
    folders = [Path("/etc/netns") / host.space for host in found]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in found)
        for host, folder in zip(found, folders, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(names)
            _run("ip", "netns", "add", host.space)
            _run("ip", "-n", host.space, "link", "set", "lo", "up")
            port = f"p{host.name}"
            _run(
                "ip", "link", "add", "eth0", "netns", host.space, "type", "veth", "peer", "name", port, "netns", switch
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "br0")
            _run("ip", "-n", switch, "link", "set", port, "up")
            _run("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.space, "link", "set", "eth0", "up")
        yield found
    finally:
        for space in [*(host.space for host in found), switch]:
            _run("ip", "netns", "del", space, check=False)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
