"""On an accelerator: the same code, the same sameness. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.multiproc.test_sameness import SHAPES, train
from tests.worlds import run_world

pytestmark = pytest.mark.gpu


def test_two_runs_and_loader_workers_give_the_same_bits() -> None:
    runs = [run_world(1, train, {**SHAPES[0], "num_workers": workers}, timeout_s=180)[0] for workers in (0, 0, 2)]
    assert runs[0]["before"] != runs[0]["after"]
    assert len({found["after"] for found in runs}) == 1


def test_any_number_of_devices_gives_the_same_bits() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators: NCCL gives each rank a device of its own")
    alone = run_world(1, train, SHAPES[0], timeout_s=180)[0]
    for found in run_world(2, train, SHAPES[0], timeout_s=180):
        assert found["after"] == alone["after"]


def test_the_timer_times_the_device_without_stalling_it() -> None:
    from unisono.observe.timer import PhaseTimer

    device = torch.accelerator.current_accelerator()
    assert device is not None
    timer = PhaseTimer(device)
    x = torch.randn(2048, 2048, device=device)
    timer.enter("forward")
    for _ in range(20):
        x = x @ x / 2048
    timer.enter(None)
    times = timer.take()()
    assert times["forward_s"] > 0
