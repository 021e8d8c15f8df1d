"""The seam `Strategy`: what happens to the gradients of one optimizer between backward and the next forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from unisono.comm.api import Collectives
from unisono.strategy.backward import backward
from unisono.strategy.flat import BUCKET_BYTES, ONE_SHOT_BYTES
from unisono.strategy.loss_scale import LossScale
from unisono.strategy.offload import Offload
from unisono.strategy.saved import Held, HeldState


@dataclass(frozen=True)
class StepPlan:
    """What all ranks know of a step before it is exchanged.

    Attributes:
        num_micro: Leaves of the tree.
        blocks: The leaves of each rank.
    """

    num_micro: int
    blocks: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a strategy is made with.

    Attributes:
        comm: The ranks.
        optimizer: The user's own object; its parameters are what is trained.
        names: Names of parameters by id, for messages.
        on_note: Called with a sentence for the user.
        shard_size: Ranks of a team that keep one copy of the weights together; None for the strategy's own.
        offload: Where the optimizer's state goes, if not beside the weights.
        masters: Whether updates are made in float32, on a second copy of weights that have 16 bits.
        bucket_bytes: The unit of one exchange. The bits do not depend on it.
        workers: For dp: threads, or devices, that share the micro-batches.
        devices: For dp: where the models are, then where they are copied to; empty for threads that share them.
        one_shot_bytes: Gradients are sent to all, and added up by all, where that sends less than so many bytes
            more: half the waits, and all of it during backward. The bits do not depend on it.
    """

    comm: Collectives
    optimizer: torch.optim.Optimizer
    names: Mapping[int, str]
    on_note: Callable[[str], None] = lambda note: None
    shard_size: int | None = None
    offload: Offload | None = None
    masters: bool = False
    workers: int = 1
    devices: Sequence[torch.device] = ()
    bucket_bytes: int = BUCKET_BYTES
    one_shot_bytes: int = ONE_SHOT_BYTES


class Strategy(ABC):
    """How the parameters of one optimizer are reduced and updated.

    One instance an optimizer, so that a GAN's two have a life of their own. The life of a step:
    `begin_step`, `add_micro_batch` once a micro-batch, `launch` (starts to send), `complete` (the optimizer may
    run). What is not abstract is for strategies that send gradients before a step's end.

    Args:
        setup: What it is made with.
    """

    name: ClassVar[str]
    strided: ClassVar[bool] = False
    """Whether micro-batches are dealt out in rounds; see `Schedule`."""
    shards_weights: ClassVar[bool] = False
    """Whether a forward is collective, and parameters are whole only inside of it and of `whole`."""

    in_threads: ClassVar[bool] = False
    """Whether `end_backward` has something to wait for."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.comm, self.optimizer = setup, setup.comm, setup.optimizer

    def attach(self, models: Sequence[nn.Module]) -> None:
        """Told of the models, before the first step."""
        return None

    def whole(self) -> AbstractContextManager[None]:
        """Collective: inside, every rank has all weights, to read and (all alike) to write."""
        return nullcontext()

    @contextmanager
    def streaming(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Collective: inside, weights come one after the other, so that they need not fit together.

        Yields:
            What returns the whole of a parameter or buffer; it is called on all ranks in the same order.
        """
        yield lambda tensor: tensor

    def held_weights(self) -> dict[int, Held]:
        """What this rank has of weights that it does not have as a whole, by the parameter's id."""
        return {}

    def held_state(self) -> HeldState:
        """What this rank has of the optimizer's state."""
        found = HeldState()
        found.add_all(self.optimizer.state)
        return found

    def forget_state(self) -> None:
        """Forgets the optimizer's state: other state is about to be put into `optimizer.state`."""
        self.optimizer.state.clear()

    def own_state(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Returns loaded state of a parameter as `optimizer.state` is to have it: in memory of its own.

        Args:
            param: Whose state it is.
            state: By key; tensors lie in a file, and are whole.
        """
        return {key: _copy_for(param, value) for key, value in state.items()}

    @abstractmethod
    def begin_step(self, plan: StepPlan) -> None:
        """Forgets the last step's gradients."""

    def begin_micro_batch(self) -> None:
        """Collective: ends what other optimizers' losses have begun in the models since the last `add_micro_batch`."""
        return None

    @abstractmethod
    def expect_backward(self, plan: StepPlan, leaf: int | None, scale: Callable[[], float]) -> None:
        """Told before a forward, where nobody else's backward can reach the gradients: they may be sent early.

        Args:
            plan: Of the step.
            leaf: The micro-batch, None for a shadow.
            scale: Its scale, known once backward begins.
        """

    def backward(self, loss: torch.Tensor, loss_scale: LossScale | None) -> None:
        """What `run.backward` does with a loss that was checked."""
        backward(loss, loss_scale)

    @abstractmethod
    def adopt_newcomers(self, plan: StepPlan) -> None:
        """Takes in parameters that were thawed or added since the step began; on all ranks alike."""

    @abstractmethod
    def add_micro_batch(self, plan: StepPlan, leaf: int | None, scale: float) -> None:
        """Takes the gradients of one micro-batch out of the parameters; collective if strided.

        Args:
            plan: Of the step.
            leaf: The micro-batch, None for a shadow.
            scale: What its gradients are multiplied by.
        """

    def skip_micro_batch(self, plan: StepPlan) -> None:
        """The same for a micro-batch that ended without `optimizer.step()`: its gradients are dropped."""
        return None

    def end_backward(self, plan: StepPlan) -> None:
        """Waits for what still runs of the step's backwards, after its last micro-batch."""
        return None

    def launch(self, plan: StepPlan) -> None:
        """Collective: starts the exchange, once this rank's last micro-batch is in."""
        return None

    @property
    def began(self) -> bool:
        """Whether this rank has begun to send in this step, without `launch`."""
        return False

    def cancel(self, plan: StepPlan) -> None:
        """Collective: ends what some rank began to send in a step in which this optimizer was not stepped."""
        return None

    @property
    def must_resend(self) -> bool:
        """Whether this rank sent a gradient early that was not final."""
        return False

    def resend(self, plan: StepPlan) -> None:
        """Collective: exchanges all gradients of the step again, since a rank had to."""
        return None

    @abstractmethod
    def complete(self, total: float, present: Sequence[bool], clip_norm: float | None) -> torch.Tensor:
        """Collective: waits for the sum, divides it by `total`, clips it, and gives it to the optimizer.

        Args:
            total: Sum of the scales of the step's micro-batches.
            present: For each parameter, whether any micro-batch had a gradient for it.
            clip_norm: Largest norm, or None.

        Returns:
            The norm of the whole gradient before clipping, a float64 scalar on the parameters' device.
        """

    @abstractmethod
    def update(self, step: Callable[[], Any]) -> None:
        """Collective: lets the optimizer's own `step` work; afterwards every rank has the new weights."""

    def close(self) -> None:
        """Gives back threads; idempotent."""
        return None

    @abstractmethod
    def presence(self) -> list[bool]:
        """For each parameter, whether a micro-batch of this rank had a gradient for it in this step."""

    @abstractmethod
    def parameter_names(self) -> list[str]:
        """In the order of `presence`."""


def _copy_for(param: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == param.shape and param.dim():
        copy = torch.empty_like(param, dtype=value.dtype)  # strides too: kernels are slow where they differ
        return copy.copy_(value)
    return value.to(param.device, copy=True) if value.dim() else value.clone()
