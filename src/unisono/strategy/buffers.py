"""ModelBuffers: BatchNorm's running statistics, and whatever else a forward changes, the same on every rank.

Every micro-batch starts from the step's values. Running statistics are averaged over the step's micro-batches
in tree order; any other buffer takes the value that micro-batch 0 left. Plain PyTorch, with one micro-batch a
step, does the same. What the user changes between two steps, on all ranks alike, stays.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn

from unisono.comm.api import Collectives, Pending
from unisono.errors import InputError
from unisono.numerics.digest import tensor_bytes
from unisono.numerics.tree import TreeAccumulator, roots
from unisono.strategy.base import StepPlan
from unisono.strategy.reduction import BUFFERS

_AVERAGED = ("running_mean", "running_var")
# Up to this size a buffer is compared by value, beyond it by torch's version counter, which a kernel may bypass:
# `F.batch_norm` updates its statistics without counting (torch 2.13).
_COMPARED_ELEMENTS = 16_384


class _Buffer:
    """One buffer: where it hangs, the step's value, and whether the step's micro-batches are averaged."""

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        self.module, self.key, self.name = module, key, name
        self.tensor: torch.Tensor = module._buffers[key]  # type: ignore[assignment]
        self.averaged = key in _AVERAGED and self.tensor.is_floating_point()
        self.start = self.tensor.detach().clone()
        self.version = self.tensor._version
        self.lent: torch.Tensor | None = None  # what hangs there in its stead, inside of a step
        self.left_alone = False  # a cache that has changed its shape

    def current(self) -> torch.Tensor:
        """Returns what hangs there now.

        Raises:
            InputError: it is of another shape or type, and belongs to the model's state.
        """
        value = self.module._buffers[self.key]
        if value is not None and (value.shape, value.dtype) == (self.start.shape, self.start.dtype):
            return value
        if self.key in self.module._non_persistent_buffers_set:
            self.left_alone = True
            return self.start
        raise InputError(
            f"buffer {self.name} became {_kind(value)}, it was {_kind(self.start)}: give it its shape and type before "
            "training, or register it with persistent=False if it is a cache"
        )

    def as_difference(self, num_micro: int) -> bool:
        """Whether its mean is taken of differences: a mean of equal float64 values is not always that value."""
        return self.averaged and num_micro > 1 and self.start.dtype == torch.float64

    def changed(self) -> bool:
        """Says whether anything wrote to it, or replaced it, since it had the step's value."""
        value = self.current()
        if self.left_alone:
            return False
        if value is not (self.tensor if self.lent is None else self.lent) or value._version != self.version:
            return True
        by_value = value.device.type == "cpu" and (self.averaged or value.numel() <= _COMPARED_ELEMENTS)
        return by_value and not torch.equal(value, self.start)

    def adopt(self) -> None:
        """Makes the present value the step's value."""
        self.tensor, self.lent = self.current(), None
        self.start.copy_(self.tensor.detach())
        self.version = self.tensor._version

    def set(self, value: torch.Tensor) -> None:
        """Writes `value` into the buffer itself, so that references to it stay good."""
        if not self.left_alone:
            with torch.no_grad():
                self.tensor.copy_(value)
            self.module._buffers[self.key], self.lent = self.tensor, None
            self.version = self.tensor._version

    def lend(self) -> None:
        """Hangs up a new tensor with the step's value: a backward that still runs may read the old one."""
        if not self.left_alone:
            self.lent = self.start.clone()
            self.module._buffers[self.key], self.version = self.lent, self.lent._version


