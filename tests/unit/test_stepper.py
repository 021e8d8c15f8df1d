"""From micro-batches to optimizer steps, on one rank and on ranks that are threads."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.fakes import ThreadCollectives, run_threads
from unisono.comm.api import Collectives
from unisono.comm.local import LocalCollectives
from unisono.errors import CommError, InputError, Interrupted
from unisono.launch.environment import Place
from unisono.launch.session import Session
from unisono.observe.events import StepOutcome
from unisono.observe.timer import PhaseTimer
from unisono.prepare import Preparation
from unisono.strategy.stepper import Stepper

CPU = torch.device("cpu")
SAMPLES = [(torch.randn(4, generator=torch.Generator().manual_seed(n)), float(n % 3)) for n in range(22)]


class Rig:
    """What `unisono.init` and `run.prepare` put together, with what is told kept in lists."""

    def __init__(self, comm: Collectives | None = None, lag: int = 0) -> None:
        self.outcomes: list[StepOutcome] = []
        self.notes: list[str] = []
        comm = comm or LocalCollectives()
        session = Session(Place(comm.rank, comm.world_size), CPU, comm, None, 10.0)
        timer = PhaseTimer(CPU)
        self.stepper = Stepper(
            comm, CPU, seed=0, timer=timer, on_step=self.outcomes.append, on_note=self.notes.append, lag=lag
        )
        self.preparation = Preparation(session, self.stepper, timer, seed=0, strategy="ddp")

    def optimizer(self, model: nn.Module, optimizer: Any, schedule: Any = None, clip_norm: float | None = None) -> Any:
        self.preparation.add_model(model, None)
        self.preparation.check([model], optimizer, schedule, clip_norm)
        self.preparation.add_optimizer(optimizer, schedule, clip_norm, self.notes.append)
        return optimizer

    def loader(self, batch: int = 8, micro: int = 4, samples: Any = SAMPLES, **options: Any) -> Any:
        return self.preparation.loader(samples, global_batch=batch, micro_batch=micro, **options)


def net(seed: int = 0) -> nn.Sequential:
    # From a generator of its own: ranks that are threads share the global one.
    model, generator = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return model


def loss_of(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).float().pow(2).mean()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist()


def turn(rig: Rig, model: nn.Module, optimizer: Any, batch: Any, **logged: float) -> None:
    """What a user's loop does with a batch."""
    loss = loss_of(model, batch)
    loss.backward()
    rig.stepper.log({"loss": loss.detach(), **logged})
    optimizer.step()
    optimizer.zero_grad()


def told(outcomes: list[StepOutcome]) -> list[tuple[Any, ...]]:
    return [(o.step, o.epoch, o.num_samples, o.lr, o.grad_norm(), tuple(o.values.items())) for o in outcomes]


# Records


