"""Reduction: the same bits on any number of ranks, under every strategy, and those of adding neighbours pairwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import ThreadCollectives, run_threads
from unisono.errors import CommError, InputError
from unisono.strategy.base import Setup, StepPlan
from unisono.strategy.catalog import STRATEGIES

KINDS = ["plain", "channels_last", "transposed"]
# Of each a few, so that cuts fall everywhere; the largest has three blocks of the layout and a part.
SMALL = [(), (0,), (1,), (3,), (7, 5), (4, 3, 2, 2), (2, 0, 3), (130,), (31,), (2, 65), (5, 2, 3, 3)]
shapes = st.sampled_from([*SMALL, (130, 100)])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@dataclass(frozen=True)
class Problem:
    """The gradients of one step.

    Attributes:
        params: Shape, dtype and memory format of each parameter.
        grads: For each micro-batch, a gradient or None for each parameter.
        scales: Of each micro-batch.
        clip_norm: Largest norm, or None.
        passes: For each micro-batch, the parameters that each call of `backward()` reaches; one reached twice
            gets twice the gradient. Default: all that have a gradient, once.
        halved: Micro-batches whose gradients the user's code halves before `optimizer.step()`.
    """

    params: list[tuple[tuple[int, ...], torch.dtype, str]]
    grads: list[list[torch.Tensor | None]]
    scales: list[float]
    clip_norm: float | None = None
    passes: list[list[list[int]]] | None = None
    halved: frozenset[int] = frozenset()

    def reached(self, leaf: int) -> list[list[int]]:
        return [list(range(len(self.params)))] if self.passes is None else self.passes[leaf]

    def final(self, leaf: int, number: int) -> torch.Tensor | None:
        """What is in `grad` when `optimizer.step()` is called, if it counts."""
        grad, times = self.grads[leaf][number], sum(number in some for some in self.reached(leaf))
        if grad is None or times == 0 or self.scales[leaf] == 0:  # a micro-batch without weight is not there
            return None
        total = sum([grad] * (times - 1), grad)
        return total * 0.5 if leaf in self.halved else total


@dataclass(frozen=True)
class Machine:
    """What must not show.

    Attributes:
        early: Whether gradients may be sent during backward.
        whole: Whether the optimizer is one that needs whole parameters.
    """

    blocks: tuple[range, ...]
    bucket_bytes: int
    one_shot_bytes: int
    early: bool = False
    strategy: str = "ddp"
    whole: bool = False


@dataclass(frozen=True)
class Outcome:
    grads: list[torch.Tensor | None]
    norm: torch.Tensor


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    params = draw(st.lists(st.tuples(shapes, dtypes, st.sampled_from(KINDS)), min_size=1, max_size=5))
    num_micro = draw(st.integers(1, 9))
    # Full micro-batches, short ones, and some that count for nothing.
    scales = draw(
        st.lists(
            st.just(1.0) | st.sampled_from([0.5, 0.125, 0.0]) | st.floats(1e-3, 3),
            min_size=num_micro,
            max_size=num_micro,
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    often = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    grads = []
    for _ in range(num_micro):
        there = torch.rand(len(params), generator=generator) < often
        grads.append([_random(p, generator) if t else None for p, t in zip(params, there.tolist(), strict=True)])
    passes, halved = None, frozenset()
    if draw(st.booleans()):
        some = st.lists(st.integers(0, len(params) - 1), max_size=len(params), unique=True)
        passes = [draw(st.lists(some, max_size=3)) for _ in range(num_micro)]
        halved = draw(st.frozensets(st.integers(0, num_micro - 1), max_size=1))
    return Problem(params, grads, scales, draw(st.sampled_from([None, None, 0.5, 1e9])), passes, halved)


def _random(param: tuple[tuple[int, ...], torch.dtype, str], generator: torch.Generator) -> torch.Tensor:
    shape, dtype, _ = param
    # Magnitudes that make every other order of additions give other bits, and some signed zeros.
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 8 - 4
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponents
    zeros = torch.rand(shape, generator=generator) < 0.1
    return torch.where(zeros, -0.0, value).to(dtype)


@st.composite
def machines(draw: st.DrawFn, problem: Problem) -> Machine:
    num_micro = len(problem.scales)
    world_size = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, num_micro), min_size=world_size - 1, max_size=world_size - 1)))
    blocks = tuple(range(start, stop) for start, stop in zip([0, *cuts], [*cuts, num_micro], strict=True))
    small = st.sampled_from([0, 1, 64, 300, 5_000, 70_000, 10**9])
    strategy = draw(st.sampled_from(["ddp", "zero1", "zero2"]))
    early = draw(st.booleans())
    if strategy == "zero2":
        blocks = tuple(range(rank, num_micro, world_size) for rank in range(world_size))
        early = early and problem.passes is None  # a second backward is refused
    return Machine(blocks, draw(small), draw(small), early, strategy, draw(st.booleans()))


def alone(problem: Problem) -> Machine:
    return Machine((range(len(problem.scales)),), 8 << 20, 256 << 10)


def make_params(problem: Problem) -> list[torch.nn.Parameter]:
    params = []
    for shape, dtype, kind in problem.params:
        value = torch.zeros(shape, dtype=dtype)
        if kind == "channels_last" and len(shape) == 4:
            value = value.to(memory_format=torch.channels_last)
        if kind == "transposed" and len(shape) == 2:
            value = torch.zeros(shape[::-1], dtype=dtype).t()
        params.append(torch.nn.Parameter(value))
    return params


class Odd(torch.optim.SGD):
    """A class that the engine knows nothing of."""


class OneRank:
    """A strategy with its parameters, for as many steps as wanted."""

    def __init__(self, comm: Any, problem: Problem, machine: Machine) -> None:
        self.comm, self.machine = comm, machine
        self.params = make_params(problem)
        names = {id(param): f"p{number}" for number, param in enumerate(self.params)}
        optimizer = (Odd if machine.whole else torch.optim.SGD)(self.params, lr=0.1)
        setup = Setup(
            comm=comm,
            optimizer=optimizer,
            names=names,
            bucket_bytes=machine.bucket_bytes,
            one_shot_bytes=machine.one_shot_bytes,
        )
        self.strategy = STRATEGIES[machine.strategy](setup)

    def step(self, problem: Problem) -> Outcome:
        plan = StepPlan(len(problem.scales), self.machine.blocks)
        self.strategy.optimizer.zero_grad()
        self.strategy.begin_step(plan)
        leaves: list[int | None] = list(plan.blocks[self.comm.rank])
        if self.strategy.strided:
            leaves += [None] * (len(plan.blocks[0]) - len(leaves))
        for leaf in leaves:
            scale = 1.0 if leaf is None else problem.scales[leaf]
            if self.machine.early:
                self.strategy.expect_backward(plan, leaf, lambda scale=scale: scale)
            self._backward(problem, 0 if leaf is None else leaf)
            self.strategy.add_micro_batch(plan, leaf, scale)
            assert all(param.grad is None for param in self.params)
        # As the stepper does it: nobody waits for anything before it has sent what it has.
        mine = self.strategy.presence(), self.strategy.must_resend
        self.strategy.launch(plan)
        told, resend = zip(*self.comm.gather_objects(mine), strict=True)
        if any(resend):
            self.strategy.resend(plan)
        present = [any(bits) for bits in zip(*told, strict=True)]
        norm = self.strategy.complete(math.fsum(problem.scales) or 1.0, present, problem.clip_norm)
        return Outcome(self._update(), norm)

    @torch.no_grad()
    def _update(self) -> list[torch.Tensor | None]:
        """What each optimizer saw, put together: an update that makes the weights the gradient."""
        for param in self.params:
            param.fill_(math.nan)

        def step() -> None:
            for piece in self.strategy.optimizer.param_groups[0]["params"]:
                if piece.grad is not None:
                    piece.copy_(piece.grad)

        self.strategy.update(step)
        return [None if p.isnan().all() else p.detach().clone() for p in self.params]

    def _backward(self, problem: Problem, leaf: int) -> None:
        """Gives the parameters their gradients as a user's loop does."""
        for numbers in problem.reached(leaf):
            pairs = [(self.params[n], grad) for n in numbers if (grad := problem.grads[leaf][n]) is not None]
            if pairs:
                torch.autograd.backward([param * 1 for param, _ in pairs], [grad for _, grad in pairs])
        for param in self.params:
            if leaf in problem.halved and param.grad is not None:
                param.grad.mul_(0.5)


