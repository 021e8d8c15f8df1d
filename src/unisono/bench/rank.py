"""One rank of one system: `python -m unisono.bench.rank SYSTEM WORKLOAD`, told by lines on standard input what to do.

`go N` does N steps and answers with the seconds they took, `end` answers with the peak of memory and ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from typing import Any

from unisono.launch.guard import die_with_parent


def main() -> None:
    """The entry of every rank."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    warnings.simplefilter("ignore")

    import torch

    from unisono.bench.systems import make_step
    from unisono.bench.workloads import WORKLOADS

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    torch.set_num_threads(1)
    system, workload = sys.argv[1:]
    step = make_step(system, WORKLOADS[workload])
    step()
    answer(ready=True)
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "end":
            break
        started = time.perf_counter()
        for _ in range(int(rest[0])):
            step()
        answer(seconds=time.perf_counter() - started)
    answer(peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    sys.stdin.readline()  # all have answered
    os._exit(0)  # some systems end badly (torch 2.13's gloo aborts in 4 of 50 exits of DDP), and nothing is at stake


if __name__ == "__main__":
    main()
