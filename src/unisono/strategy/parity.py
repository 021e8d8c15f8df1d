"""Parity: what no rank can see for itself.

Weights that should be alike are compared, and changes that would part them are noticed where they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from unisono.comm.api import Collectives
from unisono.errors import InputError
from unisono.strategy.unit import Unit

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_due(step: int) -> bool:
    """Whether weights are compared after `step`: at powers of two, so early, and at next to no cost in all."""
    return step & (step - 1) == 0


def check_alike(comm: Collectives, models: Sequence[nn.Module], step: int) -> None:
    """Compares a checksum of every parameter and persistent buffer between all ranks. Collective.

    Raises:
        InputError: they differ; on every rank.
    """
    if comm.world_size == 1:
        return
    found = comm.gather_objects([(name, _checksum(tensor)) for name, tensor in _tensors(models)])
    for rank, other in enumerate(found):
        if other != found[0]:
            names = [name for (name, here), (_, there) in zip(other, found[0], strict=False) if here != there]
            raise InputError(
                f"the ranks' weights have parted: after step {step} {names[0] if names else 'the number of tensors'} "
                f"differs between rank 0 and rank {rank} ({len(names)} of {len(other)} tensors do). Something "
                "changed them on each rank by itself: an optimizer that was not prepared, random numbers, or code that "
                "runs once a micro-batch where it should run `if run.step_done`"
            )


def _tensors(models: Sequence[nn.Module]) -> Iterable[tuple[str, torch.Tensor]]:
    for model in models:
        yield from model.named_parameters()
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{key}".lstrip("."), buffer


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bits, as integers: it runs where the tensor is, at the speed of memory."""
    flat = tensor.detach()
    if flat.untyped_storage().nbytes() < flat.nbytes:  # nothing but a place: its weights are in shards
        return 0
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().view(-1)
    if not flat.numel():
        return 0
    # Sums of 8-byte words are 50 times as fast as those of narrower ones, which torch widens first (24 MB: 0.4 ms).
    words = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return int(flat.view(torch.int64 if words else _INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


class Watch:
    """Notices parameters that change before the update, where a step has several micro-batches.

    The next micro-batch would see the change on this rank, and on another one only if it came there.

    Args:
        models: Whose parameters.

    Attributes:
        params: All of them, each once.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        named = {param: name for model in models for name, param in model.named_parameters()}
        self._names, self.params = list(named.values()), list(named)
        self._seen: list[tuple[int, int]] = []

    def look(self) -> None:
        """Notes what the parameters are."""
        self._seen = [(param._version, param.data_ptr()) for param in self.params]

    def check(self, where: str) -> None:
        """Compares with the last `look`.

        Raises:
            InputError: a parameter was written to, or replaced.
        """
        for name, param, seen in zip(self._names, self.params, self._seen, strict=True):
            if (param._version, param.data_ptr()) != seen:
                raise InputError(
                    f"parameter {name} was changed in {where}, before optimizer.step(): which of the step's "
                    "micro-batches see the change would depend on the number of processes. Change it "
                    "`if run.step_done` (a momentum encoder), or do without (Embedding's max_norm)"
                )


def check_taken(parameters: Iterable[torch.Tensor], where: str) -> None:
    """Checks that no gradient is left when a step ends in which no optimizer was stepped.

    Raises:
        InputError: one is: it would be dropped.
    """
    if any(param.grad is not None for param in parameters):
        raise InputError(
            f"{where} ended with gradients and without optimizer.step(): call it for each batch of the loader. To add "
            "up gradients over more samples choose a larger global_batch; to leave a step out, zero_grad() first"
        )


def unprepared(models: Sequence[nn.Module], parameters: Iterable[torch.Tensor]) -> str | None:
    """Returns a sentence that names parameters of the models that have gradients and are not among `parameters`."""
    prepared = {id(param) for param in parameters}
    pairs = [pair for model in models for pair in model.named_parameters()]
    left = [name for name, param in pairs if param.grad is not None and id(param) not in prepared]
    if not left:
        return None
    return (
        f"these parameters have gradients and are in no prepared optimizer: {', '.join(left[:8])}"
        f"{' ...' * (len(left) > 8)}; their gradients are not summed over the ranks"
    )


def check_stepped(unit: Unit, expected: int, step: int, rank: int) -> None:
    """Checks that an optimizer was stepped in all micro-batches so far, or in none.

    Raises:
        InputError: it was not.
    """
    if len(unit.scales) != expected:
        raise InputError(
            f"optimizer.step() was called in some micro-batches of step {step} and not in others (rank {rank}): call "
            "it for every batch of the loader, unisono does the accumulation; to update only in some steps, decide by "
            "`run.step`, which is the same on every rank"
        )
