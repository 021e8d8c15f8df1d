"""Copying between object stores and disks: many pieces at once, begun again where it stopped, and checked.

Each file appears under its name in one step, when all of it is there and has been read back. Memory is bounded by one
piece a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from unisono.errors import InputError, UnisonoError

PIECE_BYTES = 8 * 1024 * 1024
_RECORD = ".unisono-stage.json"


class StageError(UnisonoError):
    """Data could not be copied; what was copied is kept, and the same call goes on from there."""


@dataclass(frozen=True)
class Source:
    """One file to be copied.

    Attributes:
        path: In its file system.
        name: Relative to what was named, with "/" between folders.
        size: In bytes.
        mark: What changes when the file does: its ETag, or the time of its last change. Empty where nothing is known.
        md5: Of its content, where the store tells.
    """

    path: str
    name: str
    size: int
    mark: str
    md5: str | None

    def said(self) -> list[Any]:
        """What tells it from another version of itself, as JSON has it."""
        return [self.size, self.mark]


@dataclass(frozen=True)
class StageReport:
    """What was done.

    Attributes:
        files: All that are there now.
        bytes: Of these.
        copied_files: Of these, what was copied now.
        copied_bytes: Of these.
        seconds: It took.
    """

    files: int
    bytes: int
    copied_files: int
    copied_bytes: int
    seconds: float


@dataclass(frozen=True)
class StageOptions:
    """How it is done.

    Attributes:
        workers: Pieces under way at once.
        retries: How often a piece that failed is tried again, after 0.2, 0.4, 0.8, ... seconds and a bit.
        on_progress: Called with (bytes there, bytes in all).
        piece_bytes: The unit of reading.
    """

    workers: int = 8
    retries: int = 5
    on_progress: Callable[[int, int], None] = lambda done, total: None
    piece_bytes: int = PIECE_BYTES


def stage(source: str, target: str, *, workers: int = 8, **options: Any) -> StageReport:
    """Copies a file, or all files of a folder, from anywhere to anywhere that fsspec knows.

    Args:
        source: A path, or a URL such as s3://bucket/data, gs://, https://, memory://.
        target: A folder, likewise; made if need be. What is whole there already is not copied again.
        workers: Pieces under way at once.
        **options: Further fields of `StageOptions`.

    Several processes call `run.stage` instead: one of each host copies, and the others wait.

    Raises:
        InputError: there is nothing to copy, or no such kind of store (its package may be missing).
        StageError: a file could not be copied, or is not what the source says. The same call goes on from there.
    """
    started = time.monotonic()
    how = StageOptions(workers=workers, **options)
    (from_fs, from_path), (to_fs, to_path) = _open(source), _open(target)
    sources = list(_sources(from_fs, from_path, source))
    reader = _Reader(from_fs, how)
    place: _Disk | _Store = _Disk(Path(to_path)) if isinstance(to_fs, LocalFileSystem) else _Store(to_fs, to_path)
    todo = [one for one in sources if not place.has(one)]
    copied = sum(one.size for one in todo)
    total = sum(one.size for one in sources)
    progress = _Progress(total - copied, total, how.on_progress)
    place.prepare(copied)
    _run(how.workers, [task for one in todo for task in place.tasks(one, reader, progress)])
    return StageReport(len(sources), total, len(todo), copied, time.monotonic() - started)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{url} cannot be opened: {error}") from None
    return fs, str(path)


def _sources(fs: AbstractFileSystem, path: str, url: str) -> Iterator[Source]:
    try:
        info = fs.info(path)
        found = {path: info} if info["type"] == "file" else fs.find(path, detail=True)
    except FileNotFoundError:
        found = {}
    except Exception as error:
        raise InputError(f"{url} cannot be listed: {type(error).__name__}: {error}") from None
    if not found:
        raise InputError(f"there is nothing to copy at {url}")
    for name, info in sorted(found.items()):
        own = name.removeprefix(path).lstrip("/") or name.rpartition("/")[2]
        if own.rpartition("/")[2] == _RECORD:
            continue
        tag = str(info.get("ETag") or info.get("etag") or "").strip('"')
        mark = tag or str(info.get("mtime") or info.get("LastModified") or info.get("updated") or "")
        md5 = tag if len(tag) == 32 and "-" not in tag and all(c in "0123456789abcdef" for c in tag) else None
        if info.get("size") is None:
            raise InputError(f"{name} does not say how long it is, so nobody could say whether all of it came")
        yield Source(name, own, int(info["size"]), mark, md5)


@dataclass
class _Progress:
    done: int
    total: int
    on_progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.add(0)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            self.on_progress(self.done, self.total)


@dataclass(frozen=True)
class _Reader:
    """Reads pieces; tries again where that may help."""

    fs: AbstractFileSystem
    how: StageOptions

    def pieces(self, source: Source) -> list[range]:
        size = self.how.piece_bytes
        return [range(start, min(start + size, source.size)) for start in range(0, source.size, size)] or [range(0)]

    def read(self, source: Source, piece: range) -> bytes:
        """Returns a piece of a file.

        Raises:
            StageError: it cannot be read, or is shorter than the list of files said.
        """
        for attempt in range(self.how.retries + 1):
            try:
                data = bytes(self.fs.cat_file(source.path, start=piece.start, end=piece.stop)) if piece else b""
                if len(data) != len(piece):
                    raise OSError(f"{len(data)} of {len(piece)} bytes came from byte {piece.start} on")
                return data
            except Exception as error:
                if attempt == self.how.retries or isinstance(error, FileNotFoundError | PermissionError):
                    raise StageError(f"{source.path} cannot be read: {type(error).__name__}: {error}") from error
                time.sleep(0.2 * 2**attempt * random.uniform(0.8, 1.2))
        raise AssertionError("unreachable")


def _run(workers: int, tasks: Sequence[Callable[[], None]]) -> None:
    """Runs tasks in threads; the first error ends all."""
    with ThreadPoolExecutor(workers, thread_name_prefix="unisono-stage") as pool:
        jobs = [pool.submit(task) for task in tasks]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
            for job in (job for job in jobs if job.done()):
                job.result()
        except OSError as error:
            raise StageError(f"the target cannot be written: {error.strerror or error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


class _Disk:
    """A folder on a disk: files are written piece by piece beside their place, read back, and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._record = _read_json(folder / _RECORD)

    def has(self, source: Source) -> bool:
        path = self._folder / source.name
        return path.is_file() and path.stat().st_size == source.size and self._record.get(source.name) == source.said()

    def prepare(self, num_bytes: int) -> None:
        """Checks that there is room.

        Raises:
            StageError: there is not.
        """
        there = next(folder for folder in (self._folder, *self._folder.absolute().parents) if folder.is_dir())
        if (free := shutil.disk_usage(there).free) < num_bytes:
            raise StageError(f"{self._folder} has room for {free:,} bytes, and {num_bytes:,} are to be copied")

    def tasks(self, source: Source, reader: _Reader, progress: _Progress) -> Iterator[Callable[[], None]]:
        file, pieces = _Partial(self._folder / source.name, source, reader.how.piece_bytes), reader.pieces(source)
        there = file.checksums.keys() & set(range(len(pieces) - 1))  # the last one again, so that someone finishes
        progress.add(sum(len(pieces[number]) for number in there))
        file.left = len(pieces) - len(there)

        def copy(number: int) -> None:
            file.put(number, pieces[number], reader.read(source, pieces[number]))
            progress.add(len(pieces[number]))
            if file.ends():
                file.finish(pieces)
                with self._lock:
                    self._record[source.name] = source.said()
                    _write_json(self._folder / _RECORD, self._record)

        return (partial(copy, number) for number in range(len(pieces)) if number not in there)


