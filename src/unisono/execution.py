"""Execution: how a run is executed, which cannot show in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. See `unisono.init`.

    Attributes:
        strategy: Its name.
        workers: For dp: threads of a CPU, or accelerators, that share the micro-batches. None: all.
        shard_size: For hsdp: ranks of a team. None: chosen.
        offload: Where the optimizer's state goes: "cpu", "disk" or None.
        offload_dir: The folder for "disk"; None for the system's.
        recompute: Whether blocks run their forward again instead of keeping activations.
        transport: "auto": through shared memory where all ranks are on one host and on its CPUs; "gloo": never.
        num_workers: Loader processes a rank; None for what the code says.
        checkpoint_every: Steps ("50"), or seconds, minutes or hours ("30s", "10m", "1h") between two checkpoints; None
            for none but those that the code makes.
        snapshot_every: Steps between two copies in the host's memory, from which ranks that are started again go on.
        keep: Checkpoints that stay, the newest; None for all.
        keep_best: One more that stays: "METRIC:max" or "METRIC:min".
        resume: A run's folder, or a checkpoint, to go on from; None to begin.
        allow_changed: Whether it may be another recipe's.
    """

    strategy: str = "ddp"
    workers: int | None = None
    shard_size: int | None = None
    offload: str | None = None
    offload_dir: str | None = None
    recompute: bool = False
    transport: str = "auto"
    num_workers: int | None = None
    checkpoint_every: str | None = None
    snapshot_every: int | None = None
    keep: int | None = None
    keep_best: str | None = None
    resume: str | None = None
    allow_changed: bool = False

    def with_flags(self, flags: Mapping[str, Any]) -> Execution:
        """Returns what the launcher's flags make of it: they win. Flags for something else are left out."""
        return replace(self, **{f.name: flags[f.name] for f in fields(self) if flags.get(f.name) is not None})


DEFAULT = Execution()