def _kind(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


class ModelBuffers:
    """The buffers of all models of a run.

    Args:
        comm: The ranks.
        models: With distinct modules; a module that two models share is taken once.

    Attributes:
        outside: Checksum of what was changed between the last step and this one, 0 for nothing.
    """

    def __init__(self, comm: Collectives, models: Iterable[nn.Module]) -> None:
        self.comm, self.outside = comm, 0
        self._buffers: list[_Buffer] = []
        self._empty: list[tuple[nn.Module, str, str]] = []
        seen: set[int] = set()
        for model in models:
            for prefix, module in model.named_modules():
                for key, value in module._buffers.items():
                    name = f"{prefix}.{key}".lstrip(".")
                    if value is None and key not in module._non_persistent_buffers_set:
                        self._empty.append((module, key, name))
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        self._buffers.append(_Buffer(module, key, name))
        # Those known to change travel with every step; others are noticed when they do.
        statistics = {id(buffer.module) for buffer in self._buffers if buffer.averaged}
        self._active = [b for b in self._buffers if id(b.module) in statistics]
        self._quiet = [b for b in self._buffers if id(b.module) not in statistics]
        self._tree: TreeAccumulator[torch.Tensor] | None = None
        self._quiet_changed = False
        self._left: list[torch.Tensor] = []  # by micro-batch 0, for the next step: others still start from this one's
        self._inbox: list[list[torch.Tensor]] = []
        self._pending: Pending | None = None

    def begin_step(self) -> None:
        """Takes the present values as the step's: the user may have changed some since the last step."""
        self.outside = 0
        for buffer in self._buffers:
            if buffer.changed():
                same = torch.equal(buffer.current(), buffer.start)  # written to and put back, by an evaluation say
                buffer.adopt()
                if same:
                    continue
                self.outside = zlib.crc32(tensor_bytes(buffer.start), zlib.crc32(buffer.name.encode(), self.outside))

    def restore(self, *, lend: bool = False) -> None:
        """Puts the step's values back, wherever a forward has changed them.

        Args:
            lend: Until the step ends, in other tensors: backwards may still run.
        """
        for buffer in self._buffers:
            if buffer.changed():
                buffer.lend() if lend else buffer.set(buffer.start)

    def end_micro_batch(self, leaf: int, num_micro: int) -> None:
        """Notes what micro-batch `leaf` left."""
        for module, key, name in self._empty:
            if module._buffers[key] is not None:
                raise InputError(
                    f"buffer {name} was None when training began and a forward filled it: give it its shape before "
                    "training, or register it with persistent=False if it is a cache"
                )
        if self._active:
            if self._tree is None:
                self._tree = TreeAccumulator(num_micro, torch.Tensor.add_)
            self._tree.add(leaf, self._vector(leaf, num_micro))
        changed = [buffer for buffer in self._quiet if buffer.changed()]  # all, so that each one's shape is checked
        if changed and leaf == 0:
            self._quiet_changed = True
            self._left = [buffer.current().detach().clone() for buffer in self._quiet]

    def _vector(self, leaf: int, num_micro: int) -> torch.Tensor:
        """All active buffers as float64, on one device; what is not averaged counts in leaf 0 alone."""
        parts = []
        for buffer in self._active:
            value = buffer.current().detach().to(torch.float64)
            if buffer.as_difference(num_micro):
                value = value - buffer.start
            parts.append(value.reshape(-1) if buffer.averaged or leaf == 0 else torch.zeros(value.numel()).to(value))
        return torch.cat([part.to(parts[0].device) for part in parts])

    @property
    def quiet_changed(self) -> bool:
        """Whether micro-batch 0, here, changed a buffer that is not known to change."""
        return self._quiet_changed

    def launch(self, plan: StepPlan) -> None:
        """Collective: starts to send this rank's partial sums to all."""
        if not self._active:
            return
        own = [value for _, value in self._tree.items()] if self._tree else []
        numel, device = sum(b.start.numel() for b in self._active), self._active[0].start.device
        rank = self.comm.rank
        self._inbox = [[] for _ in plan.blocks]
        for peer, block in enumerate(plan.blocks):
            if peer != rank:
                nodes = roots(block, plan.num_micro)
                self._inbox[peer] = [torch.empty(numel, dtype=torch.float64, device=device) for _ in nodes]
        self._pending = self.comm.exchange_shards([own] * self.comm.world_size, self._inbox, channel=BUFFERS)

    def complete(self, plan: StepPlan, quiet_changed: bool) -> None:
        """Collective: sets the step's outcome as the next step's values.

        Args:
            quiet_changed: Whether any rank's `quiet_changed` was true.
        """
        if self._pending is not None:
            self._pending.wait()
            total: TreeAccumulator[torch.Tensor] = TreeAccumulator(plan.num_micro, torch.Tensor.add_)
            for node, value in self._tree.items() if self._tree else ():
                total.add_node(node, value)
            for block, parts in zip(plan.blocks, self._inbox, strict=True):
                for node, value in zip(roots(block, plan.num_micro), parts, strict=False):
                    total.add_node(node, value)
            self._set_active(total.result(), plan.num_micro)
        if quiet_changed:
            left = self._left or [buffer.start for buffer in self._quiet]
            for buffer, value in zip(self._quiet, left, strict=True):
                buffer.start.copy_(value)
            nothing: list[list[torch.Tensor]] = [[] for _ in range(self.comm.world_size - 1)]
            self.comm.all_gather([[buffer.start for buffer in self._quiet], *nothing], channel=BUFFERS).wait()
            self._left = []
        for buffer in self._quiet:
            if quiet_changed or buffer.lent is not None or buffer.changed():
                buffer.set(buffer.start)
        self._tree, self._pending, self._quiet_changed = None, None, False

    def _set_active(self, total: torch.Tensor, num_micro: int) -> None:
        offset = 0
        for buffer in self._active:
            size = buffer.start.numel()
            value = total[offset : offset + size].view(buffer.start.shape)
            offset += size
            if buffer.averaged:
                value = value / num_micro
            if buffer.as_difference(num_micro):
                value = value + buffer.start
            buffer.set(value.to(buffer.start.dtype))
            buffer.adopt()
