"""ModelBuffers: BatchNorm's running statistics, and whatever else a forward changes, the same on every rank.

Every micro-batch starts from the step's values. Running statistics are averaged over the step's micro-batches
in tree order; any other buffer takes the value that micro-batch 0 left. Plain PyTorch, with one micro-batch a
step, does the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from unisono.comm.api import Collectives, Pending
from unisono.errors import InputError
from unisono.numerics.tree import TreeAccumulator, roots
from unisono.strategy.base import StepPlan
from unisono.strategy.reduction import BUFFERS

_AVERAGED = ("running_mean", "running_var")
# Up to this size a buffer is compared by value, beyond it by torch's version counter, which a kernel may bypass:
# `F.batch_norm` updates its statistics without counting (torch 2.13).
_COMPARED_ELEMENTS = 16_384


class _Buffer:
    """One buffer: where it hangs, the step's value, and whether the step's micro-batches are averaged."""

    def __init__(self, module: nn.Module, key: str, name: str, averaged: bool) -> None:
        self.module, self.key, self.name, self.averaged = module, key, name, averaged
        self.tensor = self.current()
        self.start = self.tensor.detach().clone()
        self.version = self.tensor._version

    def current(self) -> torch.Tensor:
        value = self.module._buffers[self.key]
        if value is None or (hasattr(self, "start") and value.shape != self.start.shape):
            raise InputError(f"buffer {self.name} changed its shape during a forward, which is not supported")
        return value

    def changed(self) -> bool:
        """Says whether anything wrote to it, or replaced it, since `settle`."""
        value = self.current()
        if value is not self.tensor or value._version != self.version:
            return True
        return value.numel() <= _COMPARED_ELEMENTS and not torch.equal(value, self.start)

    def set(self, value: torch.Tensor) -> None:
        """Writes `value` into the buffer itself, so that references to it stay good."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.key] = self.tensor
        self.version = self.tensor._version

    def settle(self) -> None:
        """Makes the present value the step's value."""
        with torch.no_grad():
            self.start.copy_(self.tensor)


class ModelBuffers:
    """The buffers of all models of a run.

    Args:
        comm: The ranks.
        models: With distinct modules; a module that two models share is taken once.
    """

    def __init__(self, comm: Collectives, models: Iterable[nn.Module]) -> None:
        self.comm = comm
        self._buffers: list[_Buffer] = []
        seen: set[int] = set()
        for model in models:
            for prefix, module in model.named_modules():
                for key, value in module._buffers.items():
                    if value is None or id(value) in seen:
                        continue
                    seen.add(id(value))
                    averaged = key in _AVERAGED and value.is_floating_point()
                    self._buffers.append(_Buffer(module, key, f"{prefix}.{key}".lstrip("."), averaged))
        # Those known to change travel with every step; others are noticed when they do.
        statistics = {id(buffer.module) for buffer in self._buffers if buffer.averaged}
        self._active = [b for b in self._buffers if id(b.module) in statistics]
        self._quiet = [b for b in self._buffers if id(b.module) not in statistics]
        self._tree: TreeAccumulator[torch.Tensor] | None = None
        self._quiet_changed = False
        self._left: list[torch.Tensor] = []  # by micro-batch 0, for the next step: others still start from this one's
        self._inbox: list[list[torch.Tensor]] = []
        self._pending: Pending | None = None

    def begin_micro_batch(self) -> None:
        """Puts the step's values back, wherever a forward (an evaluation's, say) has changed them."""
        for buffer in self._active:
            buffer.set(buffer.start)
        for buffer in self._quiet:
            if buffer.changed():
                buffer.set(buffer.start)

    def end_micro_batch(self, leaf: int, num_micro: int) -> None:
        """Notes what micro-batch `leaf` left."""
        if self._active:
            if self._tree is None:
                self._tree = TreeAccumulator(num_micro, torch.Tensor.add_)
            self._tree.add(leaf, self._vector(leaf))
        if leaf == 0 and any(buffer.changed() for buffer in self._quiet):
            self._quiet_changed = True
            self._left = [buffer.current().detach().clone() for buffer in self._quiet]

    def _vector(self, leaf: int) -> torch.Tensor:
        """All active buffers as float64, on one device; what is not averaged counts in leaf 0 alone."""
        parts = []
        for buffer in self._active:
            value = buffer.current().detach().to(torch.float64).reshape(-1)
            parts.append(value if buffer.averaged or leaf == 0 else torch.zeros_like(value))
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
            self.comm.broadcast([buffer.start for buffer in self._quiet])
            self._left = []
        for buffer in self._quiet:
            if quiet_changed or buffer.changed():
                buffer.set(buffer.start)
        self._tree, self._pending, self._quiet_changed = None, None, False

    def _set_active(self, total: torch.Tensor, num_micro: int) -> None:
        offset = 0
        for buffer in self._active:
            size = buffer.start.numel()
            value = total[offset : offset + size]
            offset += size
            value = (value / num_micro if buffer.averaged else value).view(buffer.start.shape)
            buffer.set(value.to(buffer.start.dtype))
            buffer.settle()
