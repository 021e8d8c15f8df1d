"""The seam `Storage`: one suite for every implementation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from unisono.checkpoint.fault import FaultStorage
from unisono.checkpoint.storage import LocalStorage, Storage

MAKERS: dict[str, Callable[[Path], Storage]] = {
    "local": LocalStorage,
    "fault": lambda root: FaultStorage(LocalStorage(root), lambda: None, at=-1),
}


@pytest.fixture(params=MAKERS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MAKERS[request.param](tmp_path / "root")


def aligned(data: bytes, offset: int) -> memoryview:
    """The same bytes in memory, as far from a page's start as `offset` is."""
    room = np.zeros(len(data) + 8192, np.uint8)
    start = (offset - room.ctypes.data) % 4096
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room[start : start + len(data)].data


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, 1_000_003])
def test_many_write_into_one_file(storage: Storage, tmp_path: Path, size: int, align: bool) -> None:
    data = os.urandom(size)
    cuts = sorted({0, size // 7, size // 3 + 1, size})

    def write(start: int, stop: int) -> None:
        part = data[start:stop]
        with storage.writing(".step-1.x/file", size) as file:
            file.write(start, aligned(part, start) if align else memoryview(part))

    threads = [threading.Thread(target=write, args=pair) for pair in pairwise(cuts)] or [
        threading.Thread(target=write, args=(0, 0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "root" / ".step-1.x" / "file").read_bytes() == data


def test_folders_are_published_replaced_and_removed(storage: Storage, tmp_path: Path) -> None:
    assert storage.list() == []
    assert storage.get("step-1/state.json") is None
    storage.remove("step-1")
    for text in (b"one", b"two"):
        storage.put(".step-1.x/state.json", text)
        assert sorted(storage.list()) == [".step-1.x"] + ["step-1"] * (text == b"two")
        storage.publish(".step-1.x", "step-1")
        storage.point("latest", "step-1")
        assert storage.get("step-1/state.json") == storage.get("latest/state.json") == text
        assert "step-1" in storage.list() and ".step-1.x" not in storage.list()
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["latest", "step-1"]
    storage.remove("step-1/state.json")
    assert storage.get("step-1/state.json") is None
    storage.remove("step-1")
    assert "step-1" not in storage.list()


def test_there_is_room(storage: Storage) -> None:
    assert storage.free_bytes() > 0


def test_a_place_that_cannot_be_written_to_is_an_os_error(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file, where a folder should be")
    with pytest.raises(OSError, match="root"):
        storage.put("step-1/state.json", b"")
    with pytest.raises(OSError, match="root"), storage.writing("step-1/file", 10):
        pass
