"""What `unisono doctor` does: examine, measure, show."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.verify.doctor import Finding, examine, measure
from unisono.verify.hang import Hang, look

_FRAMES = 6


def show(*, as_json: bool) -> int:
    """Prints what was found; returns the exit code."""
    with Console(stderr=True).status("looking") as status:
        found = [*examine(), *measure(status.update)]
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        Console().print(_table(found))
        print(_verdict(found))
    return int(any(one.wrong for one in found))


def show_ranks(run_dir: str, *, as_json: bool) -> int:
    """Prints where the ranks of a run are; returns the exit code."""
    hang = look(Path(run_dir))
    if as_json:
        print(json.dumps(asdict(hang)))
    else:
        print_ranks(hang, Console())
    return int(any(row.state in ("failed", "gone") for row in hang.rows))


def print_ranks(hang: Hang, console: Console) -> None:
    """Prints where each rank is, the odd ones out first, and the likely cause."""
    for row in hang.rows:
        step = f"step {row.step}" + (f", micro-batch {row.micro_batch}" if row.micro_batch >= 0 else "")
        lines = [f"rank {row.rank}  {row.host}  {row.state} {row.where} for {row.since_s:.1f} s; {step}"]
        lines += [f"    {line}" for line in [*([row.said] if row.said else []), *row.stack[:_FRAMES]]]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(f"likely cause: {hang.cause}", markup=False, highlight=False, soft_wrap=True)


def _table(found: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for one in found:
        mark, style = ("x", "red") if one.wrong else ("!", "yellow") if one.advice else ("", "")
        said = Text(one.found)
        if one.advice:
            said.append(f"\n-> {one.advice}", style=style)
        table.add_row(Text(mark, style=style), one.what, said)
    return table


def _verdict(found: list[Finding]) -> str:
    wrong, advised = sum(one.wrong for one in found), sum(bool(one.advice) and not one.wrong for one in found)
    if not wrong and not advised:
        return "Nothing is in the way."
    return f"{wrong} in the way (x), {advised} to know (!)."
