"""FaultStorage: a storage that fails on schedule, to test that nothing whole is ever lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unisono.checkpoint.storage import Storage, WritableFile


def disk_full() -> None:
    """Fails as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class FaultStorage:
    """See the module's docstring.

    Attributes:
        inner: Where everything goes.
        fault: Called at the moment that `at` names: it raises, or ends the process.
        at: The number of the verb, from 0; a write into a file counts as two, before it and after its first half.
        calls: Verbs so far.
    """

    inner: Storage
    fault: Callable[[], None]
    at: int
    calls: int = 0

    def _tick(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.at:
            self.fault()

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    @contextlib.contextmanager
    def writing(self, name: str, num_bytes: int) -> Iterator[WritableFile]:
        self._tick()
        with self.inner.writing(name, num_bytes) as file:
            yield _FaultFile(self, file)
            self._tick()

    def put(self, name: str, data: bytes) -> None:
        self._tick()
        self.inner.put(name, data)

    def get(self, name: str) -> bytes | None:
        return self.inner.get(name)  # how often it is asked depends on the clock

    def list(self) -> list[str]:
        return self.inner.list()

    def publish(self, partial: str, name: str) -> None:
        self._tick()
        self.inner.publish(partial, name)
        self._tick()

    def point(self, link: str, name: str) -> None:
        self._tick()
        self.inner.point(link, name)

    def remove(self, name: str) -> None:
        self._tick()
        self.inner.remove(name)


@dataclass
class _FaultFile:
    storage: FaultStorage
    inner: WritableFile

    def write(self, offset: int, data: memoryview) -> None:
        self.storage._tick()
        half = len(data) // 2
        self.inner.write(offset, data[:half])
        self.storage._tick()
        self.inner.write(offset + half, data[half:])
