"""Keeper: the checkpoints of one place (a run's folder, or the host's shared memory), written by all ranks together."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.checkpoint.keeping import SavePlan, prune, remove_partial
from unisono.checkpoint.storage import LocalStorage
from unisono.checkpoint.writer import CheckpointError, Draft, Writer
from unisono.contents import Contents, layouts_of, parts_of
from unisono.launch.session import Session


class Keeper:
    """See the module's docstring.

    Args:
        session: The ranks.
        folder: The place.
        plan: What stays.
        memory_limit: Bytes for the copy; if given, training waits until all is written.
        after: Called on rank 0 with the name of what was published, in the writing thread.

    Attributes:
        saved: The step of the last checkpoint, -1 for none.
        saved_s: When it was begun, on a monotonic clock.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        plan: SavePlan,
        memory_limit: int | None = None,
        after: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._comm, self._folder = session.comm, folder
        storage = LocalStorage(folder)
        if session.place.rank == 0:
            remove_partial(storage)

        def published(name: str) -> None:
            prune(storage, plan)
            after(name)

        self._writer = Writer(
            storage,
            session.place.rank,
            session.place.world_size,
            timeout_s=session.timeout_s,
            after=published,
            memory_limit=memory_limit,
        )
        self._late: str | None = None
        self.saved, self.saved_s = -1, time.monotonic()

    def write(self, step: int, contents: Contents, position: dict[str, Any]) -> None:
        """Collective: copies what is to be saved, and writes it behind.

        Raises:
            CheckpointError: there is no room, or the checkpoint before could not be written (this one is).
        """
        writer = self._writer
        word = (writer.settle() or self._late, uuid.uuid4().hex[:8], writer.storage.free_bytes(), contents.told())
        everyone = self._comm.gather_objects(word)
        failed = self._end_last([error for error, *_ in everyone])
        told = [tensors for *_, (tensors, _) in everyone]
        layouts = layouts_of(told)
        for number, record in enumerate(contents.state["optimizers"]):
            record["values"] = {}
            for *_, (_, values) in reversed(everyone):
                record["values"].update(values[number])
        draft = Draft(step, everyone[0][1], layouts, {**position, **contents.state})
        if draft.num_bytes > (free := min(free for _, _, free, _ in everyone)):
            raise CheckpointError(
                f"checkpoint {draft.name} needs {draft.num_bytes:,} bytes, and {self._folder} has {free:,} left"
            )
        writer.write(draft, parts_of(contents, layouts, told, self._comm.rank))
        self.saved, self.saved_s = step, time.monotonic()
        if failed:
            raise CheckpointError(failed)

    def _end_last(self, errors: list[str | None]) -> str | None:
        """Lets the last checkpoint be published, or drops it where a rank could not write its part."""
        failed = next((error for error in errors if error), None)
        if failed:
            self._writer.cancel()
        late = self._writer.finish()
        self._late = None if failed else late  # only rank 0 knows: the others hear of it with the next one
        return failed

    def finish(self) -> str | None:
        """Collective: waits until the last checkpoint is published; returns why it could not be."""
        failed = self._end_last(self._comm.gather_objects(self._writer.settle() or self._late))
        late: str | None = self._comm.gather_objects(self._late)[0]
        self._late = None
        return failed or late
