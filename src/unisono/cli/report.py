"""What stands on the screen at the end of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_summary(folder: Path, *, as_json: bool) -> dict[str, Any]:
    """Prints the run's summary, for a person or as JSON, and returns it."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    if as_json:
        print(json.dumps({**summary, "run_dir": str(folder)}))
        return summary
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    speed = f"{summary['samples_per_s']:.0f} samples/s"
    table.add_row("steps", f"{summary['steps']} ({summary['samples']} samples, {summary['wall_s']:.1f} s, {speed})")
    if summary["loss"] is not None:
        table.add_row("loss", f"{summary['first_loss']:.4f} -> {summary['loss']:.4f}")
    if summary["eval"]:
        table.add_row("eval", "  ".join(f"{name} {value:.4f}" for name, value in summary["eval"].items()))
    table.add_row("weights", summary["weights_digest"])
    table.add_row("run folder", str(folder))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    if summary.get("sample"):
        console.rule("sample", align="left")
        console.print(Text(summary["sample"]))
        console.rule()
    console.print(table)
    return summary
