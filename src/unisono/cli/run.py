"""`unisono run`: a script of your own, on several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli import options
from unisono.errors import InputError


def run(
    script: Annotated[str, typer.Argument(help="A Python file that calls unisono.init().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    nproc: options.Nproc = None,
    nnodes: options.Nnodes = None,
    rdzv: options.Rdzv = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run. Default: runs/SCRIPT-TIME.")] = None,
    num_workers: options.NumWorkers = None,
    strategy: options.StrategyName = None,
    shard_size: options.ShardSize = None,
    offload: options.OffloadTo = None,
    offload_dir: options.OffloadDir = None,
    precision: options.Precision = None,
    compile: options.Compile = None,
    recompute: options.Recompute = None,
    transport: options.Transport = None,
    checkpoint_every: options.CheckpointEvery = None,
    snapshot_every: options.SnapshotEvery = None,
    keep: options.Keep = None,
    keep_best: options.KeepBest = None,
    resume: options.Resume = None,
    max_restarts: options.MaxRestarts = None,
    debug: options.Debug = False,
) -> None:
    """Run your own training script on several processes. Options for unisono come before the file."""
    options.check_counts(num_workers)
    if not Path(script).is_file():
        raise InputError(f"script {script} does not exist")
    from unisono.cli.start import Crew, devices, launch_ranks, make_run_dir, mirrored, resumed_folder, shared
    from unisono.execution import Execution
    from unisono.forward.compiled import check_compiler
    from unisono.recipe import check_precision

    flags = options.given(
        num_workers=num_workers,
        strategy=strategy,
        shard_size=shard_size,
        offload=offload,
        offload_dir=offload_dir,
        precision=precision,
        compile=compile,
        recompute=recompute,
        transport=transport,
        checkpoint_every=checkpoint_every,
        snapshot_every=snapshot_every,
        keep=keep,
        keep_best=keep_best,
        resume=resume,
    )
    crew = Crew.of(options.given(nproc=nproc, nnodes=nnodes, rdzv=rdzv, max_restarts=max_restarts))
    # What a flag belongs to may be said by the script.
    owners = {"shard_size": strategy, "offload_dir": offload}
    known = {name: value for name, value in flags.items() if owners.get(name, value) is not None}
    how, processes = shared(Execution().with_flags(known), crew.nproc or devices(), crew.hosts)
    if strategy is not None:
        flags |= options.given(strategy=how.strategy, workers=how.workers)
    if precision is not None:
        check_precision(precision, "--precision")
    if compile:
        check_compiler()
    rest = list(arguments or [])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    places, mirror = mirrored({"resume": resume, "run_dir": run_dir})
    resume, run_dir = places["resume"], places["run_dir"]
    flags |= options.given(resume=resume)
    folder = resumed_folder(resume) if resume and not run_dir else make_run_dir(run_dir, Path(script).stem, crew.hosts)
    if crew.elastic and not resume:
        flags["resume"] = str(folder)
    command = [sys.executable, "-m", "unisono.cli.worker", "script", script, *rest]
    print(f"{script}: {processes} process{'es' * (processes > 1)}; {folder}", file=sys.stderr)
    launch_ranks(crew.job(command, processes, run_dir=folder, mirror=mirror, flags=flags), debug)