def run_steps(problems: Sequence[Problem], machine: Machine) -> list[list[Outcome]]:
    """Outcomes by rank and step."""

    def body(comm: ThreadCollectives) -> list[Outcome]:
        rank = OneRank(comm, problems[0], machine)
        return [rank.step(problem) for problem in problems]

    return run_threads(len(machine.blocks), body)


def bits(tensor: torch.Tensor) -> bytes:
    """Bits, so that 0.0 and -0.0 differ."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(found: Outcome, wanted: Outcome) -> None:
    assert [g is None for g in found.grads] == [g is None for g in wanted.grads]
    for number, (one, other) in enumerate(zip(found.grads, wanted.grads, strict=True)):
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert bits(one) == bits(other), f"parameter {number} differs"
    assert bits(found.norm) == bits(wanted.norm), f"norms {found.norm.item()!r} and {wanted.norm.item()!r} differ"


def truth(problem: Problem) -> Outcome:
    """What neighbours added pairwise give, in plain tensors."""
    total = math.fsum(problem.scales) or 1.0
    sums: list[torch.Tensor | None] = []
    for number, (shape, dtype, _) in enumerate(problem.params):
        column = [problem.final(leaf, number) for leaf in range(len(problem.scales))]
        parts = [
            torch.zeros(shape, dtype=dtype) if grad is None else grad * scale
            for grad, scale in zip(column, problem.scales, strict=True)
        ]
        while len(parts) > 1:
            odd = parts[len(parts) & ~1 :]
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        # Of no elements, nothing tells whether there was one.
        none = all(grad is None for grad in column) or 0 in shape
        sums.append(None if none else parts[0] / total)
    norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in sums if g is not None))
    return Outcome(sums, torch.tensor(norm, dtype=torch.float64))


SETTINGS = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(problems(), st.data())
def test_no_machine_shows_in_the_gradient(problem: Problem, data: st.DataObject) -> None:
    wanted = run_steps([problem], alone(problem))[0][0]
    machine = data.draw(machines(problem))
    for (found,) in run_steps([problem], machine):
        same(found, wanted)


@SETTINGS
@given(problems(), st.data())
def test_the_gradient_is_the_pairwise_sum(problem: Problem, data: st.DataObject) -> None:
    problem = replace(problem, clip_norm=None)
    wanted = truth(problem)
    machine = data.draw(machines(problem))
    found = run_steps([problem], machine)[0][0]
    same(replace(found, norm=wanted.norm), wanted)
    assert found.norm.item() == pytest.approx(wanted.norm.item(), rel=1e-5)
    assert found.norm.dtype == torch.float64


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.data())
def test_the_step_before_cannot_show(problem: Problem, data: st.DataObject) -> None:
    """Buffers are used again: what an earlier step left in them must be gone."""
    machine = data.draw(machines(problem))
    turned = replace(
        problem,
        grads=[[None if grad is None else -3 * grad for grad in grads] for grads in reversed(problem.grads)],
        scales=problem.scales[::-1],
        passes=None,
    )
    sparser = replace(problem, grads=[[None] * len(problem.params), *problem.grads[1:]])
    steps = [turned, sparser, problem]
    wanted = [run_steps([step], alone(step))[0][0] for step in steps]
    for found in run_steps(steps, machine):
        for outcome, expected in zip(found, wanted, strict=True):
            same(outcome, expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_gives_the_norm_that_was_asked_for(world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [((300, 70), torch.float32, "plain"), ((3,), torch.float32, "plain")]
    problem = Problem(params, [[_random(p, generator) for p in params] for _ in range(4)], [1.0] * 4, 0.5)
    cuts = {1: (range(4),), 3: (range(2), range(2, 3), range(3, 4))}
    for (found,) in run_steps([problem], Machine(cuts[world_size], 64, 0)):
        assert found.norm > 0.5  # the norm before
        after = torch.linalg.vector_norm(torch.cat([g.double().view(-1) for g in found.grads if g is not None]))
        assert after.item() == pytest.approx(0.5, rel=1e-4)
        small = replace(problem, clip_norm=1e9)
        same(run_steps([small], alone(small))[0][0], run_steps([replace(small, clip_norm=None)], alone(small))[0][0])


@pytest.mark.parametrize("one_shot_bytes", [0, 10**9])
def test_a_rank_that_fails_ends_the_others_with_an_error(one_shot_bytes: int) -> None:
    problem = Problem([((5,), torch.float32, "plain")], [[torch.ones(5)]] * 3, [1.0] * 3)
    errors: list[BaseException] = []

    def body(comm: ThreadCollectives) -> None:
        rank = OneRank(comm, problem, Machine((range(1), range(1, 2), range(2, 3)), 64, one_shot_bytes))
        if comm.rank == 1:
            raise ZeroDivisionError
        try:
            rank.step(problem)
        except CommError as error:
            errors.append(error)
            raise

    with pytest.raises(ZeroDivisionError):
        run_threads(3, body)
    assert len(errors) == 2
    assert all("rank 1" in str(error) for error in errors)


def test_these_gradients_tell_orders_apart() -> None:
    """The tests above would show nothing if any order of additions gave the same sum."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        param = ((130,), dtype, "plain")
        parts: list[Any] = [_random(param, generator) for _ in range(5)]
        problem = Problem([param], [[part] for part in parts], [1.0] * 5)
        pairwise = truth(problem).grads[0]
        assert pairwise is not None
        assert not torch.equal(sum(parts[1:], parts[0]) / 5, pairwise)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_missing_gradient_is_a_zero_wherever_it_is_missing(world_size: int) -> None:
    """-0.0 + 0.0 is 0.0, so to leave the addition out shows."""
    problem = Problem([((3,), torch.float32, "plain")], [[torch.full((3,), -0.0)], [None]], [1.0, 1.0])
    blocks = (range(2),) if world_size == 1 else (range(1), range(1, 2))
    for (found,) in run_steps([problem], Machine(blocks, 64, 0)):
        same(found, Outcome([torch.zeros(3)], torch.zeros((), dtype=torch.float64)))


