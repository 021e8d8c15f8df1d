"""What the launcher starts: `python -m unisono.cli.worker recipe JSON`, `... trace JSON` or `... script FILE ARGS`."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.ranks import rank_log, reported
from unisono.execution import Execution
from unisono.launch.environment import Place, detect
from unisono.launch.guard import die_with_parent
from unisono.recipe import LoadedRecipe, load_recipe

if TYPE_CHECKING:
    from unisono.run import Run


@dataclass(frozen=True, kw_only=True)
class RecipeJob:
    """Which recipe a rank is to train, and how.

    Attributes:
        source: As `load_recipe` takes it.
        settings: Of `--set`.
        steps: Of `--steps`, or None.
        precision: Of `--precision`, or None.
        compile: Of `--compile`, or None.
        init_from: Of `--init-from`, or None.
        how: It is executed.
    """

    source: str
    settings: dict[str, str] = field(default_factory=dict)
    steps: int | None = None
    precision: str | None = None
    compile: bool | None = None
    init_from: str | None = None
    how: Execution = field(default_factory=Execution)

    def load(self) -> LoadedRecipe:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the summary
            loaded = load_recipe(self.source, self.settings)
        loaded = loaded.with_flags(precision=self.precision, compile=self.compile, init_from=self.init_from)
        return loaded if self.steps is None else loaded.with_steps(self.steps)

    def said(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> RecipeJob:
        """Reads what `said` gave."""
        return cls(**{**said, "how": Execution(**said["how"])})

    def command(self) -> list[str]:
        """What to start for each rank."""
        return [sys.executable, "-m", "unisono.cli.worker", "recipe", json.dumps(self.said())]


def open_recipe(place: Place, job: RecipeJob, loaded: LoadedRecipe) -> Run:
    """Opens the run that a recipe defines."""
    from unisono.opening import open_run

    recipe = loaded.recipe
    return open_run(
        place,
        job.how,
        seed=recipe.seed,
        threads=recipe.threads,
        precision=recipe.precision,
        compile=recipe.compile,
        recipe=f"{loaded.digest}, code {loaded.code_sha256}",
    )


def train_recipe(job: RecipeJob, place: Place) -> None:
    """Trains a recipe on one rank; rank 0 writes the summary."""
    from unisono.trainer import Trainer

    folder = place.run_dir / "logs" if place.run_dir else None
    terminal = sys.stderr
    with contextlib.redirect_stdout(terminal), rank_log(folder, place.rank) as log:
        loaded = job.load()
        recipe = loaded.recipe
        run = open_recipe(place, job, loaded)
        trainer = Trainer(recipe, run, num_workers=job.how.num_workers or 0)
        run.define(loaded.definition)
        if run.is_main:
            run.ledger.extra["recipe_digest"] = loaded.digest
        with run:
            trainer.fit(lambda num_steps: _watch(run, num_steps, terminal, log))
            run.ledger.extra["sample"] = trainer.sampled


def trace_recipe(said: dict[str, Any], place: Place) -> None:
    """Trains a recipe on one rank for `unisono verify`: nothing is shown, a trace is left in a folder."""
    import torch

    from unisono.launch.session import pick_device
    from unisono.trainer import Trainer
    from unisono.verify.grid import PLAIN
    from unisono.verify.plain import train_plain
    from unisono.verify.trace import Trace, traced

    job, folder, save_at = RecipeJob.of(said["job"]), Path(said["folder"]), said["save_at"]
    kill_after, part = said.get("kill_after"), said.get("part", "")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        loaded = job.load()
        recipe = loaded.recipe
        if job.how.strategy == PLAIN:
            train_plain(recipe, pick_device(place.local_rank), folder, save_at)
            return
        run = open_recipe(place, job, loaded)
        trace = Trace(threads=torch.get_num_threads())

        def position() -> tuple[int, int] | None:
            return None if run.micro_batch is None else (run.step, run.micro_batch)

        def on_step() -> None:
            state = run.state()
            if run.is_main:
                trace.step(state, folder, save_at)
            if run.step == kill_after:
                run.save(wait=True)
                trace.write(folder, run.rank, part)
                run.barrier("the kill")
                os.kill(os.getpid(), signal.SIGKILL)

        with run:
            if part:
                run.claim(folder / "run", again=True)
            trainer = Trainer(
                traced(recipe, trace, position), run, num_workers=job.how.num_workers or 0, on_step=on_step
            )
            trainer.fit()
            trace.digest = run.weights_digest()
            trace.write(folder, run.rank, part)


def _watch(run: Run, num_steps: int, terminal: Any, log: Any) -> None:
    from unisono.observe.console import ConsoleSink

    if run.is_main:
        run.ledger.sinks.append(ConsoleSink(terminal, num_steps, log))


def _run_script(arguments: list[str], place: Place) -> None:
    file = arguments[0]
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(file).resolve().parent))
    folder = place.run_dir / "logs" if place.run_dir else None
    with rank_log(folder, place.rank):
        runpy.run_path(file, run_name="__main__")


def main() -> None:
    """The entry of every rank."""
    place = detect()
    die_with_parent(place.job.get("launcher"))
    kind, arguments = sys.argv[1], sys.argv[2:]
    with reported(place):
        if kind == "recipe":
            train_recipe(RecipeJob.of(json.loads(arguments[0])), place)
        elif kind == "trace":
            trace_recipe(json.loads(arguments[0]), place)
        else:
            _run_script(arguments, place)


if __name__ == "__main__":
    main()
