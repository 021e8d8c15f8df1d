"""Writer: this rank's part of checkpoints, written behind the training; rank 0 publishes what is whole.

Ranks do not wait for each other: each leaves a note beside the files when its part is on the disk, and rank 0 renames
the folder when all notes are there. So a rank that dies leaves a folder that nobody takes for a checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.format import BLOCK_BYTES, FORMAT, STATE, FileLayout, joined_crc
from unisono.checkpoint.snapshot import Part, Run, SnapshotMemory
from unisono.checkpoint.storage import Storage
from unisono.errors import UnisonoError

Piece = tuple[int, int, int]  # offset, length, CRC-32


class CheckpointError(UnisonoError):
    """A checkpoint could not be written; those that were whole before still are."""


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is to be written, as all ranks know it.

    Attributes:
        step: After which it was taken.
        attempt: A word that no other attempt has.
        layouts: Of each file.
        state: What state.json says beside the files.
    """

    step: int
    attempt: str
    layouts: Mapping[str, FileLayout]
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return folder_name(self.step)

    @property
    def partial(self) -> str:
        """The folder's name until it is whole."""
        return f".{self.name}.{self.attempt}"

    @property
    def num_bytes(self) -> int:
        return sum(layout.num_bytes for layout in self.layouts.values())


def folder_name(step: int) -> str:
    """The name of a checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


class Writer:
    """See the module's docstring.

    Args:
        storage: Where checkpoints lie.
        rank: This process's.
        world_size: Ranks that each write a part.
        timeout_s: Longest wait of rank 0 for the others' parts.
        after: Called on rank 0 with a published checkpoint's name, in the writing thread.
        memory_limit: Bytes for the copy; if given, `write` returns when all is written.

    Attributes:
        stall_s: How long the last `write` kept training waiting.
    """

    def __init__(
        self,
        storage: Storage,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        after: Callable[[str], None] = lambda name: None,
        memory_limit: int | None = None,
    ) -> None:
        self.storage, self.rank, self.world_size, self.timeout_s = storage, rank, world_size, timeout_s
        self._after, self._behind = after, memory_limit is None
        self._memory = SnapshotMemory(memory_limit)
        self._thread: threading.Thread | None = None
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._written.set()
        self._error: str | None = None
        self.stall_s = 0.0

    def settle(self) -> str | None:
        """Waits until this rank's part of the last checkpoint is written; returns why it could not be, if so."""
        self._written.wait()
        return self._error

    def cancel(self) -> None:
        """Drops the last checkpoint, if it is not published: a rank has no part of it."""
        self._cancelled.set()

    def finish(self) -> str | None:
        """Waits until the last checkpoint is published, on rank 0, or given up; returns why it could not be."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        return error

    def write(self, draft: Draft, parts: Sequence[Part]) -> None:
        """Copies this rank's parts, and writes them behind; `finish` comes before the next one."""
        started = time.perf_counter()
        self._error = None
        self._written.clear()
        self._cancelled.clear()
        turns = self._memory.turns(parts)
        first = next(turns, [])

        def work() -> None:
            self._write(draft, first, turns)

        if self._behind:
            self._thread = threading.Thread(target=work, name="unisono-checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
        self.stall_s = time.perf_counter() - started

    def _write(self, draft: Draft, runs: Sequence[Run], turns: Any) -> None:
        try:
            pieces: dict[str, list[Piece]] = {}
            while runs:
                self._write_runs(draft, runs, pieces)
                runs = next(turns, [])
            self.storage.put(f"{draft.partial}/{_note(self.rank)}", json.dumps(pieces).encode())
            if self.rank == 0:
                self._written.set()  # of this rank's own part; the rest is waited for here
                self._publish(draft)
        except Exception as error:  # in a thread of its own nobody else would hear of it
            told = isinstance(error, UnisonoError)
            reason = str(error) if told else getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._error = f"checkpoint {draft.name} could not be written by rank {self.rank}: {reason}"
        finally:
            self._written.set()

    def _write_runs(self, draft: Draft, runs: Sequence[Run], pieces: dict[str, list[Piece]]) -> None:
        for name in dict.fromkeys(run.file for run in runs):
            with self.storage.writing(f"{draft.partial}/{name}", draft.layouts[name].num_bytes) as file:
                for run in (run for run in runs if run.file == name):
                    file.write(run.offset, run.data)
                    pieces.setdefault(name, []).extend(_checksums(run))

    def _publish(self, draft: Draft) -> None:
        notes = self._wait_for_notes(draft)
        files = {}
        for name, layout in draft.layouts.items():
            found = sorted((a, b, c) for note in notes for a, b, c in note.get(name, ()))
            files[name] = {"bytes": layout.num_bytes, "crc32": _blocks(found, layout.num_bytes, name)}
        state = {"format": FORMAT, **draft.state, "block_bytes": BLOCK_BYTES, "files": files}
        self.storage.put(f"{draft.partial}/{STATE}", (json.dumps(state, indent=1) + "\n").encode())
        for rank in range(self.world_size):
            self.storage.remove(f"{draft.partial}/{_note(rank)}")
        self.storage.publish(draft.partial, draft.name)
        self.storage.point("latest", draft.name)
        self._after(draft.name)

    def _wait_for_notes(self, draft: Draft) -> list[dict[str, list[Piece]]]:
        deadline, found = time.monotonic() + self.timeout_s, dict[int, Any]()
        while True:
            for rank in range(self.world_size):
                if rank not in found and (note := self.storage.get(f"{draft.partial}/{_note(rank)}")) is not None:
                    found[rank] = json.loads(note)
            missing = [rank for rank in range(self.world_size) if rank not in found]
            if not missing:
                return [found[rank] for rank in range(self.world_size)]
            if self._cancelled.wait(0.01):
                raise CheckpointError(f"rank {missing[0]} could not write its part")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"no part of rank {', '.join(map(str, missing))} appeared within {self.timeout_s:g} s: does every "
                    "host see the same folder?"
                )


def _note(rank: int) -> str:
    return f"rank-{rank}.json"


def _checksums(run: Run) -> list[Piece]:
    """The CRC-32 of each piece of a run, cut where blocks begin."""
    bounds = [
        run.offset,
        *range((run.offset // BLOCK_BYTES + 1) * BLOCK_BYTES, run.offset + len(run.data), BLOCK_BYTES),
    ]
    found = []
    for start, stop in zip(bounds, [*bounds[1:], run.offset + len(run.data)], strict=True):
        found.append((start, stop - start, zlib.crc32(run.data[start - run.offset : stop - run.offset])))
    return found


def _blocks(pieces: Sequence[Piece], num_bytes: int, name: str) -> list[str]:
    """Joins the ranks' pieces to the checksums of a file's blocks, as hexadecimal text.

    Raises:
        CheckpointError: they leave a gap, or two write the same byte.
    """
    sums = [0] * -(-num_bytes // BLOCK_BYTES)
    end = 0
    for offset, length, crc in pieces:
        if offset != end:
            raise CheckpointError(f"byte {min(offset, end)} of {name} was written by no rank, or by two")
        block = offset // BLOCK_BYTES
        sums[block] = joined_crc(sums[block], crc, length)
        end += length
    if end != num_bytes:
        raise CheckpointError(f"byte {end} of {name} was written by no rank")
    return [f"{value:08x}" for value in sums]
