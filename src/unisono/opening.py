"""How a run is opened: it finds its place, joins the other ranks, and checks what it was told."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unisono.checkpoint.keeping import SavePlan
from unisono.errors import InputError, require_positive_int
from unisono.execution import Execution
from unisono.forward.compiled import check_compiler
from unisono.forward.options import ForwardOptions
from unisono.launch.allocator import keep_freed_memory
from unisono.launch.environment import Place, detect, usable_cores
from unisono.launch.session import TRANSPORTS, open_session, pick_device
from unisono.launch.surroundings import check_same, surroundings
from unisono.recipe import FLOAT32, check_precision
from unisono.run import Run
from unisono.strategy.catalog import SAVE_MEMORY, strategy_name, strategy_options


def init(
    *,
    seed: int = 0,
    threads: int = 1,
    strategy: str = "ddp",
    workers: int | None = None,
    shard_size: int | None = None,
    offload: str | None = None,
    offload_dir: str | Path | None = None,
    precision: str = FLOAT32,
    compile: bool = False,
    recompute: bool = False,
    transport: str = "auto",
    timeout_s: float = 600.0,
    run_dir: str | Path | None = None,
    resume: bool | str | Path = False,
    checkpoint_every: int | str | None = None,
    keep: int | None = None,
    keep_best: str | None = None,
) -> Run:
    """Joins the job that this process was started in; alone, it is a world of one.

    Args:
        seed: All generators are seeded from it, now and before each micro-batch and sample.
        threads: Intra-op threads. CPU kernels add in an order that depends on it, so it is part of a run's
            definition, and 1 is the number that every machine has. Use the other cores by `unisono run --nproc`.
        strategy: "ddp", or what is sharded over the ranks: "zero1" the optimizer's state, "zero2" gradients too,
            "zero3" (or "fsdp") weights too, "hsdp" weights inside of a team of ranks; or "dp": one process with
            several accelerators, or threads. The weights after every step are the same; see docs/strategies.md.
        workers: For "dp": how many accelerators, or threads on a CPU. Default: all, and one a usable core.
        shard_size: Ranks of a team, for "hsdp". Default: those of a host, where there are several.
        offload: Where the optimizer's state goes: "disk" into files that are mapped into memory; "cpu", for
            accelerators, into the host's memory, where the update then runs.
        offload_dir: An existing folder for "disk", on a disk. Default: the system's place for temporary files.
        precision: "float32"; "bf16-mixed": the forward of prepared models runs in bfloat16 where autocast finds
            that enough, and returns float32; weights, gradients and their sums are float32; "fp16-mixed": the same in
            float16, with a loss scale; "bf16": weights and gradients have 16 bits, and updates are made in float32 on
            a copy. Part of a run's definition.
        compile: Compiles the repeated blocks of a model, or all of it where it has none, by `torch.compile`. Part of a
            run's definition too, since compiled kernels round differently.
        recompute: Blocks keep only their inputs for the backward pass, and run their forward again in it: less
            memory, about a third more time, the same weights.
        transport: How gradients travel between CPUs: "auto" is "shm", through shared memory, where all ranks are on one
            host, and "gloo" elsewhere. Accelerators have their own (nccl). Cannot show in the weights.
        timeout_s: Longest wait for the other ranks in one call.
        run_dir: Where metrics.jsonl, checkpoints and summary.json go; None writes nothing, unless `unisono run` gave
            one.
        resume: What `run.resume()` goes on from: a run's folder or a checkpoint; True for `run_dir` itself, if it was
            begun, so that one command both starts a run and starts it again.
        checkpoint_every: Steps (50), or time ("30s", "10m", "1h"), between two checkpoints that are made by themselves.
            Then one is made at the end too, and when the run is told to stop.
        keep: How many checkpoints stay, the newest. Default: all.
        keep_best: "METRIC:max" or "METRIC:min" of `run.evaluate`: one more that stays.

    Flags of `unisono run` win over these arguments.

    Raises:
        InputError: an argument or the environment makes no sense.
        CommError: the other ranks did not come.
    """
    place = detect()
    folder = None if offload_dir is None else str(offload_dir)
    how = Execution(
        strategy=strategy,
        workers=workers,
        shard_size=shard_size,
        offload=offload,
        offload_dir=folder,
        recompute=recompute,
        transport=transport,
        checkpoint_every=None if checkpoint_every is None else str(checkpoint_every),
        keep=keep,
        keep_best=keep_best,
        resume=str(run_dir if resume is True else resume) if resume else None,
    )
    run = open_run(place, how, seed=seed, threads=threads, precision=precision, compile=compile, timeout_s=timeout_s)
    if run.run_dir is None and run_dir is not None:
        run.claim(Path(run_dir), again=bool(resume) or place.restarts > 0)
    if place.origin == "alone" and not place.job and run.device.type == "cpu" and usable_cores() > threads:
        name = Path(sys.argv[0]).name or "train.py"
        run.note(f"1 process, {threads} thread; `unisono run {name}` uses all {usable_cores()} cores, same weights")
    return run


def resolve(how: Execution, place: Place) -> tuple[Execution, dict[str, Any]]:
    """Returns what is meant, and what strategies are to be made with; before anything is started.

    Raises:
        InputError: it cannot work.
    """
    how = replace(how, strategy=strategy_name(how.strategy))
    options = strategy_options(how, place)
    SavePlan.of(how)
    if how.transport not in TRANSPORTS:
        raise InputError(f"transport {how.transport!r} is unknown; there are: {', '.join(TRANSPORTS)}")
    if how.offload == "cpu" and pick_device(place.local_rank).type == "cpu":
        raise InputError("offload cpu is for accelerators; here the weights are on the CPU: use offload disk, or none")
    return how, options


def open_run(
    place: Place,
    how: Execution,
    *,
    seed: int,
    threads: int,
    precision: str = FLOAT32,
    compile: bool = False,
    timeout_s: float = 600.0,
    recipe: str | None = None,
) -> Run:
    """Opens a run at a known place; see `init`."""
    how, options = resolve(how.with_flags(place.flags), place)
    precision, compile = place.flags.get("precision", precision), place.flags.get("compile", compile)
    check_precision(precision)
    if compile:
        check_compiler()
    forward = ForwardOptions(precision=precision, compile=compile, recompute=how.recompute)
    threads = require_positive_int(threads, "threads")
    session = open_session(place, threads=threads, timeout_s=timeout_s, transport=how.transport)
    given = {"seed": seed, "threads": threads, "strategy": how.strategy, **asdict(forward), "recipe": recipe}
    try:
        hosts = check_same(session.comm, {**surroundings(session.device), **given}) if place.world_size > 1 else []
    except InputError:
        session.close(failed=True)
        raise
    if session.device.type == "cpu":
        keep_freed_memory(large=how.strategy not in SAVE_MEMORY)
    run = Run(session, seed=seed, strategy=how.strategy, options=options, forward=forward, how=how, hosts=hosts)
    if session.fallback:
        run.note(session.fallback)
    return run
