"""Options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from unisono.errors import InputError

RecipeSource = Annotated[
    str, typer.Argument(help="A Python file with `recipe(**options)`, or a built-in: stdlib-gpt, digits.")
]
Nproc = Annotated[
    str | None,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Processes a host; under dp, devices or threads of one. Default: one a GPU, or one a usable core. With "
        "MIN:MAX a rank that is killed is not replaced: the others go on from the last checkpoint.",
    ),
]
Nnodes = Annotated[
    str | None,
    typer.Option(metavar="N|MIN:MAX", help="Hosts; start the same command on each. With MIN:MAX they may come and go."),
]
Rdzv = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where hosts meet: one of them, and a free port of it.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the recipe; repeatable.")
]
NumWorkers = Annotated[
    int | None, typer.Option(help="Loader processes a rank; cannot show in the weights. Default: the script's, or 0.")
]
StrategyName = Annotated[
    str | None, typer.Option(help="ddp, zero1, zero2, zero3 (fsdp), hsdp or dp. Default: the script's, or ddp.")
]
ShardSize = Annotated[
    int | None, typer.Option(help="For hsdp: ranks that keep one copy together. Default: those of a host.")
]
OffloadTo = Annotated[
    str | None, typer.Option("--offload", help="Where the optimizer's state goes: disk; cpu, for accelerators.")
]
OffloadDir = Annotated[
    str | None, typer.Option(help="An existing folder for --offload disk. Default: that for temporary files.")
]
Precision = Annotated[
    str | None,
    typer.Option(help="float32, bf16-mixed, fp16-mixed or bf16; shows in the weights. Default: the code's."),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile blocks by torch.compile; shows in the weights. Default: the code's.",
    ),
]
Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        help="Blocks run their forward again in backward: less memory, more time, the same weights.",
    ),
]
Transport = Annotated[
    str | None, typer.Option(help="How gradients travel between CPUs: auto, shm or gloo. Cannot show in the weights.")
]
CheckpointEvery = Annotated[
    str | None, typer.Option(metavar="N", help="Steps (50), or time (30s, 10m, 1h), between two checkpoints.")
]
SnapshotEvery = Annotated[
    int | None,
    typer.Option(metavar="K", help="Steps between two copies in the host's memory, for --max-restarts."),
]
Keep = Annotated[int | None, typer.Option(help="Checkpoints that stay, the newest. Default: all.")]
KeepBest = Annotated[
    str | None, typer.Option(metavar="METRIC:max|min", help="One more that stays: the best by a metric of evaluation.")
]
Resume = Annotated[
    str | None, typer.Option(metavar="DIR", help="Go on from a run's folder, or from one checkpoint; any --nproc.")
]
MaxRestarts = Annotated[
    int | None, typer.Option(help="How often ranks that fail are started again, from the last checkpoint. Default: 0.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of wrong input too.")]


@dataclass(frozen=True)
class Span:
    """How many: at least `least`, at most `most`."""

    least: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether it may change."""
        return self.least < self.most


def parse_span(text: str, option: str) -> Span:
    """Reads "4" or "2:4".

    Raises:
        InputError: it is neither.
    """
    parts = text.split(":")
    try:
        least, most = int(parts[0]), int(parts[-1])
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise InputError(f"{option} {text}: give a number, or two as MIN:MAX")
    if not 1 <= least <= most:
        raise InputError(f"{option} {text}: " + ("MIN is above MAX" if least > most else "a run needs at least one"))
    return Span(least, most)


def check_counts(num_workers: int | None) -> None:
    """Checks numbers of processes.

    Raises:
        InputError: one is too small.
    """
    if num_workers is not None and num_workers < 0:
        raise InputError(f"--num-workers {num_workers}: it must be 0 or more")


def given(**values: Any) -> dict[str, Any]:
    """Returns the flags that were given."""
    return {name: value for name, value in values.items() if value is not None}
