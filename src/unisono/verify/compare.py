"""Comparison of two traces: where they part first, by how much, and what that says of the cause."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.verify.trace import Trace


@dataclass(frozen=True)
class Difference:
    """Where a run parts from the reference.

    Attributes:
        kind: "micro-batches", "data", "loss", "weights" or "threads": what differs first.
        step: From 1.
        micro: The first micro-batch that differs, or None.
        tensor: The first tensor that differs after that step, or None.
        max_ulps: The largest distance in that step's weights, in units of the last place; None if not measured.
    """

    kind: str
    step: int
    micro: int | None = None
    tensor: str | None = None
    max_ulps: int | None = None


def first_difference(reference: Trace, other: Trace) -> Difference | None:
    """Returns where `other` parts from `reference`, None if nowhere."""
    if reference.threads != other.threads:
        return Difference("threads", 1)
    for step, (here, there) in enumerate(zip(reference.steps, other.steps, strict=False)):
        tensor = next((name for name in here if here[name] != there.get(name)), None)
        if tensor is None and here.keys() != there.keys():
            tensor = min(there.keys() - here.keys())
        found = _first_micro(reference, other, step)
        if tensor is not None or found is not None:
            kind, micro = found or ("weights", None)
            return Difference(kind, step + 1, micro, tensor)
    if len(reference.steps) != len(other.steps):
        return Difference("micro-batches", min(len(reference.steps), len(other.steps)) + 1)
    return None


def _first_micro(reference: Trace, other: Trace, step: int) -> tuple[str, int] | None:
    """The first micro-batch of a step that is missing, has other data or another loss."""
    prefix = f"{step}/"
    keys = {key for trace in (reference, other) for key in trace.micros if key.startswith(prefix)}
    for key in sorted(keys, key=lambda key: int(key.removeprefix(prefix))):
        here, there = reference.micros.get(key), other.micros.get(key)
        index = int(key.removeprefix(prefix))
        if here is None or there is None:
            return "micro-batches", index
        if here[0] != there[0]:
            return "data", index
        if here[1] != there[1]:
            return "loss", index
    return None


def cause(difference: Difference, *, repeats: bool, same_strategy: bool) -> str:
    """Returns the likely cause in one sentence.

    Args:
        difference: From the reference.
        repeats: Whether the reference gives the same once more.
        same_strategy: Whether another number of processes parts under the reference's own strategy too.
    """
    if difference.kind == "threads":
        return "the runs use another number of intra-op threads: something in the recipe calls torch.set_num_threads"
    if difference.kind == "micro-batches":
        return f"step {difference.step} has other micro-batches: the order or the number of samples was changed"
    where = f"step {difference.step}, micro-batch {difference.micro}"
    if difference.kind == "data":
        return (
            f"{where} got other data for the same samples: the dataset, its transforms or the collate function draw "
            "from a generator of their own, count their calls, or ask for the rank; or the sampling was changed"
        )
    if not repeats:
        return (
            f"not even one process gives the same twice (from step {difference.step} on): a non-deterministic kernel, "
            "or state outside of the model (the time, a global counter, a generator that nobody seeds)"
        )
    if difference.kind == "loss":
        return (
            f"{where} has the same data and weights and another loss: model or loss draw random numbers from a "
            "generator of their own or by rank, or keep state outside of the model between micro-batches"
        )
    if same_strategy:
        return (
            f"all losses of step {difference.step} agree and the weights do not: gradients were added in another order"
        )
    return (
        f"all losses of step {difference.step} agree and the weights do not, under this strategy only: the optimizer "
        "looks at more than it is given there, or gradients were added in another order"
    )
