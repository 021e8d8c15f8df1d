"""What test_user_code.py leaves open: each case by its effect, on 1, 2 and 3 ranks, and under zero2 on 3."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.worlds import outcomes_of_world, run_world
from unisono.errors import CommError, InputError

F = nn.functional
GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(
    torch.randn(44, 6, generator=GENERATOR), torch.randint(0, 3, (44,), generator=GENERATOR)
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def digest_of(body: Callable[..., Any], strategy: str, *args: Any) -> tuple[str, Any]:
    with unisono.init(seed=5, strategy=strategy, timeout_s=20) as run:
        found = body(run, *args)
        return run.weights_digest(), found


def everywhere(body: Callable[..., Any], *args: Any, sharded: tuple[str, ...] = ("zero2",)) -> tuple[str, Any]:
    expected = run_world(1, digest_of, body, "ddp", *args)[0]
    for world_size, strategy in ((2, "ddp"), (3, "ddp"), *((3, name) for name in sharded)):
        for rank, found in enumerate(run_world(world_size, digest_of, body, strategy, *args)):
            assert found == expected, f"rank {rank} of {world_size}, {strategy}"
    return expected


def refused(worlds: tuple[int, ...], words: tuple[str, ...], body: Callable[..., Any], *args: Any) -> None:
    for world_size in worlds:
        outcomes = outcomes_of_world(world_size, digest_of, body, "ddp", *args)
        assert all(isinstance(o.error, InputError | CommError) for o in outcomes), [repr(o.error) for o in outcomes]
        texts = [str(o.error) for o in outcomes if isinstance(o.error, InputError)]  # a slower rank may see it part
        assert any(all(word in text for word in words) for text in texts), texts


def prepared(run: unisono.Run, model: nn.Module, optimizer: Any = None, micro_batch: int = 4) -> Any:
    optimizer = optimizer or sgd(model.parameters())
    return run.prepare(model, optimizer, DATA, global_batch=12, micro_batch=micro_batch)


def left_out(run: unisono.Run, micro_batch: int, skipped: tuple[int, ...]) -> tuple[bool, int]:
    model, optimizer, loader = prepared(run, net(), micro_batch=micro_batch)
    start = model[0].weight.clone()
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if run.step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
    return not torch.equal(start, model[0].weight), run.step


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_steps_left_out_by_run_step_end_alike(micro_batch: int) -> None:
    assert everywhere(left_out, micro_batch, (3,))[1][0]


def unseen(run: unisono.Run, change: str) -> bool:
    model, optimizer, loader = prepared(run, net())
    start = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        for param in model.parameters():
            grad = param.grad.data
            _ = {"clamp": lambda g: g.clamp_(-1e-3, 1e-3), "double": lambda g: g.mul_(2)}.get(change, id)(grad)
        optimizer.step()
        optimizer.zero_grad()
    far = max(float((p.detach() - s).abs().max()) for p, s in zip(model.parameters(), start, strict=True))
    assert change != "clamp" or 0 < far < 1e-3  # 4 updates of 0.1 * 1e-3 at most
    return far > 0


def test_hidden_changes_of_a_gradient_take_effect() -> None:
    digests = [everywhere(unseen, change, sharded=("zero1",))[0] for change in ("", "clamp", "double")]
    assert len(set(digests)) == 3


class Noisy(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad).add_(torch.randn_like(param), alpha=1e-3)


def noisy(run: unisono.Run, micro_batch: int) -> list[float]:
    model = net()
    model, optimizer, loader = prepared(run, model, Noisy(model.parameters()), micro_batch)
    drawn = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step_done:
            drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 4
    return drawn


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_an_optimizer_that_draws(micro_batch: int) -> None:
    everywhere(noisy, micro_batch, sharded=())


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_an_optimizer_that_draws_in_shards(strategy: str) -> None:
    for world_size in (1, 2):
        outcomes = outcomes_of_world(world_size, digest_of, noisy, strategy, 4)
        assert any("draws random numbers in its update" in str(outcome.error) for outcome in outcomes)


def echo(run: unisono.Run) -> bool:
    """Whether what the loop draws after an update repeats what the optimizer drew in it."""
    model = nn.Linear(6, 3)
    optimizer = Noisy(model.parameters())
    _, optimizer, loader = prepared(run, model, optimizer)
    torch_randn_like, first = torch.randn_like, []
    torch.randn_like = lambda t: first.append(torch_randn_like(t)) or first[-1]  # type: ignore[assignment]
    try:
        for x, y in loader:
            first.clear()  # the optimizer's own draws of this step, the weight's first
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if run.step_done and torch.equal(torch.randn(3, 6), first[0]):
                return True
    finally:
        torch.randn_like = torch_randn_like
    return False


def test_the_loop_does_not_draw_what_the_optimizer_drew() -> None:
    assert not any(run_world(w, digest_of, echo, "ddp")[0][1] for w in (1, 2))


class Momentum(nn.Module):
    def __init__(self, in_forward: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.in_forward = in_forward

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward:
            self.follow()
        return self.query(x) + self.key(x)


def momentum(run: unisono.Run, at: str, micro_batch: int = 4) -> bool:
    model = Momentum(at == "forward")
    start = model.key.weight.clone()
    _, optimizer, loader = prepared(run, model, sgd(model.query.parameters()), micro_batch)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        if at == "before step":
            model.follow()
        optimizer.step()
        if at == "step_done" and run.step_done:
            model.follow()
        optimizer.zero_grad()
    return not torch.equal(start, model.key.weight)


@pytest.mark.parametrize("at", ["forward", "before step"])
def test_a_momentum_encoder_in_the_wrong_place(at: str) -> None:
    refused((1, 2, 3), ("parameter key.weight was changed", "run.step_done"), momentum, at)
    assert run_world(1, digest_of, momentum, "ddp", at, 12)[0][1], "with one micro-batch a step it is right"


def test_a_momentum_encoder_in_the_right_place() -> None:
    assert everywhere(momentum, "step_done")[1]


def transposed(run: Any, fused: bool, ours: bool) -> list[Any]:
    torch.manual_seed(3)
    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.randn(5, 3).t())
    optimizer: Any = torch.optim.AdamW([weight], lr=0.01, fused=fused, foreach=not fused)
    batches: Any = [DATA.tensors]
    if ours:
        _, optimizer, batches = run.prepare(model, optimizer, DATA, global_batch=44, micro_batch=11, shuffle=False)
    for _epoch in range(5):
        for x, _y in batches:
            (x[:, :3] @ weight).tanh().sub(1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert tuple(weight.shape) == (3, 5)
    return weight.detach().tolist()


def test_fused_and_transposed_is_what_plain_pytorch_gives() -> None:
    _, found = everywhere(transposed, True, True)
    expected = run_world(1, transposed, None, False, False)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def toggled(run: unisono.Run) -> tuple[bool, bool]:
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    starts = generator.weight.clone(), critic.weight.clone()
    _, opt_c, loader = run.prepare(critic, sgd(critic.parameters()), DATA, global_batch=12, micro_batch=4)
    _, opt_g = run.prepare(generator, sgd(generator.parameters()))
    for x, _ in loader:
        generator.requires_grad_(False)
        critic.requires_grad_(True)
        (critic(generator(x)) - critic(x)).tanh().mean().backward()
        opt_c.step()
        opt_c.zero_grad()
        generator.requires_grad_(True)
        critic.requires_grad_(False)
        critic(generator(x)).tanh().mean().neg().backward()
        opt_g.step()
        opt_g.zero_grad()
    run.flush()
    return not torch.equal(starts[0], generator.weight), not torch.equal(starts[1], critic.weight)


def test_two_optimizers_toggled() -> None:
    assert everywhere(toggled)[1] == (True, True)


def loaded(run: unisono.Run, last: bool) -> tuple[bool, bool, bool]:
    """The second epoch leaves the statistics alone, so that they end as they were loaded, or were put back."""
    model, optimizer, loader = prepared(run, net())
    saved, before = copy.deepcopy(model.state_dict()), run.weights_digest()
    for epoch in range(2):
        model[1].train(epoch == 0)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = run.weights_digest() != before
        if epoch == 0 or last:
            model.load_state_dict(saved)
    run.flush()
    kept = all(torch.equal(value, saved[name]) for name, value in model.named_buffers())
    return moved, kept, run.weights_digest() == before


def test_a_loaded_state_is_the_state() -> None:
    assert everywhere(loaded, True)[1] == (True, True, True)
    assert everywhere(loaded, False)[1] == (True, True, False)


def drifting(run: unisono.Run, since: int) -> None:
    model = net()
    rest = sgd(model[3].parameters())
    _, optimizer, loader = prepared(run, model, sgd(model[0].parameters()))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if run.step_done and run.step > since:
            rest.step()
        model.zero_grad()
        if run.step == since + 1:
            break
    run.close()


@pytest.mark.parametrize("since", [0, 2])
def test_drift_ends_the_run_at_its_close_at_the_latest(since: int) -> None:
    """After step 3 no power of two comes any more: only the end can see it."""
    refused((2,), ("the ranks' weights have parted", "3."), drifting, since)


def both_done(run: unisono.Run) -> list[Any]:
    one, two = net(), net()
    average = copy.deepcopy(one)
    _, first, loader = prepared(run, one)
    _, second = run.prepare(two, sgd(two.parameters()))
    seen, moved = [], two[0].weight.clone()
    for x, y in itertools.chain(loader, loader):
        F.cross_entropy(one(x), y).backward()
        first.step()
        between = run.step_done
        F.cross_entropy(two(x), y).backward()
        second.step()
        assert not between, "not before both were stepped"
        if run.step_done:
            seen.append((run.step, torch.equal(moved, two[0].weight)))
            moved = two[0].weight.clone()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), one.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    return [seen, unisono.weights_digest(dict(average.named_parameters()))]


def test_step_done_with_two_optimizers() -> None:
    assert everywhere(both_done)[1][0] == [(step, False) for step in range(1, 9)]


def cycled(run: unisono.Run, form: str) -> int:
    model, extra = net(), nn.Linear(1, 1)
    many, few = (torch.utils.data.TensorDataset(*(t[:n] for t in DATA.tensors)) for n in (36, 24))
    _, optimizer, loader = run.prepare(model, sgd(model.parameters()), many, global_batch=12, micro_batch=4)
    _, _, other = run.prepare(extra, sgd(extra.parameters()), few, global_batch=12, micro_batch=4)

    def again() -> Any:
        while True:
            yield from other

    second = iter(itertools.cycle(other)) if form == "cycle" else again()
    for _ in range(2):
        for x, y in loader:
            x2, y2 = next(second)
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(x2), y2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    run.flush()
    return run.step


@pytest.mark.parametrize("form", ["cycle", "again"])
def test_the_second_loader_goes_round(form: str) -> None:
    assert everywhere(cycled, form)[1] == 6


def frozen(run: unisono.Run) -> bool:
    model = net().double()
    norm: Any = model[1]
    with torch.no_grad():
        norm.running_mean.copy_(torch.randn(20).double() / 3)
        norm.running_var.copy_(torch.rand(20).double() + 1 / 3)
    before = {name: value.clone() for name, value in model.named_buffers()}
    _, optimizer, loader = prepared(run, model, micro_batch=2)
    norm.eval()
    start = model[0].weight.clone()
    for x, y in itertools.chain(loader, loader):
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    same = all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    return same and not torch.equal(start, model[0].weight)


def test_every_frozen_buffer_in_float64_stays() -> None:
    assert everywhere(frozen)[1]