def train(comm: Collectives, lag: int, epochs: int = 2) -> tuple[list[tuple[Any, ...]], list[int], list[float]]:
    """Returns what was told, how many steps had been told after each step, and the weights."""
    rig, model = Rig(comm, lag), net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rig.optimizer(model, optimizer, schedule)
    loader, behind = rig.loader(), []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            step = rig.stepper.step
            turn(rig, model, optimizer, batch, number=float(number))
            if rig.stepper.step != step:
                behind.append(rig.stepper.step - len(rig.outcomes))
    rig.stepper.settle()
    rig.stepper.flush()
    rig.stepper.flush()
    assert set(rig.outcomes[0].times()) >= {"step_s", "forward_s"}
    return told(rig.outcomes), behind, weights(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lag_gives_the_same_records_only_later(world_size: int) -> None:
    prompt = run_threads(world_size, lambda comm: train(comm, lag=0))
    late = run_threads(world_size, lambda comm: train(comm, lag=1))
    # 22 samples, 8 a step: three steps an epoch, the last of 6.
    assert [record[:3] for record in prompt[0][0]] == [(1, 0, 8), (2, 0, 8), (3, 0, 6), (4, 1, 8), (5, 1, 8), (6, 1, 6)]
    for rank in range(world_size):
        assert prompt[rank][1] == [0] * 6
        assert late[rank][1] == [1] * 6
        assert late[rank][0] == prompt[rank][0] == prompt[0][0]
        assert late[rank][2] == prompt[rank][2] == prompt[0][2]
    rates = [record[3] for record in prompt[0][0]]
    assert rates == pytest.approx([0.05 * 0.9**k for k in range(6)])  # each the one that its step used


def test_the_loss_of_a_step_is_the_mean_over_its_samples() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    losses: list[float] = []
    for batch in rig.loader(batch=10, micro=4):  # micro-batches of 4, 4 and 2, then 4, 4, 2, then 2
        losses += ((model(batch[0]).squeeze(1) - batch[1]) ** 2).tolist()
        turn(rig, model, optimizer, batch)
    assert [outcome.num_samples for outcome in rig.outcomes] == [10, 10, 2]
    for outcome, part in zip(rig.outcomes, (losses[:10], losses[10:20], losses[20:]), strict=True):
        assert outcome.values["loss"] == pytest.approx(sum(part) / len(part), rel=1e-5)


# What users get wrong


def test_a_second_step_in_one_micro_batch_is_refused() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    for batch in rig.loader():
        loss_of(model, batch).backward()
        optimizer.step()
        with pytest.raises(InputError, match="twice in one micro-batch"):
            optimizer.step()
        break


def test_a_step_after_a_finished_step_is_refused() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    for batch in rig.loader(batch=4):
        turn(rig, model, optimizer, batch)
        with pytest.raises(InputError, match="twice in one micro-batch"):
            optimizer.step()
        break


def test_a_step_outside_of_the_loop_is_refused() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    before = weights(model)
    loss_of(model, (torch.ones(2, 4), torch.ones(2))).backward()
    with pytest.raises(InputError, match="outside of the prepared loader's loop"):
        optimizer.step()
    for batch in rig.loader():
        turn(rig, model, optimizer, batch)
    after = weights(model)
    with pytest.raises(InputError, match="outside of the prepared loader's loop"):
        optimizer.step()
    assert before != after == weights(model)


@pytest.mark.parametrize("forgotten", [0, 1, 2])
def test_a_forgotten_step_is_named(forgotten: int) -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    before = weights(model)

    def loop() -> None:
        for number, batch in enumerate(rig.loader(batch=12, micro=4)):
            loss_of(model, batch).backward()
            if number != forgotten:
                optimizer.step()

    with pytest.raises(InputError, match="in some micro-batches of step 0 and not in others"):
        loop()
    assert weights(model) == before


def test_batches_that_are_only_looked_at_are_no_steps() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    loader = rig.loader()
    for _ in loader:
        pass
    assert rig.stepper.step == 0
    assert rig.outcomes == []
    for batch in loader:
        turn(rig, model, optimizer, batch)
    assert rig.stepper.step == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_that_is_left_inside_a_step_drops_that_step(world_size: int) -> None:
    def second_epoch(comm: Collectives, with_gradients: bool) -> tuple[list[float], list[str], int]:
        rig, model = Rig(comm), net()
        optimizer = rig.optimizer(model, sgd(model))
        loader = rig.loader(batch=16, micro=4)
        for batch in loader:
            if with_gradients:
                turn(rig, model, optimizer, batch)
            break
        assert rig.stepper.step == 0
        for batch in loader:
            turn(rig, model, optimizer, batch)
        return weights(model), rig.notes, rig.stepper.step

    clean = run_threads(world_size, lambda comm: second_epoch(comm, False))
    left = run_threads(world_size, lambda comm: second_epoch(comm, True))
    assert clean[0][0] != weights(net())
    for (found, notes, step), (wanted, _, _) in zip(left, clean, strict=True):
        assert found == wanted
        assert any("left inside step 0" in note for note in notes)
        assert step == 2


def test_values_of_different_names_on_different_ranks_are_refused() -> None:
    def body(comm: ThreadCollectives) -> None:
        rig, model = Rig(comm), net()
        optimizer = rig.optimizer(model, sgd(model))
        for batch in rig.loader():
            turn(rig, model, optimizer, batch, **{f"of_{comm.rank}": 1.0})

    with pytest.raises(InputError, match="ranks log values of different names"):
        run_threads(2, body)


def test_ranks_that_step_different_optimizers_are_told() -> None:
    def body(comm: ThreadCollectives) -> None:
        rig, one, two = Rig(comm), net(1), net(2)
        optimizers = rig.optimizer(one, sgd(one)), rig.optimizer(two, sgd(two))
        for batch in rig.loader():
            (loss_of(one, batch) + loss_of(two, batch)).backward()
            for optimizer in optimizers[: 2 - comm.rank]:
                optimizer.step()

    with pytest.raises(CommError, match="stepped other optimizers"):
        run_threads(2, body)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    rig = Rig()
    model = net()
    rig.optimizer(model, sgd(model))
    next(iter(rig.loader()))
    with pytest.raises(InputError, match="the weight of step 0, micro-batch 0"):
        rig.stepper.set_weight(weight)


def test_a_gradient_that_is_not_finite_leaves_the_weights() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    before = weights(model)
    batch = next(iter(rig.loader(batch=4)))
    (loss_of(model, batch) * math.inf).backward()
    with pytest.raises(InputError, match="the gradient of step 0 is not finite"):
        optimizer.step()
    assert weights(model) == before


def test_parameters_without_a_gradient_are_named_once() -> None:
    rig, model = Rig(), net()
    unused = nn.Linear(2, 2)
    model.add_module("spare", unused)
    before = weights(unused)
    optimizer = rig.optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for batch in rig.loader():
        loss_of(model[:3], batch).backward()
        optimizer.step()
    assert len(rig.notes) == 1
    assert "spare.bias, spare.weight" in rig.notes[0]
    assert weights(unused) == before  # skipped as torch skips it: not even decayed


def test_a_stop_comes_after_a_whole_step() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    seen = []
    with pytest.raises(Interrupted, match="stopped after step 2"):  # noqa: PT012
        for number, batch in enumerate(rig.loader()):
            seen.append(number)
            rig.stepper.requests.stop = number >= 2  # in the first micro-batch of the second step
            turn(rig, model, optimizer, batch)
    assert seen == [0, 1, 2, 3]
    assert rig.stepper.requests.stopping


# Against plain PyTorch


def plain(batches: list[Any], make: Callable[[nn.Module], Any], change: Any = None) -> list[float]:
    """The weights after plain steps on the same batches."""
    model = net()
    optimizer = make(model)
    for number, batch in enumerate(batches):
        if change is not None:
            change(number, model, optimizer)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return weights(model)


def ours(make: Callable[[nn.Module], Any]) -> tuple[list[float], list[Any]]:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, make(model))
    batches = []
    for _ in range(2):
        for batch in rig.loader(batch=4, micro=4, samples=SAMPLES[:20]):
            turn(rig, model, optimizer, batch)
            batches.append(batch)
    return weights(model), batches


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_are_those_of_plain_torch(make: Any) -> None:
    found, batches = ours(make)
    assert found == plain(batches, make)
    assert found != weights(net())


