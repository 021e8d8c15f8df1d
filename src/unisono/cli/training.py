"""What `unisono train` does: check, make the run folder, start the ranks, show the outcome."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.checkpoint.reader import Checkpoint, DamagedError, checkpoints_in, find
from unisono.cli.report import show_summary
from unisono.cli.start import Crew, devices, launch_ranks, make_run_dir, mirrored, shared
from unisono.cli.worker import RecipeJob, train_recipe
from unisono.errors import InputError, Interrupted
from unisono.forward.compiled import check_compiler
from unisono.launch.elastic import Signalled
from unisono.launch.environment import Place, detect, usable_cores
from unisono.observe.jsonl import write_json
from unisono.prepare import check_world_size
from unisono.recipe import LoadedRecipe
from unisono.saving import check_unchanged


def start(asked: Mapping[str, Any], given: Mapping[str, Any], *, as_json: bool, debug: bool) -> None:
    """Trains a recipe on the processes of this host.

    Args:
        asked: What the command line says of the recipe: fields of `RecipeJob`. What it leaves out is default, or where
            a run is resumed as that was started.
        given: What it says of "nproc", "run_dir" and how to execute; the rest is default.
        as_json: Print the summary as JSON.
        debug: Show tracebacks of wrong input too.

    Raises:
        InputError: the recipe or an option cannot work, or the recipe has changed; nothing was started.
        RanksFailed: a rank failed.
        Interrupted: the run was stopped; its summary is written.
    """
    given, mirror = mirrored(given)
    last = None if given.get("resume") is None else last_checkpoint(Path(given["resume"]))
    began = {} if last is None else last.record
    asked = {**began.get("arguments", {}), **asked}
    job = RecipeJob(**{"source": "stdlib-gpt", **asked})
    loaded = job.load()
    recipe = loaded.recipe
    if last is not None and last.checkpoint is not None and not given.get("allow_changed"):
        check_unchanged(last.checkpoint, json.loads(json.dumps(loaded.definition, default=str)))
    if began.get("code_sha256", loaded.code_sha256) != loaded.code_sha256:
        print(f"unisono: the code of {job.source} has changed since the run began", file=sys.stderr)
    crew, place = Crew.of(given), detect()
    if crew.hosts is not None and place.origin in ("slurm", "mpi"):
        place = Place()  # one task a host, and this launcher in each
    inside = place.world_size > 1  # this process is a rank: srun, mpirun or torchrun has started it
    if inside and {"nproc", "nnodes", "rdzv"} & given.keys():
        raise InputError(
            f"{place.origin} has started {place.world_size} processes: leave out --nproc and --nnodes, or start one "
            "task a host and give --rdzv too"
        )
    wanted = place.world_size if inside else crew.nproc or min(devices(), recipe.full_num_micro)
    how, nproc = shared(job.how.with_flags(given), wanted, crew.hosts)
    job = replace(job, how=how)
    if recipe.compile:
        check_compiler()
    world_size = nproc * (crew.hosts.most if crew.hosts else 1)
    check_world_size(world_size, recipe.global_batch, recipe.micro_batch or recipe.global_batch)
    if last is not None and "run_dir" not in given:
        folder = last.run_dir
        job = replace(job, how=replace(how, resume=str(last.named)))
    else:
        folder = make_run_dir(given.get("run_dir"), loaded.name, crew.hosts, place.job_id if inside else None)
        if crew.hosts and last is None:  # a host that comes later, or again, goes on from what the others have saved
            job = replace(job, how=replace(how, resume=str(folder)))
    execution = {"nproc": nproc, "nnodes": given.get("nnodes", "1"), **asdict(how), "num_workers": how.num_workers or 0}
    origins = {name: f"--{name.replace('_', '-')}" if name in given else "default" for name in execution}
    if inside:
        job = replace(job, how=replace(job.how, resume=job.how.resume or str(folder)))
    if place.rank == 0:
        _describe(loaded, folder, execution, {**loaded.origins, **origins}, asked, began)
        where = f" of {place.origin}" if inside else ""
        print(f"{loaded.name}: {nproc} process{'es' * (nproc > 1)}{where}, {how.strategy}; {folder}", file=sys.stderr)
    try:
        if inside:
            train_recipe(job, replace(place, job={"run_dir": str(folder), "mirror": mirror}))
        elif nproc == 1 and not crew.max_restarts and crew.hosts is None:
            train_recipe(job, Place(job={"run_dir": str(folder), "mirror": mirror}))
        else:
            options = {"threads": recipe.threads, "mirror": mirror, "run_dir": folder}
            launch_ranks(crew.job(job.command(), nproc, **options), debug)
    except (Interrupted, Signalled) as error:
        if place.rank == 0 and (folder / "summary.json").exists():
            steps = show_summary(folder, as_json=as_json)["steps"]
            again = f"unisono train --resume {folder}"
            raise Interrupted(f"interrupted after step {steps}; go on with `{again}`") from error
        raise
    if place.rank == 0:
        show_summary(folder, as_json=as_json)


@dataclass(frozen=True)
class Last:
    """An earlier run that is to be resumed.

    Attributes:
        named: What the user named: its folder, or one checkpoint.
        run_dir: Its folder.
        record: What its recipe.json says; empty where there is none.
        checkpoint: The newest, if any was published; whether it is whole is found out later.
    """

    named: Path
    run_dir: Path
    record: dict[str, Any]
    checkpoint: Checkpoint | None


def last_checkpoint(named: Path) -> Last:
    """Looks for what is to be resumed.

    Raises:
        InputError: there is nothing.
    """
    run_dir = named
    if not (named / "recipe.json").exists():
        folder, found = find(named)
        run_dir = folder.parent
    else:
        found = checkpoints_in(named / "checkpoints")
    try:
        record = json.loads((run_dir / "recipe.json").read_text())
    except (OSError, ValueError):
        record = {}
    newest = None
    for path in found:
        with contextlib.suppress(DamagedError):
            newest = Checkpoint.open(path)
    return Last(named, run_dir, record, newest)


def _describe(
    loaded: LoadedRecipe,
    folder: Path,
    execution: dict[str, Any],
    origins: dict[str, str],
    asked: Mapping[str, Any],
    began: Mapping[str, Any],
) -> None:
    """Writes recipe.json: what defines the run, what it was made with, and how it was executed before, if it was."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    record = {
        "recipe": loaded.name,
        "source": loaded.source,
        "digest": loaded.digest,
        "options": loaded.options,
        "settings": loaded.recipe.settings(),
        "origins": origins,
        "code_sha256": loaded.code_sha256,
        "arguments": dict(asked),
        "execution": execution,
        "executed_before": [*began.get("executed_before", []), *([began["execution"]] if began else [])],
        "versions": {
            "unisono": _own_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": usable_cores(),
            "device": accelerator.type if accelerator else "cpu",
        },
    }
    write_json(folder / "recipe.json", record)


def _own_version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:  # run from a source folder that was never installed
        return "unknown"
