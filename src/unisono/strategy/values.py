"""Logged values: collected a micro-batch at a time, averaged over the step, without waiting for the device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import InputError
from unisono.numerics.sums import weighted_mean
from unisono.strategy.extras import MAX_VALUES, RankStep


class StepValues:
    """What this rank logged in one step.

    Args:
        device: On a CPU values are read at once. On an accelerator they are copied to pinned memory behind the
            work in the stream, and read when the next step ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._micros: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._copy: Callable[[], torch.Tensor] | None = None

    def begin_micro_batch(self) -> None:
        """Starts the next micro-batch of this rank's block."""
        self._micros.append({})

    def log(self, values: dict[str, Any]) -> None:
        """Notes values of the present micro-batch; a later one of the same name replaces it."""
        if self._micros:
            self._micros[-1].update(values)
            self._names.update(values)
            if len(self._names) > MAX_VALUES:
                raise InputError(f"more than {MAX_VALUES} values were logged in one step: {self.names}")

    @property
    def names(self) -> list[str]:
        return sorted(self._names)

    @property
    def names_hash(self) -> int:
        return zlib.crc32("\0".join(self.names).encode())

    def start_copy(self) -> None:
        """On an accelerator, starts to bring the values to the host.

        Raises:
            InputError: as for `read`; on every device.
        """
        self._check_alike()
        names = self.names
        flat = [micro[name] for micro in self._micros for name in names]
        if self._device.type != "cpu" and flat:
            there = [torch.as_tensor(value, dtype=torch.float32).detach().to(self._device) for value in flat]
            self._copy = read_later(torch.stack([value.reshape(()) for value in there]))

    def read(self) -> list[list[float]]:
        """Returns a row a micro-batch, in the order of `names`.

        Raises:
            InputError: a value is no number, or micro-batches differ in names.
        """
        names = self.names
        if self._copy is not None:
            return self._copy().view(len(self._micros), len(names)).tolist()
        self._check_alike()
        return [[_number(micro[name], name) for name in names] for micro in self._micros]

    def _check_alike(self) -> None:
        # Refused here as between ranks, where the names' hashes differ: a rank of one micro-batch could not tell.
        for micro in self._micros:
            if len(micro) < len(self._names):
                name = min(self._names - micro.keys())
                raise InputError(
                    f"the value {name} was logged in some micro-batches of a step and not in others: log the same "
                    "names in every micro-batch of a step, before optimizer.step(); decide by run.step"
                )


def read_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns what gives `tensor` on the host: from an accelerator by a copy behind the work in its stream."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.Event(tensor.device)
    done.record()

    def read() -> torch.Tensor:
        done.synchronize()
        return host

    return read


def _number(value: Any, name: str) -> float:
    try:
        return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"the logged value {name} is no single number: {type(value).__name__}") from None


def average(names: Sequence[str], ranks: Sequence[RankStep], counts: Sequence[int]) -> dict[str, float]:
    """Returns the weighted mean of every value over the micro-batches of a step.

    Sums are exact, so the result does not depend on who computed which micro-batch.

    Args:
        names: In the order of the rows.
        ranks: Every rank's rows and scales.
        counts: Micro-batches of each rank.
    """
    found = {}
    # The weights of the first optimizer that was stepped; a GAN's others may rest.
    units = range(len(ranks[0].scales))
    unit = next((k for k in units if any(any(rank.scales[k]) for rank in ranks)), None)
    for column, name in enumerate(names):
        pairs = [
            (row[column], scale)
            for rank, count in zip(ranks, counts, strict=True)
            for scale, row in zip(
                [1.0] * count if unit is None else rank.scales[unit][:count], rank.values[:count], strict=False
            )
            if scale > 0 and not math.isnan(row[column])
        ]
        found[name] = weighted_mean(pairs)
    return found
