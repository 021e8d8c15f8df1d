"""Stragglers: a rank that is slower than the others, step after step, makes all wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

Load = tuple[float, float]

WINDOW = 50  # steps
SLOWER = 1.5  # times the others' median, in nearly all steps of the window
_NEARLY_ALL = 0.8
_LEAST_S = 1e-3  # a micro-batch: below, it is the clock and the system's scheduler that one would name


def uneven(loads: Sequence[Load]) -> tuple[int, float]:
    """Returns the slowest rank, and its time as a multiple of the mean."""
    totals = [data_s + compute_s for data_s, compute_s in loads]
    if not any(totals):
        return 0, 1.0
    slowest = max(range(len(totals)), key=totals.__getitem__)
    return slowest, totals[slowest] * len(totals) / sum(totals)


class Stragglers:
    """Finds a rank that is slower than the others in nearly all of the last steps, and says so once for each rank.

    Args:
        hosts: Of each rank, as people know them.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._seen: deque[Sequence[Load]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()

    def step(self, loads: Sequence[Load]) -> str | None:
        """Takes a step; returns a sentence for the user where there is something new to say."""
        if len(loads) < 2:
            return None
        self._seen.append(loads)
        if len(self._seen) < WINDOW:
            return None
        slow = [uneven(step)[0] for step in self._seen]
        rank = max(set(slow), key=slow.count)
        if rank in self._named or slow.count(rank) < _NEARLY_ALL * WINDOW:
            return None
        own = [median(step[rank][part] for step in self._seen) for part in (0, 1)]
        others = [self._of_others(rank, part) for part in (0, 1)]
        if sum(own) < max(_LEAST_S, SLOWER * sum(others)):
            return None
        self._named.add(rank)
        data, compute = (1e3 * (mine - theirs) for mine, theirs in zip(own, others, strict=True))
        if data > compute:
            why = f"{data:.3g} ms of it wait for data: more num_workers, or data that are nearer (unisono stage)"
        else:
            why = f"{compute:.3g} ms of it compute: is something else running there, or is its device slower?"
        return (
            f"rank {rank} ({self._hosts[rank]}) needs {sum(own) / max(sum(others), 1e-9):.1f} times the others' time "
            f"for a micro-batch ({1e3 * sum(own):.3g} ms over the last {WINDOW} steps), and all wait for it; {why}"
        )

    def _of_others(self, rank: int, part: int) -> float:
        return median(load[part] for step in self._seen for other, load in enumerate(step) if other != rank)
