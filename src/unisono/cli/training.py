"""What `unisono train` does: check, make the run folder, start the ranks, show the outcome."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.cli.report import show_summary
from unisono.cli.start import devices, launch_ranks, make_run_dir, shared
from unisono.cli.worker import RecipeJob, train_recipe
from unisono.errors import Interrupted
from unisono.forward.compiled import check_compiler
from unisono.launch.elastic import Job, Signalled
from unisono.launch.environment import Place, usable_cores
from unisono.observe.jsonl import write_json
from unisono.prepare import check_world_size
from unisono.recipe import LoadedRecipe


def start(job: RecipeJob, given: Mapping[str, Any], *, as_json: bool, debug: bool) -> None:
    """Trains a recipe on the processes of this host.

    Args:
        job: The recipe and its options.
        given: What the command line says of "nproc", "run_dir" and how to execute; the rest is default.
        as_json: Print the summary as JSON.
        debug: Show tracebacks of wrong input too.

    Raises:
        InputError: the recipe or an option cannot work; nothing was started.
        RanksFailed: a rank failed.
        Interrupted: the run was stopped; its summary is written.
    """
    loaded = job.load()
    recipe = loaded.recipe
    nproc = given["nproc"] if "nproc" in given else min(devices(), recipe.full_num_micro)
    how, nproc = shared(job.how.with_flags(given), nproc)
    job = replace(job, how=how)
    if recipe.compile:
        check_compiler()
    check_world_size(nproc, recipe.global_batch, recipe.micro_batch or recipe.global_batch)
    folder = make_run_dir(given.get("run_dir"), loaded.name)
    execution = {"nproc": nproc, **asdict(how), "num_workers": how.num_workers or 0}
    origins = {name: f"--{name.replace('_', '-')}" if name in given else "default" for name in execution}
    _describe(loaded, folder, execution, {**loaded.origins, **origins})
    print(f"{loaded.name}: {nproc} process{'es' * (nproc > 1)}, {how.strategy}; {folder}", file=sys.stderr)
    try:
        if nproc == 1:
            train_recipe(job, Place(job={"run_dir": str(folder)}))
        else:
            command = job.command()
            launch_ranks(Job(command=command, nproc=nproc, threads=recipe.threads, run_dir=folder), debug)
    except (Interrupted, Signalled) as error:
        if (folder / "summary.json").exists():
            steps = show_summary(folder, as_json=as_json)["steps"]
            raise Interrupted(f"interrupted after step {steps}; see {folder}") from error
        raise
    show_summary(folder, as_json=as_json)


def _describe(loaded: LoadedRecipe, folder: Path, execution: dict[str, Any], origins: dict[str, str]) -> None:
    """Writes recipe.json: what defines the run, and what it was made with."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    record = {
        "recipe": loaded.name,
        "source": loaded.source,
        "digest": loaded.digest,
        "options": loaded.options,
        "settings": loaded.recipe.settings(),
        "origins": origins,
        "code_sha256": loaded.code_sha256,
        "execution": execution,
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
