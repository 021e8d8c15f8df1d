"""Where launchers meet: whose the address is, and what it is called here."""

from __future__ import annotations

import socket

import pytest

from unisono.errors import InputError
from unisono.launch.hosts import Hosts, interface_of


def test_the_first_launcher_with_the_address_keeps_the_meeting_point() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hosts = Hosts.at(1, 2, f"localhost:{taken.getsockname()[1]}")
        assert hosts.address == "127.0.0.1"
        assert not hosts.keeps_it
    assert hosts.keeps_it
    assert hosts.own_address() == "127.0.0.1"
    assert not Hosts(1, 2, "192.0.2.1", hosts.port).keeps_it, "the address is of another host"


def test_the_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize("endpoint", ["", "localhost", ":29500", "localhost:", "localhost:x", "localhost:0", "a:70000"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        Hosts.at(1, 2, endpoint)