class _Partial:
    """A file on its way, with a note beside it of the pieces that are there.

    Attributes:
        checksums: CRC-32 of each piece that is there.
        left: Pieces to come.
    """

    def __init__(self, path: Path, source: Source, piece_bytes: int) -> None:
        self._path, self._source, self._lock = path, source, threading.Lock()
        self._partial = path.with_name(f".{path.name}.partial")
        self._note = path.with_name(f".{path.name}.partial.json")
        self._of = [source.said(), piece_bytes]
        self.left = 0
        note = _read_json(self._note)
        found = note["pieces"] if note.get("of") == self._of and self._partial.exists() else {}
        self.checksums = {int(number): crc for number, crc in found.items()}

    def put(self, number: int, piece: range, data: bytes) -> None:
        """Writes a piece."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            view, offset = memoryview(data), piece.start
            while view:
                written = os.pwrite(handle, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(handle)
        with self._lock:
            self.checksums[number] = zlib.crc32(data)
            _write_json(self._note, {"of": self._of, "pieces": self.checksums})

    def ends(self) -> bool:
        """Counts a piece; says whether it was the last."""
        with self._lock:
            self.left -= 1
            return self.left == 0

    def finish(self, pieces: Sequence[range]) -> None:
        """Reads the file back, and gives it its name.

        Raises:
            StageError: it is not what was read, or not what the source says that it holds.
        """
        md5 = hashlib.md5(usedforsecurity=False)
        with self._partial.open("r+b") as file:
            file.truncate(self._source.size)
            os.fsync(file.fileno())
            for number, piece in enumerate(pieces):
                data = file.read(len(piece))
                md5.update(data)
                if zlib.crc32(data) != self.checksums[number]:
                    self._forget()
                    raise StageError(f"{self._partial} does not hold what was written to it: is the disk failing?")
        if self._source.md5 not in (None, md5.hexdigest()):
            self._forget()
            raise StageError(f"{self._source.path} came with another checksum than its store says: copy it again")
        self._partial.replace(self._path)
        self._note.unlink(missing_ok=True)

    def _forget(self) -> None:
        self._note.unlink(missing_ok=True)


class _Store:
    """A folder of an object store: a file appears when all of it was sent."""

    def __init__(self, fs: AbstractFileSystem, folder: str) -> None:
        self._fs, self._folder, self._lock = fs, folder.rstrip("/"), threading.Lock()
        try:
            self._record = json.loads(fs.cat_file(self._at(_RECORD)))
        except (OSError, ValueError):
            self._record = {}

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def has(self, source: Source) -> bool:
        if self._record.get(source.name) != source.said():
            return False
        with contextlib.suppress(FileNotFoundError):
            return bool(self._fs.info(self._at(source.name))["size"] == source.size)
        return False

    def prepare(self, num_bytes: int) -> None:
        """There is room."""

    def tasks(self, source: Source, reader: _Reader, progress: _Progress) -> Iterator[Callable[[], None]]:
        def copy() -> None:
            path = self._at(source.name)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            sent = 0
            for attempt in range(reader.how.retries + 1):
                try:
                    with self._fs.open(path, "wb", block_size=max(reader.how.piece_bytes, 5 * 2**20)) as file:
                        for piece in reader.pieces(source):
                            file.write(reader.read(source, piece))
                            progress.add(max(0, piece.stop - sent))
                            sent = max(sent, piece.stop)
                    break
                except StageError:
                    raise
                except Exception as error:
                    if attempt == reader.how.retries:
                        raise StageError(f"{path} cannot be written: {type(error).__name__}: {error}") from error
                    time.sleep(0.2 * 2**attempt * random.uniform(0.8, 1.2))
            if (size := self._fs.info(path)["size"]) != source.size:
                raise StageError(f"{path} has {size} bytes, and {source.size} were sent")
            with self._lock:
                self._record[source.name] = source.said()
                self._fs.pipe_file(self._at(_RECORD), json.dumps(self._record).encode())

        yield copy


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)
