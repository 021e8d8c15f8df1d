"""What `unisono bench` does: choose, measure, show."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unisono.bench.picture import draw
from unisono.bench.rounds import BenchError, Row, measure
from unisono.bench.systems import OURS, PEERS, TORCH, installed
from unisono.bench.workloads import WORKLOADS
from unisono.errors import InputError
from unisono.launch.environment import usable_cores


def compare(
    workload: str, nproc: int, peers: str, systems: str | None, rounds: int, picture: str | None, *, as_json: bool
) -> None:
    """Measures, and prints a table or JSON; see `cli.bench`.

    Raises:
        InputError: there is no such workload or system.
        BenchError: nothing could be measured.
    """
    workloads = list(WORKLOADS) if workload == "all" else _known(workload, WORKLOADS, "--workload")
    chosen = _systems(peers, systems)
    if picture is not None and not Path(picture).absolute().parent.is_dir():
        raise InputError(f"--picture {picture}: there is no such folder")
    console, rows = Console(stderr=True), list[Row]()
    failed: list[str] = []
    with console.status("") as status:

        def on_event(said: str) -> None:
            if said.startswith("failed: "):
                failed.append(said)
                console.print(said, markup=False, soft_wrap=True)
            else:
                status.update(said)

        for name in workloads:
            some = sorted(measure(chosen, name, nproc, rounds, on_event), key=_order)
            rows += some
            if not as_json:
                Console().print(_table(some))
    if picture is not None:
        Path(picture).write_text(draw(rows, machine()))
        console.print(f"picture: {picture}", markup=False)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(machine())
    if not [row for row in rows if row.system != "plain"]:
        raise BenchError("no system could be measured")


def _order(row: Row) -> tuple[bool, bool, float]:
    return row.system != "plain", not row.system.startswith("unisono"), row.ratio_to_plain


def _known(given: str, known: Collection[str], option: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option} {name} is unknown; there are: {', '.join(known)}")
    return names


def _systems(peers: str, systems: str | None) -> list[str]:
    if systems is not None:
        return _known(systems, ["plain", *OURS, *TORCH, *PEERS], "--systems")
    others = installed() if peers == "auto" else [] if peers == "none" else _known(peers, [*PEERS], "--peers")
    for name in others:
        if name not in installed():
            raise InputError(f"--peers {name}: {PEERS[name]} is not installed here; `make bench` has an environment")
    return [*OURS, *TORCH, *others]


def _table(rows: Sequence[Row]) -> Table:
    name = rows[0].workload
    table = Table(title=f"{name}: {WORKLOADS[name].about}; {rows[0].nproc} processes", title_justify="left")
    table.add_column("system", no_wrap=True)
    for head in ("ms a step", "to plain", "spread", "MB a rank", "first step s", "wire KB"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.system,
            f"{1e3 * row.step_s:.2f}",
            f"{row.ratio_to_plain:.2f}",
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
            f"{row.peak_rss_mb:,.0f}",
            f"{row.first_step_s:.1f}",
            f"{row.wire_bytes / 1000:,.0f}",
        )
    return table


def machine() -> str:
    """One line: what it was measured on and with."""
    found = []
    for name in ("torch", "accelerate", "lightning-fabric", "deepspeed"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{platform.machine()}, {usable_cores()} cores, {sys.platform}; {', '.join(found)}; 1 thread a process"