# What each call of `backward()` reaches, in micro-batch 0; each parameter has a bucket of its own or shares one.
PASSES = {
    "once": [[0, 1, 2]],
    "the whole twice": [[0, 1, 2], [0, 1, 2]],
    "again before its bucket is full": [[0], [0, 1], [2]],
    "again and again": [[2], [2], [2, 1], [0]],
    "one by one": [[1], [0], [2]],
    "not all": [[1]],
    "none": [],
}


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("change", [None, "halved", "two dtypes"])
def test_what_was_sent_during_backward_is_what_counts_in_the_end(
    passes: list[list[int]], change: str | None, bucket_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float64 if change == "two dtypes" else torch.float32, torch.float32]
    params = [((5_000,), dtype, "plain") for dtype in dtypes]
    grads: list[Any] = [[_random(param, generator) for param in params] for _ in range(3)]
    halved = frozenset([0]) if change == "halved" else frozenset()
    problem = Problem(params, grads, [1.0, 0.5, 1.0], None, [passes, [[0, 1, 2]], [[2], [0, 1]]], halved)
    wanted = run_steps([problem], alone(problem))[0][0]
    same(replace(wanted, norm=truth(problem).norm), truth(problem))
    for blocks in ((range(1), range(1, 3)), (range(1), range(1, 2), range(2, 3))):
        for one_shot_bytes, strategy in ((0, "ddp"), (10**9, "ddp"), (0, "zero1")):
            machine = Machine(blocks, bucket_bytes, one_shot_bytes, early=True, strategy=strategy)
            for (found,) in run_steps([problem], machine):
                same(found, wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero2_refuses_a_second_backward_that_comes_too_late(world_size: int) -> None:
    params = [((5_000,), torch.float32, "plain")] * 2
    grads: list[Any] = [[torch.ones(5_000)] * 2 for _ in range(2)]
    problem = Problem(params, grads, [1.0, 1.0], None, [[[0, 1], [0, 1]]] * 2)
    blocks = tuple(range(rank, 2, world_size) for rank in range(world_size))
    with pytest.raises(InputError, match=r"backward reached p[01] a second time in one micro-batch.*use the strategy"):
        run_steps([problem], Machine(blocks, 1, 0, early=True, strategy="zero2"))


def test_what_zero2_has_sent_is_no_number_to_whoever_looks() -> None:
    problem = Problem([((5_000,), torch.float32, "plain")], [[torch.ones(5_000)]], [1.0])

    def body(comm: ThreadCollectives) -> None:
        rank = OneRank(comm, problem, Machine((range(1),), 1, 0, strategy="zero2"))
        plan = StepPlan(1, (range(1),))
        rank.strategy.begin_step(plan)
        rank.strategy.expect_backward(plan, 0, lambda: 1.0)
        (rank.params[0] * 2).sum().backward()
        grad = rank.params[0].grad
        assert grad is not None and grad.isnan().all() and grad.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.nn.utils.clip_grad_norm_(rank.params, 1.0)

    run_threads(1, body)
