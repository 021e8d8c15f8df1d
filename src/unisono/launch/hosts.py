"""Hosts: where the launchers of several hosts meet, and by which network interface."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass

from unisono.errors import InputError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Hosts:
    """How many hosts, and where they meet.

    Attributes:
        least: Hosts that are enough.
        most: Hosts that can take part.
        address: IPv4 address of the one that keeps the meeting point.
        port: Its port.
    """

    least: int
    most: int
    address: str
    port: int

    @classmethod
    def at(cls, least: int, most: int, endpoint: str) -> Hosts:
        """Reads HOST:PORT.

        Raises:
            InputError: it is none, or there is no such host.
        """
        name, _, port = endpoint.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"--rdzv {endpoint}: give HOST:PORT, one of the hosts and a free port of it")
        try:
            address = socket.gethostbyname(name)
        except OSError as error:
            raise InputError(f"--rdzv {endpoint}: no address is known for {name} ({error.strerror or error})") from None
        return cls(least, most, address, int(port))

    @property
    def keeps_it(self) -> bool:
        """Whether the meeting point is for this launcher to keep: the address is this host's and the port is free."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.address, self.port))
            except OSError:
                return False
        return True

    def own_address(self) -> str:
        """This host's address in the network of the others. A host's own name often means 127.0.0.1, this does not."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.address, self.port))  # no packet is sent
            except OSError as error:
                raise InputError(f"--rdzv {self.address}:{self.port} cannot be reached: {error.strerror}") from None
            found: str = probe.getsockname()[0]
            return found


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None where that cannot be said."""
    return next((name for name, its in addresses() if its == address), None)


def addresses() -> list[tuple[str, str]]:
    """Returns network interfaces with their IPv4 addresses; none where that cannot be said."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                said = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(said[20:24])))
    return found


def free_port() -> int:
    """A port of this host that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
