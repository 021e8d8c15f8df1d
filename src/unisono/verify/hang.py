"""Hang: who waits for whom, from the ranks' flight records, and what is the likely cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from unisono.comm.flight import FLIGHT, Call, Flight, ask_for_stacks, flight_name, lives, read_flights
from unisono.errors import InputError

_PACKAGE = "unisono"


@dataclass(frozen=True)
class Row:
    """One rank.

    Attributes:
        rank: Its number.
        host: Where it runs, with its process id.
        state: What it does: "waits", "works", "failed", "gone" or "ended".
        where: The call that it waits in, or the last that it finished.
        since_s: For how long, in seconds.
        step: Updates done.
        micro_batch: Of the step; -1 for none.
        stack: Its Python stack, the innermost frame first; empty where it could not be asked.
        said: Why it ended, if it said so.
        consequence: Whether that was because of another rank.
    """

    rank: int
    host: str
    state: str
    where: str
    since_s: float
    step: int
    micro_batch: int
    stack: list[str]
    said: str
    consequence: bool


@dataclass(frozen=True)
class Hang:
    """All ranks, the odd ones out first, and the likely cause."""

    rows: list[Row]
    cause: str


def look(run_dir: Path, *, ask: bool = True, killed: Collection[int] | None = None) -> Hang:
    """Reads the records of a run, of one that lives or of one that has ended.

    Args:
        run_dir: Its folder.
        ask: Makes living ranks of this host write down their Python stacks first.
        killed: Ranks that were, where that is known: others that are gone were ended because of them.

    Raises:
        InputError: there are none.
    """
    folder = run_dir / FLIGHT
    flights = read_flights(folder)
    if not flights:
        raise InputError(
            f"{run_dir} has no flight records: they are made where a run has a folder and several processes"
        )
    if ask:
        ask_for_stacks(flights, folder)
        flights = read_flights(folder)
    # What is said is how it was when the first rank gave up: the launcher ends the others.
    now = min((flight.closed_s for flight in flights if flight.failed and flight.closed_s), default=time.time())
    waited = min((flight.since_s for flight in flights if flight.waits_in), default=now)
    rows = [_row(flight, folder, now, waited, killed) for flight in flights]
    places = Counter((row.state, row.where) for row in rows)
    rows.sort(key=lambda row: (_follows(row), places[row.state, row.where], row.rank))
    return Hang(rows, _cause(rows, flights[0].world_size))


def _row(flight: Flight, folder: Path, now: float, waited: float, killed: Collection[int] | None) -> Row:
    last = flight.calls[-1] if flight.calls else None
    file = folder / flight_name(flight.rank).replace(".flight", ".stack")
    answered = file.exists() and file.stat().st_size > 0 and file.stat().st_mtime >= waited
    waits = next((call for call in flight.calls if call.number == flight.waits_in), None)
    state, where, since = "works", _name(last, "after "), max(flight.started_s, last.ended_s if last else 0.0)
    if flight.failed:
        state, where = "failed", _name(waits, "in ") if waits else where
        since = flight.since_s if waits else since
    elif flight.closed_s:
        state, since = "ended", flight.closed_s
    elif lives(flight) is False and not answered and (killed is None or flight.rank in killed):
        state = "gone"
        where = _name(waits, "in ") if waits else where
    elif waits is not None:
        state, where, since = "waits", _name(waits, "in "), flight.since_s
    return Row(
        rank=flight.rank,
        host=f"{flight.host} ({flight.pid})",
        state=state,
        where=where,
        since_s=max(0.0, now - since),
        step=last.step if last else 0,
        micro_batch=last.micro_batch if last else -1,
        stack=_stack(file) if answered or lives(flight) else [],
        said=flight.failed,
        consequence=flight.consequence,
    )


def _name(call: Call | None, word: str = "") -> str:
    return "before its first call" if call is None else f"{word}{call.verb} (call {call.number})"


def _stack(file: Path) -> list[str]:
    """The main thread's frames of what `faulthandler` has written: it comes last."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return []
    thread = text.replace("Current thread", "Thread").rpartition("Thread")[2]
    lines = [line.strip() for line in thread.splitlines()[1:]]
    frames = [line.removeprefix("File ") for line in lines if line.startswith("File ")]
    return [frame for frame in frames if not frame.startswith('"<frozen ')]


def _follows(row: Row) -> int:
    """How likely it is that a rank is only a consequence of others."""
    if row.state == "gone" or (row.state == "failed" and not row.consequence):
        return 0
    return 2 if row.state in ("waits", "failed") else 1


def _cause(rows: list[Row], world_size: int) -> str:
    raised = [row for row in rows if row.state == "failed" and not row.consequence]
    gone, waits = [row for row in rows if row.state == "gone"], [row for row in rows if row.state == "waits"]
    works, missing = [row for row in rows if row.state == "works"], world_size - len(rows)
    if raised:
        return f"rank {raised[0].rank} raised: {raised[0].said}"
    if gone:
        return (
            f"{_ranks(gone)} gone without a word: killed from outside, or by the system for want of memory (dmesg "
            "says so), or crashed in native code"
        )
    if missing:
        return f"{missing} of {world_size} ranks have no record here: their host does not see this folder, or is gone"
    stopped = [row for row in rows if row.state in ("waits", "failed")]
    if works and stopped:
        inside = next((frame for row in works for frame in row.stack if f"/{_PACKAGE}/" not in frame), "")
        at = f", in {inside}" if inside else ""
        return f"{_ranks(works)} in its own work{at}: slow, or hanging there; the others wait for it"
    if len({row.where for row in stopped}) > 1:
        return (
            "the ranks are in different calls: their loops differ. Each rank must step its optimizer once for each "
            "of its micro-batches, and call what is collective alike"
        )
    if waits and len(waits) == len(rows):
        return "all ranks wait in the same call: the network between them, or a host that is very slow"
    return "nothing is wrong to be seen: the ranks work" if works else "the run has ended"


def _ranks(rows: list[Row]) -> str:
    numbers = ", ".join(str(row.rank) for row in rows)
    return f"rank {numbers} is" if len(rows) == 1 else f"ranks {numbers} are"
