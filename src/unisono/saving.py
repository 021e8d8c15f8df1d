"""Saving: how a run's state outlives its processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.keeping import SavePlan
from unisono.checkpoint.reader import Checkpoint, DamagedError, checkpoints_in, find, weights_file
from unisono.checkpoint.writer import CheckpointError, folder_name
from unisono.contents import check_fits, check_weights, collect, restore, restore_weights
from unisono.data.loader import MicroBatchLoader
from unisono.data.stage import StageError
from unisono.errors import InputError
from unisono.execution import Execution
from unisono.keeper import Keeper
from unisono.launch.session import Session
from unisono.mirror import Mirror
from unisono.observe.ledger import Ledger
from unisono.prepare import Preparation
from unisono.strategy.stepper import Stepper

# With a copy in memory training goes on while it is written. State that does not fit in memory goes through this much.
_SMALL_MEMORY = 64 * 1024 * 1024


class Saving:
    """The part of a `Run` that saves and goes on.

    Attributes:
        saves_at_the_end: Whether the state is saved at the end, and when the run is told to stop, in any case.
    """

    _session: Session
    _stepper: Stepper
    _prepared: Preparation
    ledger: Ledger
    run_dir: Path | None
    seed: int
    strategy: str
    _how: Execution
    _plan: SavePlan
    _definition: Mapping[str, Any]

    def _start_saving(self, how: Execution, definition: Mapping[str, Any]) -> None:
        self._how, self._plan, self._definition = how, SavePlan.of(how), definition
        self.saves_at_the_end = False
        self._tracked: dict[str, Any] = {}
        self._disk: Keeper | None = None
        self._memory: Keeper | None = None
        self._resumed = self._resumed_here = -1  # steps; the second if it lies in this run's own folder
        self._started_s = time.monotonic()

    if TYPE_CHECKING:

        def note(self, sentence: str) -> None: ...

        def claim(self, folder: Path, again: bool = False) -> None: ...

    def define(self, values: Mapping[str, Any]) -> None:
        """Adds to what has to be the same for a run to go on: a recipe's options, say."""
        self._definition = {**self._definition, **json.loads(json.dumps(values, default=str))}

    def track(self, name: str, thing: Any) -> None:
        """Saves and restores further state with every checkpoint: an average of the weights, a meter, a scheduler.

        Args:
            name: Of it in the checkpoint.
            thing: It has `state_dict()` and `load_state_dict()`; what it says is alike on all ranks.

        Raises:
            InputError: it has not, or the name is taken.
        """
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise InputError(f"run.track('{name}', ...) got {type(thing).__name__}, which has no state_dict")
        if name in self._tracked:
            raise InputError(f"'{name}' is tracked already: give run.track another name")
        self._tracked[name] = thing

    def save(self, wait: bool = False) -> Path:
        """Saves everything that `resume` needs to go on after the present step; returns the checkpoint's folder.

        Training goes on when a copy is made in memory; the rest is written behind. A step is saved once. A run without
        a folder gets one: runs/SCRIPT-TIME.

        Args:
            wait: Returns when it is on the disk.

        Collective: every rank calls it.

        Raises:
            InputError: inside of a step.
            CheckpointError: this checkpoint, or the one before, could not be written.
        """
        self._session.comm.barrier(f"run.save() after step {self._stepper.step}")
        if self.run_dir is None:
            script = Path(sys.argv[0]).stem.lstrip("-") or "run"
            name = self._agreed(f"{script}-{time.strftime('%Y%m%d-%H%M%S')}")
            self.claim(Path("runs") / name)
            self.note(f"checkpoints go to {self.run_dir}; init(run_dir=...) chooses another place")
        assert self.run_dir is not None
        self._stepper.settle_before_reading()
        if not self._stepper.between_steps:
            raise InputError(
                f"run.save() inside of step {self._stepper.step}: save between two steps, after the epoch's loop or "
                "`if run.step_done`"
            )
        name = folder_name(self._stepper.step)
        keeper = self._on_disk()
        if keeper.saved != self._stepper.step != self._resumed_here:
            self._write(keeper)
        if wait and (error := keeper.finish()):
            raise CheckpointError(error)
        return self.run_dir / "checkpoints" / name

    def _write(self, keeper: Keeper) -> None:
        contents = collect(self._prepared, self._stepper, self._tracked)
        keeper.write(self._stepper.step, contents, self._position())

    def _on_disk(self) -> Keeper:
        assert self.run_dir is not None
        if self._disk is None:
            limit = _SMALL_MEMORY if self._how.offload == "disk" else None
            after = self._mirror.push if self._mirror else lambda name: None
            self._disk = Keeper(self._session, self.run_dir / "checkpoints", self._plan, limit, after)
        return self._disk

    @property
    def _mirror(self) -> Mirror | None:
        url = self._session.place.job.get("mirror")
        return Mirror(url, self.run_dir) if url and self.run_dir is not None else None

    def _push_records(self) -> None:
        """At the end: brings metrics and summary to where checkpoints are."""
        if self._mirror is not None and self._session.place.rank == 0:
            try:
                self._mirror.push_files()
            except StageError as error:
                self.note(str(error))

    def _in_memory(self, folder: Path) -> Keeper:
        if self._memory is None:
            self._memory = Keeper(self._session, folder, SavePlan(keep=1))
        return self._memory

    def _position(self) -> dict[str, Any]:
        stepper, scale = self._stepper, self._stepper.loss_scale
        return {
            "step": stepper.step,
            "epoch": stepper.epoch,
            "definition": self._defined(),
            "recipe_digest": self.ledger.extra.get("recipe_digest"),
            "loaders": [loader.position for loader in self._prepared.loaders],
            "loss_scale": None if scale is None else [scale.value, scale.good_steps],
            "ledger": self.ledger.position(),
            "saved_by": {"nproc": self._session.place.world_size, "strategy": self.strategy, "time": time.time()},
        }

    def _defined(self) -> dict[str, Any]:
        """What has to be the same for a run to go on as if nothing had happened."""
        found = {"seed": self.seed, **self._definition}
        for number, loader in enumerate(self._prepared.loaders):
            found |= {f"{name} of dataset {number}": value for name, value in _sizes(loader).items()}
        return found

    # By itself

    def _on_boundary(self) -> None:
        """Between two steps, on all ranks alike."""
        step, plan = self._stepper.step, self._plan
        if step == 0 and self._resumed < 0 and self._session.place.restarts and self._how.resume is None:
            self._resumed = 0
            self.note("started again, and the script does not call run.resume(): it begins at step 0")
        if step == 0 and self._how.resume is not None and self._resumed < 0:
            raise InputError("this run is to be resumed: call run.resume() after the last prepare, before the loop")
        if self.run_dir is None or step in (0, self._resumed, -1 if self._disk is None else self._disk.saved):
            return
        due = plan.every_steps is not None and step % plan.every_steps == 0
        if self._stepper.requests.stopping:
            self.save_at_the_end()
        elif due or self._stepper.requests.saving:
            self._by_itself(self.save)
        elif self._how.snapshot_every and step % self._how.snapshot_every == 0 and (folder := self._memory_dir()):
            self._by_itself(lambda: self._write(self._in_memory(folder)))

    def _memory_dir(self) -> Path | None:
        """Where checkpoints may lie in the host's memory: all ranks are on it, and their launcher outlives them."""
        place = self._session.place
        found = place.job.get("memory_dir")
        return Path(found) if found and place.world_size == place.local_world_size else None

    @property
    def _saves_by_itself(self) -> bool:
        asked = self._plan.every_steps is not None or self._plan.every_s is not None
        return asked or self._disk is not None or self.saves_at_the_end

    def _by_itself(self, save: Callable[[], Any]) -> None:
        try:
            save()
        except CheckpointError as error:  # the run goes on: there is another one to come
            self.note(f"{error}; training goes on without it")

    def save_at_the_end(self) -> None:
        """Collective: the last checkpoint, if any are made; returns when it is on the disk."""
        if self._memory is not None:
            self._memory.finish()
        if self.run_dir is not None and self._saves_by_itself and self._stepper.step > 0:
            self.save(wait=True)
        elif self._disk is not None and (error := self._disk.finish()):  # saved before the first step
            raise CheckpointError(error)

    def _watch_the_clock(self) -> None:
        every_s = self._plan.every_s
        if every_s is not None and self._session.place.rank == 0 and self._since_save() >= every_s:
            self._stepper.requests.save = True

    def _since_save(self) -> float:
        return time.monotonic() - (self._started_s if self._disk is None else self._disk.saved_s)

    # The way back

    def resume(self, folder: str | Path | None = None) -> bool:
        """Goes on where an earlier run was saved, whatever its number of processes and strategy.

        Args:
            folder: A run's folder, or one checkpoint. Default: what --resume named, or, where torch elastic has
                started the ranks again, this run's own.

        Returns:
            Whether there was something to go on from.

        Collective: every rank calls it, after the last `prepare` and `track`, before the loop.

        Raises:
            InputError: there is no whole checkpoint, or it is of another model or recipe.
        """
        self._resumed = max(self._resumed, 0)
        said = folder if folder is not None else self._how.resume
        named = None if said is None else Path(said)
        # A launcher that came back to its job counts from 0: the ranks need not agree on how often they were started.
        again = any(self._session.comm.gather_objects(self._session.place.restarts))
        if self.run_dir is not None and folder is None and (again or named == self.run_dir):
            if self._agreed(self._own_checkpoints()):  # newer than what a branch began from
                named = self.run_dir
            elif named in (None, self.run_dir):
                self.note(f"{self.run_dir} has no checkpoint yet: the run begins at step 0")
                self.ledger.rewind(0)
                return False
        if named is None:
            return False
        if not self._stepper.between_steps:
            raise InputError(f"run.resume() inside of step {self._stepper.step}: call it before the loop")
        found = self._newest_whole(named)
        self._check_same(found)
        check_fits(found, self._prepared, self._stepper)
        restore(found, self._prepared, self._stepper, self._tracked)
        for loader, position in zip(self._prepared.loaders, found.state["loaders"], strict=False):
            loader.position = tuple(position)
        if self._stepper.loss_scale is not None and found.state["loss_scale"] is not None:
            self._stepper.loss_scale.value, self._stepper.loss_scale.good_steps = found.state["loss_scale"]
        self._stepper.restore(found.step, found.state["epoch"])
        self.ledger.go_on(found.step, found.state["ledger"])
        self._resumed = found.step
        if self._disk is not None:
            self._disk.saved = -1
        own = self.run_dir is not None and found.folder.parent.absolute() == (self.run_dir / "checkpoints").absolute()
        self._resumed_here = found.step if own else -1
        self._session.comm.barrier("run.resume()")  # nobody prunes what another still reads
        self.note(f"goes on after step {found.step}, from {found.folder}")
        return True

    def _agreed(self, value: Any) -> Any:
        """What rank 0 says."""
        return self._session.comm.gather_objects(value)[0]

    def _own_checkpoints(self) -> list[Path]:
        """This run's, oldest first; those in the host's memory too, where its ranks were started again."""
        assert self.run_dir is not None
        memory = self._memory_dir() if self._session.place.restarts else None
        found = checkpoints_in(self.run_dir / "checkpoints") + (checkpoints_in(memory) if memory else [])
        return sorted(found, key=lambda path: path.name)

    def _newest_whole(self, place: Path) -> Checkpoint:
        """Finds the newest checkpoint that is whole; all ranks share the reading."""
        try:
            mine: Any = self._own_checkpoints() if place == self.run_dir else find(place)[1]
            mine = [str(path) for path in mine]
        except InputError as error:
            mine = error
        candidates = self._agreed(mine or InputError(f"there is no checkpoint in {place}"))
        if isinstance(candidates, InputError):
            raise candidates
        reasons: list[str] = []
        for path in map(Path, reversed(candidates)):
            found, damage = self._open_whole(path)
            if found is not None:
                for reason in reasons:
                    self.note(f"{reason}; {found.folder} is the newest whole one")
                return found
            reasons.append(damage)
        raise InputError(f"{reasons[0]}; there is no other checkpoint to go on from")

    def _open_whole(self, path: Path) -> tuple[Checkpoint | None, str]:
        comm, mine, found = self._session.comm, "", None
        try:
            found = Checkpoint.open(path)
            found.check(comm.rank, comm.world_size)
        except DamagedError as reason:
            mine = str(reason)
        damage = next((said for said in comm.gather_objects(mine) if said), "")
        return (None if damage else found), damage

    def _check_same(self, found: Checkpoint) -> None:
        if not self._how.allow_changed:
            check_unchanged(found, self._defined())

    def init_from(self, file: str | Path) -> None:
        """Takes weights only, from any safetensors file of this model's names and shapes, or a folder with one.

        Collective: every rank calls it, after `prepare`.

        Raises:
            InputError: there is no such file, or it is of another model.
        """
        opened = weights_file(file)
        with self._prepared.streaming():
            check_weights(opened, self._prepared.live_state())
        restore_weights(opened, self._prepared)


def _sizes(loader: MicroBatchLoader) -> dict[str, Any]:
    schedule = loader.schedule
    return {
        "samples": schedule.num_samples,
        "global_batch": schedule.global_batch,
        "micro_batch": schedule.micro_batch,
        "drop_last": schedule.drop_last,
        "shuffle": loader.options.shuffle,
    }


def check_unchanged(found: Checkpoint, now: Mapping[str, Any]) -> None:
    """Compares what defines a run with what defined it when it was saved.

    Args:
        found: The checkpoint.
        now: What is known now; the rest is not compared.

    Raises:
        InputError: it has changed; all changes are listed.
    """
    saved = found.state["definition"]
    changed = [f"{name} was {saved.get(name)}, is {now[name]}" for name in now if saved.get(name) != now[name]]
    if changed:
        raise InputError(
            f"{found.folder} is of another recipe: {'; '.join(changed)}. Make it as it was, or give --allow-changed"
        )
