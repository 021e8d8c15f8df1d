"""`dp`: one process; the backward of one micro-batch runs beside the forward of the next.

Forwards run one after the other on the main thread, since all threads of a process draw from the same generators.
Each backward is given to a thread and brings its own gradient, so nothing is added up anywhere but in the tree. With
several accelerators each micro-batch has one, with a copy of the weights (`Replicas`); on a CPU all share them.
Measured beside threads that run whole micro-batches: docs/design/0006-dataparallel.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.errors import InputError
from unisono.strategy.backward import backward
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.replicas import Replicas, add_gradient
from unisono.strategy.replicated import ReplicatedStrategy


@dataclass
class _Job:
    """A backward in a thread.

    Attributes:
        params: Whose gradients it finds; those that have a copy where the forward ran come twice.
        count: How many there are, each once.
        found: Theirs, then those of the copies.
        leaf: The micro-batch.
        scale: Of its gradients.
    """

    params: list[torch.Tensor]
    count: int
    found: Future[tuple[torch.Tensor | None, ...]]
    leaf: int = 0
    scale: float = 1.0

    def show(self) -> None:
        """Waits, and puts the gradients where a backward of the main thread would have put them."""
        for number, (param, grad) in enumerate(zip(self.params, self.found.result(), strict=True)):
            if number < self.count:
                param.grad = None
            add_gradient(param, grad)


class ThreadedStrategy(ReplicatedStrategy):
    """See the module's docstring."""

    name = "dp"
    in_threads = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._workers = setup.workers
        self._replicas = Replicas(setup.devices)
        self._pool = ThreadPoolExecutor(max(1, self._workers - 1), "unisono-backward")
        self._leaf: int | None = None
        self._turn = 0  # which micro-batch of the step this is
        self._job: _Job | None = None  # of the present micro-batch
        self._jobs: list[_Job] = []  # of those before it, in order
        self._away: dict[torch.Tensor, torch.Tensor] = {}
        self._known = False  # whether a step has shown what backward does
        self._alone = self._workers == 1  # whether it has to stay in the main thread

    def attach(self, models: Sequence[nn.Module]) -> None:
        self._replicas.attach(models)

    def begin_step(self, plan: StepPlan) -> None:
        self._drop()
        self._replicas.begin_step()
        super().begin_step(plan)
        self._turn = 0

    def expect_backward(self, plan: StepPlan, leaf: int | None, scale: Callable[[], float]) -> None:
        self._leaf = leaf
        self._replicas.choose(self._turn if self._known and not self._alone else 0)
        self._turn += 1

    def backward(self, loss: torch.Tensor, loss_scale: LossScale | None) -> None:
        if not self._known or self._alone or self._leaf is None or self._job is not None:
            if self._job is not None:  # a second backward adds its gradients to those of the first
                self._job.show()
                self._job = None
            if self._alone or self._leaf is None:
                backward(loss, loss_scale)
                return
            usual = _python_calls(loss.new_zeros(loss.shape, requires_grad=True), loss_scale)
            hooks = any(getattr(param, "_post_accumulate_grad_hooks", None) for param in self._params())
            # Beside the next forward it would be no good, and a checkpoint even draws from the generators.
            if _python_calls(loss, loss_scale) > usual or hooks:
                self._stay("backward runs Python code (hooks, custom functions, checkpointing)")
            return
        params = [param for param in self._params() if param.requires_grad]
        pairs = [pair for pair in self._replicas.pairs() if pair[1].requires_grad]
        inputs = [*params, *(other for _, other in pairs)]
        # One more than there are threads, so that none waits for this one; else this one does it by itself.
        if sum(not job.found.done() for job in self._jobs) < self._workers:
            found = self._pool.submit(_differentiate, loss, inputs, loss_scale)
        else:
            found = Future[tuple[torch.Tensor | None, ...]]()
            found.set_result(_differentiate(loss, inputs, loss_scale))
        self._job = _Job([*params, *(param for param, _ in pairs)], len(params), found)
        for param in params:
            param.grad = self._placeholder(param)

    def _stay(self, reason: str) -> None:
        if not self._alone:
            self._alone = True
            self.setup.on_note(f"dp: {reason}, so it stays in the main thread, one after the other")

    def _placeholder(self, param: torch.Tensor) -> torch.Tensor:
        """What stands for a gradient that is being computed: not a number, and not to be written to."""
        if param not in self._away:
            self._away[param] = torch.full((), torch.nan, dtype=param.dtype, device=param.device).expand(param.shape)
        return self._away[param]

    def add_micro_batch(self, plan: StepPlan, leaf: int | None, scale: float) -> None:
        job, self._job, self._leaf = self._job, None, None
        if job is None or leaf is None:
            self._replicas.bring_gradients()
            super().add_micro_batch(plan, leaf, scale)
            return
        if all(param.grad is self._away.get(param) for param in job.params[: job.count]):
            job.leaf, job.scale = leaf, scale
            self._jobs.append(job)
            self._add_finished(plan, wait=False)
        elif any(param.grad is not None for param in job.params[: job.count]):
            raise InputError(
                "a gradient was changed between run.backward() and optimizer.step(), while dp computes it in another "
                "thread: clip with prepare(clip_norm=...), or use the strategy ddp"
            )
        else:  # zero_grad()
            job.found.result()
            super().add_micro_batch(plan, leaf, scale)

    def _add_finished(self, plan: StepPlan, *, wait: bool) -> None:
        while self._jobs and (wait or self._jobs[0].found.done()):
            job = self._jobs.pop(0)
            for param in self._params():
                param.grad = None
            job.show()
            super().add_micro_batch(plan, job.leaf, job.scale)

    def end_backward(self, plan: StepPlan) -> None:
        self._add_finished(plan, wait=True)

    def skip_micro_batch(self, plan: StepPlan) -> None:
        if self._job is not None:
            self._job.found.result()
            self._job = None

    def update(self, step: Callable[[], Any]) -> None:
        super().update(step)
        self._known = True

    def _drop(self) -> None:
        for job in [*self._jobs, *([self._job] if self._job else [])]:
            job.found.result()
        self._jobs, self._job = [], None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _python_calls(loss: torch.Tensor, loss_scale: LossScale | None) -> int:
    """Runs a backward; returns how many Python functions were called after its begin, in the thread where it ran."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is not LossScale.check_applied.__code__

    before = sys.getprofile()
    # From inside of it: on an accelerator a backward has a thread of its own.
    handle = loss.register_hook(lambda grad: sys.setprofile(count))  # type: ignore[no-untyped-call]
    try:
        backward(loss, loss_scale)
    finally:
        handle.remove()
        sys.setprofile(before)
    return calls


def _differentiate(
    loss: torch.Tensor, inputs: Sequence[torch.Tensor], loss_scale: LossScale | None
) -> tuple[torch.Tensor | None, ...]:
    with nullcontext() if loss_scale is None else loss_scale.applied():
        loss = loss.reshape(()) if loss_scale is None else loss.reshape(()) * loss_scale.value
        return torch.autograd.grad(loss, inputs, allow_unused=True)