def part(model: Any) -> Any:
    return torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)


def add(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})


def frozen_first(model: Any) -> Any:
    model[0].requires_grad_(False)
    return sgd(model)


def thaw(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(True)


def freeze(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)


@pytest.mark.parametrize("within", [False, True], ids=["between epochs", "inside the loop"])
@pytest.mark.parametrize(("make", "change"), [(part, add), (frozen_first, thaw), (sgd, freeze)])
def test_parameters_may_be_added_thawed_and_frozen_in_mid_run(make: Any, change: Any, within: bool) -> None:
    """What is new takes part at once, on all ranks alike, also where the step has begun."""

    def body(comm: Collectives, micro: int = 1) -> tuple[list[float], list[Any]]:
        rig, model = Rig(comm), net()
        optimizer, batches = rig.optimizer(model, make(model)), []
        loader = rig.loader(batch=4, micro=micro, samples=SAMPLES[:12])
        for epoch in range(3):
            if epoch == 1 and not within:
                change(model, optimizer)
            for number, batch in enumerate(loader):
                if epoch == 1 and number == 0 and within:
                    change(model, optimizer)
                turn(rig, model, optimizer, batch)
                batches.append(batch)
        return weights(model), batches

    (alone, _), (whole, batches) = body(LocalCollectives()), body(LocalCollectives(), micro=4)
    for world_size in (2, 4):
        assert [found for found, _ in run_threads(world_size, body)] == [alone] * world_size

    def at_its_time(number: int, model: Any, optimizer: Any) -> None:
        if number == 3:
            change(model, optimizer)
        model.zero_grad()  # what the optimizer does not know of is not cleared by it

    assert whole == plain(batches, make, at_its_time)
    assert whole != plain(batches, make)


def test_gradients_need_not_be_cleared_by_the_loop() -> None:
    """A micro-batch starts without gradients: what the loop left in them would be added once a rank, not once."""
    found = []
    for tidy in (True, False):
        rig, model = Rig(), net()
        optimizer = rig.optimizer(model, sgd(model))
        for batch in rig.loader():
            loss_of(model, batch).backward()
            optimizer.step()
            if tidy:
                optimizer.zero_grad()
            else:
                loss_of(model, batch).backward()  # to look at something, say
        found.append(weights(model))
    assert found[0] == found[1] != weights(net())


def test_a_closure_is_called_and_its_loss_returned() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    batches = list(rig.loader(batch=4, micro=4, samples=SAMPLES[:12]))
    other = Rig()
    model = net()
    optimizer = other.optimizer(model, sgd(model))
    for batch in other.loader(batch=4, micro=4, samples=SAMPLES[:12]):
        calls: list[torch.Tensor] = []

        def closure(batch: Any = batch, calls: Any = calls) -> torch.Tensor:
            optimizer.zero_grad()
            calls.append(loss_of(model, batch))
            calls[-1].backward()
            return calls[-1]

        assert optimizer.step(closure) is calls[0]
        assert len(calls) == 1
    assert weights(model) == plain(batches, sgd)


def test_weightless_steps_change_nothing() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    before = weights(model)
    for batch in rig.loader():
        rig.stepper.set_weight(0.0)
        turn(rig, model, optimizer, batch)
    assert weights(model) == before
    assert rig.stepper.step == 3


def test_two_optimizers_are_updated_when_the_micro_batch_ends() -> None:
    rig, one, two = Rig(), net(1), net(2)
    first, second = rig.optimizer(one, sgd(one)), rig.optimizer(two, sgd(two))
    start = weights(one)
    seen = []
    for batch in rig.loader():
        seen.append(weights(one))
        loss_of(one, batch).backward()
        first.step()
        first.zero_grad()
        seen.append(weights(one))
        loss_of(lambda x: two(x) + one(x), batch).backward()  # reaches the first model's gradients too
        second.step()
    begins, middles = seen[::2], seen[1::2]
    assert begins[0] == begins[1] == start
    assert begins[2] == begins[3] != start
    assert begins == middles
    assert weights(one) != begins[-1]


# LR schedulers


@pytest.mark.parametrize("when", ["before", "after", "handed over"])
def test_schedulers_step_without_a_warning(when: str) -> None:
    rig, model = Rig(), net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if when != "after" else None
    rig.optimizer(model, optimizer, schedule if when == "handed over" else None)
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in rig.loader():
            step = rig.stepper.step
            turn(rig, model, optimizer, batch)
            if rig.stepper.step != step:
                schedule.step()
    assert [outcome.lr for outcome in rig.outcomes] == [0.05, 0.025, 0.0125]
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8
    assert schedule.state_dict()["last_epoch"] == 3


# Copies


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prepared_model_can_be_copied_and_pickled(world_size: int) -> None:
    def body(comm: Collectives) -> None:
        rig, model = Rig(comm), net()
        optimizer = rig.optimizer(model, sgd(model))
        average = AveragedModel(model)
        for number, batch in enumerate(rig.loader()):
            turn(rig, model, optimizer, batch)
            average.update_parameters(model)
            assert b"PhaseTimer" not in pickle.dumps(model)  # nothing of the run goes with it
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved_and_loaded(model)]
            for other in copies:
                assert weights(other) == weights(model)
                assert phases_of(rig, other, batch) == [None]
                # It lives a life of its own: its backward is nobody's gradient.
                loss_of(other, batch).backward()
                plain_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
                plain_optimizer.step()
                assert weights(other) != weights(model)
            assert all(param.grad is None for param in model.parameters())
            if number == 3:
                return

    run_threads(world_size, body)
    alone, copied = run_threads(1, lambda comm: train(comm, 0)), run_threads(1, lambda comm: train(comm, 0))
    assert alone == copied


