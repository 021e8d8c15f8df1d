"""How a run is opened: it finds its place, joins the other ranks, and checks what it was told."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.errors import InputError, require_positive_int
from unisono.launch.environment import Place, detect, usable_cores
from unisono.launch.session import open_session
from unisono.recipe import PRECISIONS
from unisono.run import Run
from unisono.strategy.catalog import strategy_name, strategy_options


def init(
    *,
    seed: int = 0,
    threads: int = 1,
    strategy: str = "ddp",
    shard_size: int | None = None,
    precision: str = "float32",
    timeout_s: float = 600.0,
    run_dir: str | Path | None = None,
) -> Run:
    """Joins the job that this process was started in; alone, it is a world of one.

    Args:
        seed: All generators are seeded from it, now and before each micro-batch and sample.
        threads: Intra-op threads. CPU kernels add in an order that depends on it, so it is part of a run's
            definition, and 1 is the number that every machine has. Use the other cores by `unisono run --nproc`.
        strategy: "ddp", or what is sharded over the ranks: "zero1" the optimizer's state, "zero2" gradients too,
            "zero3" (or "fsdp") weights too, "hsdp" weights inside of a team of ranks. The weights after every step
            are the same; see docs/strategies.md.
        shard_size: Ranks of a team, for "hsdp". Default: those of a host, where there are several.
        precision: "float32".
        timeout_s: Longest wait for the other ranks in one call.
        run_dir: Where metrics.jsonl and summary.json go; None writes nothing, unless `unisono run` gave one.

    Flags of `unisono run` win over these arguments.

    Raises:
        InputError: an argument or the environment makes no sense.
        CommError: the other ranks did not come.
    """
    if precision not in PRECISIONS:
        raise InputError(f"there is no precision '{precision}': {', '.join(PRECISIONS)}")
    place = detect()
    run = open_run(place, seed=seed, threads=threads, strategy=strategy, shard_size=shard_size, timeout_s=timeout_s)
    if run.run_dir is None and run_dir is not None:
        run.claim(Path(run_dir))
    if place.origin == "alone" and not place.job and run.device.type == "cpu" and usable_cores() > threads:
        name = Path(sys.argv[0]).name or "train.py"
        run.note(f"1 process, {threads} thread; `unisono run {name}` uses all {usable_cores()} cores, same weights")
    return run


def open_run(
    place: Place, *, seed: int, threads: int, strategy: str, shard_size: int | None = None, timeout_s: float = 600.0
) -> Run:
    """Opens a run at a known place; see `init`."""
    strategy = strategy_name(place.flags.get("strategy", strategy))
    shard_size = place.flags.get("shard_size", shard_size)
    options = strategy_options(strategy, shard_size, place.world_size, place.local_world_size)
    session = open_session(place, threads=require_positive_int(threads, "threads"), timeout_s=timeout_s)
    return Run(session, seed=seed, strategy=strategy, options=options)
