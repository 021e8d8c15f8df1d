"""LossScale: keeps the gradients of float16 forwards above what float16 can hold (Micikevicius et al. 2018).

The loss is multiplied by a power of two and the sum of gradients divided by it, which rounds nothing. A step whose
gradient is not finite is left out, by all ranks alike, since they share its norm, and the scale is halved; after a
long time without such a step it is doubled. Values are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.errors import InputError

_START, _INTERVAL = 2.0**16, 2_000


class LossScale:
    """See the module's docstring.

    Attributes:
        value: The scale of the present step.
        good_steps: Since it changed.
    """

    def __init__(self) -> None:
        self.value, self.good_steps = _START, 0
        self._lock, self._running = threading.Lock(), 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, a backward is one of a scaled loss. Not told by its thread: a device's backward has its own."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def check_applied(self, grad: torch.Tensor) -> None:
        """A hook of a model's output. Checks that the backward that reaches a model's output comes from a scaled loss.

        Raises:
            InputError: it does not.
        """
        if not self._running:
            raise InputError("under fp16-mixed call run.backward(loss) in place of loss.backward(): it scales the loss")

    def end_step(self, finite: bool) -> None:
        """Chooses the next step's scale.

        Raises:
            InputError: no scale helps.
        """
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == _INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
        if self.value < 1:
            raise InputError(
                "the gradient is not finite at any loss scale, down to 1; the weights are as they were: lower the "
                "learning rate, or clip_norm, or choose bf16-mixed, whose range is that of float32"
            )