def phases_of(rig: Rig, model: nn.Module, batch: Any) -> list[str | None]:
    """What the run's timer hears of a model's forward and backward."""
    timer, heard = rig.stepper.timer, []
    enter, timer.enter = timer.enter, heard.append  # type: ignore[method-assign, assignment]
    timer.phase, before = "forward", timer.phase
    loss_of(model, batch).backward()
    timer.enter, timer.phase = enter, before  # type: ignore[method-assign]
    model.zero_grad()
    return heard or [None]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_an_optimizers_copy_is_a_plain_one() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    for batch in rig.loader():
        turn(rig, model, optimizer, batch)
    before = weights(model)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (params,) = [group["params"] for group in other.param_groups]
        for param in params:
            param.grad = torch.ones_like(param)
        other.step()
        assert torch.cat([param.detach().reshape(-1) for param in params]).tolist() != before
    assert weights(model) == before
    state = optimizer.state_dict()
    fresh = sgd(net())
    fresh.load_state_dict(state)
    assert len(fresh.state_dict()["state"]) == 4


def test_an_optimizer_is_prepared_once() -> None:
    rig, model = Rig(), net()
    optimizer = rig.optimizer(model, sgd(model))
    with pytest.raises(InputError, match="prepared before"):
        rig.optimizer(model, optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_what_cannot_be_prepared_is_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="LBFGS"):
        Rig().optimizer(model, torch.optim.LBFGS(model.parameters()))
    optimizer = sgd(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InputError, match="ReduceLROnPlateau needs a metric"):
        Rig().optimizer(model, optimizer, plateau)
    for clip in (0.0, -1.0, math.nan, "1"):
        with pytest.raises(InputError, match="clip_norm must be a positive number"):
            Rig().optimizer(model, sgd(model), None, clip)  # type: ignore[arg-type]


def test_names_are_the_models_own() -> None:
    model = net()
    before = list(model.state_dict())
    rig = Rig()
    batch = next(iter(rig.loader()))
    rig.optimizer(model, sgd(model))
    assert list(model.state_dict()) == before
    assert type(model) is nn.Sequential
    assert phases_of(rig, model, batch) == ["backward"]
