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
