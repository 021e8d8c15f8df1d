"""Start an epoch and get the first batch's indices: `unisono` beside `DistributedSampler`.

    python benchmarks/order.py [--max-exp 9] [--repeats 5] [--json]

Every start is measured in a process of its own: a process's peak memory never goes down again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data.distributed import DistributedSampler

from unisono.data.order import permutation

BATCH = 64
NUM_REPLICAS = 2
SAFE_SHARE = 0.6

# What the sampler holds at its peak for each sample: 8 bytes of torch.randperm, a list slot of 8 and an int of 32.
SAMPLER_BYTES_PER_SAMPLE = 48


def start_ours(num_samples: int) -> None:
    """Do what a rank does for its first micro-batch of an epoch."""
    permutation(0, 1, num_samples)(np.arange(BATCH))


def start_sampler(num_samples: int) -> None:
    """Do the same with torch's sampler, whose data set need only have a length."""
    sampler = DistributedSampler(range(num_samples), num_replicas=NUM_REPLICAS, rank=0, shuffle=True)  # type: ignore[arg-type,var-annotated]
    sampler.set_epoch(1)
    list(islice(iter(sampler), BATCH))


CONTENDERS: dict[str, Callable[[int], None]] = {"unisono": start_ours, "DistributedSampler": start_sampler}


def measure_start(name: str, num_samples: int) -> tuple[float, int]:
    """Return the seconds and the extra peak bytes of one start. For a fresh process."""
    start = CONTENDERS[name]
    start(1000)
    start(2000)  # both ways of `permutation` are warm
    peak_before = peak_bytes()
    began = time.perf_counter()
    start(num_samples)
    return time.perf_counter() - began, peak_bytes() - peak_before


def peak_bytes() -> int:
    """Return the largest resident set that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_bytes() -> int:
    """Return the memory that can be had without swapping."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def compare_start(name: str, num_samples: int, repeats: int) -> dict[str, object]:
    """Return one row of the table: medians, or why there are none."""
    row: dict[str, object] = {"what": name, "num_samples": num_samples}
    need_bytes, have_bytes = num_samples * SAMPLER_BYTES_PER_SAMPLE, free_bytes()
    if name == "DistributedSampler" and need_bytes > SAFE_SHARE * have_bytes:
        skipped = f"not run: needs about {need_bytes / 1e9:.0f} GB, {have_bytes / 1e9:.0f} GB are free"
        return row | {"skipped": skipped}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        results = [pool.submit(measure_start, name, num_samples).result() for _ in range(repeats)]
    times_s, extra_bytes = zip(*results, strict=True)
    return row | {"median_s": statistics.median(times_s), "extra_bytes": statistics.median(extra_bytes)}


def measure_throughput(num_samples: int, batch: int, seconds: float = 1.0) -> dict[str, object]:
    """Return how many indices a second one process computes, batch by batch."""
    perm = permutation(0, 1, num_samples)
    num_batches, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < seconds:
        start = num_batches * batch % (num_samples - batch)
        perm(np.arange(start, start + batch))
        num_batches += 1
    return {
        "num_samples": num_samples,
        "batch": batch,
        "indices_per_s": num_batches * batch / took_s,
        "us_per_batch": took_s / num_batches * 1e6,
    }


def print_tables(result: dict[str, list[dict[str, object]]], console: Console) -> None:
    """Print what `--json` would have."""
    starts = Table("samples", "", "time", "extra memory", title=f"An epoch's start to its first {BATCH} indices")
    for row in result["start"]:
        cells = (row["skipped"], "") if "skipped" in row else (_time(row["median_s"]), _memory(row["extra_bytes"]))
        starts.add_row(f"{row['num_samples']:,}", str(row["what"]), *map(str, cells))
    console.print(starts)
    rates = Table("samples", "batch", "indices / s", "time / batch", title="Throughput of unisono, one process")
    for row in result["throughput"]:
        time_s = float(str(row["us_per_batch"])) / 1e6
        rates.add_row(f"{row['num_samples']:,}", str(row["batch"]), f"{row['indices_per_s']:,.0f}", _time(time_s))
    console.print(rates)


def _time(value_s: object) -> str:
    seconds = float(str(value_s))
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _memory(value_bytes: object) -> str:
    return f"{float(str(value_bytes)) / 1e6:,.1f} MB"


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-exp", type=int, default=9, help="the largest data set has 10**MAX_EXP samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    sizes = [10**exponent for exponent in range(4, arguments.max_exp + 1)]
    versions: dict[str, object] = {"torch": torch.__version__, "numpy": np.__version__}
    result: dict[str, list[dict[str, object]]] = {
        "machine": [versions | {"platform": platform.platform(), "num_cpus": os.cpu_count()}],
        "start": [compare_start(name, size, arguments.repeats) for size in sizes for name in CONTENDERS],
        "throughput": [measure_throughput(size, batch) for size in (10**6, 10**9) for batch in (BATCH, 65536)],
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print_tables(result, Console())


if __name__ == "__main__":
    main()
