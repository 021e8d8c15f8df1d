"""Staging: whole, checked, begun again where it stopped, and clear about what went wrong."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.commands import InProcess
from unisono.data import stage as module
from unisono.data.stage import StageError, stage
from unisono.errors import InputError

FILES = {"one.bin": 300_000, "deep/er/two.bin": 100_001, "empty": 0, "small.txt": 5}


@pytest.fixture
def contents() -> dict[str, bytes]:
    return {name: os.urandom(size) for name, size in FILES.items()}


@pytest.fixture
def near(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "source"


@pytest.fixture
def memory(contents: dict[str, bytes]) -> Any:
    """The same in fsspec's store in memory."""
    fs = fsspec.filesystem("memory")
    for name, data in contents.items():
        fs.pipe_file(f"/bucket/{name}", data)
    yield fs
    fs.rm("/bucket", recursive=True)


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert json.loads(found.pop(".unisono-stage.json"))
    return found


@pytest.mark.parametrize("kind", ["near", "memory"])
@pytest.mark.parametrize("piece_bytes", [7_000, 8_000_000])
@pytest.mark.parametrize("workers", [1, 8])
def test_a_folder_is_copied_once(
    near: Path, memory: Any, tmp_path: Path, contents: dict[str, bytes], kind: str, piece_bytes: int, workers: int
) -> None:
    source = str(near) if kind == "near" else "memory://bucket"
    seen: list[tuple[int, int]] = []
    options = {"workers": workers, "piece_bytes": piece_bytes, "on_progress": lambda *now: seen.append(now)}
    report = stage(source, str(tmp_path / "target"), **options)
    assert files_in(tmp_path / "target") == contents
    total = sum(FILES.values())
    assert (report.files, report.bytes, report.copied_files, report.copied_bytes) == (4, total, 4, total)
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert seen == sorted(seen)
    again = stage(source, str(tmp_path / "target"), **options)
    assert (again.files, again.copied_files, again.copied_bytes) == (4, 0, 0)
    assert threading.active_count() == len([t for t in threading.enumerate() if "unisono-stage" not in t.name])


def test_what_changed_is_copied_again(near: Path, tmp_path: Path) -> None:
    stage(str(near), str(tmp_path / "target"))
    (near / "small.txt").write_bytes(b"other")
    os.utime(near / "small.txt", (1, 1))
    (near / "new").write_bytes(b"new")
    report = stage(str(near), str(tmp_path / "target"))
    assert report.copied_files == 2
    assert (tmp_path / "target" / "small.txt").read_bytes() == b"other"
    (tmp_path / "target" / "one.bin").unlink()
    assert stage(str(near), str(tmp_path / "target")).copied_files == 1, "what is gone comes back"


def test_one_file(near: Path, tmp_path: Path, contents: dict[str, bytes]) -> None:
    stage(str(near / "one.bin"), str(tmp_path / "target"))
    assert files_in(tmp_path / "target") == {"one.bin": contents["one.bin"]}


def test_to_a_store_and_back(near: Path, tmp_path: Path, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("memory")
    report = stage(str(near), "memory://there/data", piece_bytes=7_000)
    assert report.copied_files == 4
    assert stage(str(near), "memory://there/data").copied_files == 0
    stage("memory://there/data", str(tmp_path / "back"))
    assert files_in(tmp_path / "back") == contents
    fs.rm("/there", recursive=True)


class Flaky(MemoryFileSystem):
    """Fails on schedule."""

    protocol = "flaky"
    cachable = False
    plan: list[Any] = []  # noqa: RUF012
    reads: list[tuple[str, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("flaky://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        Flaky.reads.append((path, start))
        data = super().cat_file(path, start=start, end=end, **kwargs)
        what = Flaky.plan.pop(0) if Flaky.plan else None
        if isinstance(what, Exception):
            raise what
        return data if what is None else data[:what]


@pytest.fixture
def flaky(memory: Any, monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.plan, Flaky.reads = [], []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return Flaky


def test_dropped_connections_and_short_answers_are_tried_again(
    flaky: type[Flaky], tmp_path: Path, contents: dict[str, bytes]
) -> None:
    flaky.plan = [ConnectionResetError("gone"), 10, TimeoutError(), None, 0, ConnectionResetError("gone")]
    stage("flaky://bucket", str(tmp_path / "target"), piece_bytes=50_000)
    assert files_in(tmp_path / "target") == contents


def test_a_truncated_object_is_named_and_the_rest_is_kept(
    flaky: type[Flaky], tmp_path: Path, contents: dict[str, bytes]
) -> None:
    flaky.plan = [None] * 4 + [ConnectionResetError("gone")] * 100
    with pytest.raises(StageError, match=r"bucket/\S+ cannot be read: ConnectionResetError: gone"):
        stage("flaky://bucket", str(tmp_path / "target"), piece_bytes=50_000, workers=1, retries=2)
    flaky.plan, before = [], len(flaky.reads)
    report = stage("flaky://bucket", str(tmp_path / "target"), piece_bytes=50_000, workers=1)
    assert files_in(tmp_path / "target") == contents
    assert report.files == 4
    assert len(flaky.reads) - before <= 9 - 3, "pieces that were there are not read again"
    assert not list((tmp_path / "target").rglob("*.partial*"))


def test_a_checksum_of_the_store_is_compared(
    near: Path, tmp_path: Path, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = {name: hashlib.md5(data, usedforsecurity=False).hexdigest() for name, data in contents.items()}
    find = fsspec.implementations.local.LocalFileSystem.find

    def with_tags(self: Any, path: str, **options: Any) -> Any:
        found = find(self, path, **options)
        return {p: {**info, "ETag": f'"{truth[p.split("source/")[1]]}"'} for p, info in found.items()}

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "find", with_tags)
    stage(str(near), str(tmp_path / "target"), piece_bytes=7_000)
    truth["one.bin"] = "0" * 32
    with pytest.raises(StageError, match=r"one\.bin came with another checksum than its store says"):
        stage(str(near), str(tmp_path / "other"), piece_bytes=7_000)
    assert not (tmp_path / "other" / "one.bin").exists()


def test_no_room_is_said_before_the_first_byte(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StageError, match="has room for 1,000 bytes, and 400,006 are to be copied"):
        stage(str(near), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_a_full_disk_is_said(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(StageError, match="the target cannot be written: No space left on device"):
        stage(str(near), str(tmp_path / "target"))


@pytest.mark.parametrize(
    ("source", "says"),
    [("nothing", "nothing to copy at"), ("nosuch://it", "cannot be opened"), ("memory://none", "nothing to copy at")],
)
def test_what_is_not_there_is_input(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        stage(source if "://" in source else str(tmp_path / source), str(tmp_path / "target"))


def test_the_command(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    command = InProcess(monkeypatch, capfd, tmp_path)
    done = command("stage", "source", "target")
    assert done.code == 0
    assert done.out.startswith("4 files, 400,006 bytes in target; copied now: 4 files, 400,006 bytes")
    assert json.loads(command("stage", "source", "target", "--json").out)["copied_files"] == 0
    assert command("stage", "nothing", "target").code == 2
    assert "--workers 0" in command("stage", "source", "target", "--workers", "0").err
