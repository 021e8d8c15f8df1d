"""Staging from and to a server that speaks S3, through a network that drops connections. `make test-stores`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="needs the packages of requirements-stores.lock: make test-stores")
pytest.importorskip("s3fs", reason="needs the packages of requirements-stores.lock: make test-stores")

import fsspec
from fsspec.config import conf

from unisono.data import stage as module
from unisono.data.stage import StageError, stage

pytestmark = pytest.mark.filterwarnings("default")  # of botocore and aiohttp, which are not ours


class Proxy:
    """Passes bytes on; cuts the connections that `cuts` names, after so many bytes of the answer."""

    def __init__(self, port: int) -> None:
        self._to, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port, self.cuts, self.cut = self._listener.getsockname()[1], list[int](), 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self._sockets: list[socket.socket] = []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pass, args=pair, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and len(data) > 20_000 and self.cuts:
                    self.cut += 1
                    target.sendall(data[: self.cuts.pop(0)])
                    break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(server)
    options = {"key": "testing", "secret": "testing", "client_kwargs": {"region_name": "us-west-2"}}
    monkeypatch.setitem(
        conf, "s3", {**options, "endpoint_url": f"http://127.0.0.1:{made.port}", "skip_instance_cache": True}
    )
    sleep = time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    yield made
    made.close()


@pytest.fixture
def bucket(proxy: Proxy) -> dict[str, bytes]:
    """A bucket of its own, with objects of several sizes; one was sent in parts, so its ETag is no MD5."""
    fs: Any = fsspec.filesystem("s3")
    if not fs.exists("data"):
        fs.mkdir("data")
    found = {"one.bin": os.urandom(300_000), "deep/two.bin": os.urandom(7_000_001), "empty": b""}
    for name, data in found.items():
        fs.pipe_file(f"data/set/{name}", data, chunksize=5 * 2**20)
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found[".unisono-stage.json"]
    return found


def test_down_and_up(bucket: dict[str, bytes], tmp_path: Path) -> None:
    report = stage("s3://data/set", str(tmp_path / "near"), piece_bytes=1_000_000)
    assert (report.copied_files, files_in(tmp_path / "near")) == (3, bucket)
    assert stage("s3://data/set", str(tmp_path / "near")).copied_files == 0
    assert stage(str(tmp_path / "near"), "s3://data/back").copied_files == 3
    assert stage(str(tmp_path / "near"), "s3://data/back").copied_files == 0
    stage("s3://data/back", str(tmp_path / "again"))
    assert files_in(tmp_path / "again") == bucket


def test_dropped_connections_do_not_show(proxy: Proxy, bucket: dict[str, bytes], tmp_path: Path) -> None:
    proxy.cuts = [0, 100, 15_000, 0, 19_999]
    stage("s3://data/set", str(tmp_path / "near"), piece_bytes=1_000_000)
    assert files_in(tmp_path / "near") == bucket
    assert proxy.cut == 5, "they were cut, and it did not show"


def test_a_network_that_is_gone_is_said_and_the_rest_is_kept(
    proxy: Proxy, bucket: dict[str, bytes], tmp_path: Path
) -> None:
    proxy.cuts = [0] * 10_000
    with pytest.raises(StageError, match=r"data/set/\S+ cannot be read"):
        stage("s3://data/set", str(tmp_path / "near"), piece_bytes=1_000_000, workers=2, retries=1)
    proxy.cuts = []
    stage("s3://data/set", str(tmp_path / "near"), piece_bytes=1_000_000)
    assert files_in(tmp_path / "near") == bucket


def test_a_changed_object_is_copied_again(bucket: dict[str, bytes], tmp_path: Path) -> None:
    stage("s3://data/set", str(tmp_path / "near"))
    fsspec.filesystem("s3").pipe_file("data/set/one.bin", b"x" * 300_000)
    assert stage("s3://data/set", str(tmp_path / "near")).copied_files == 1
    assert (tmp_path / "near" / "one.bin").read_bytes() == b"x" * 300_000
