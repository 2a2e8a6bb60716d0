"""``pytest tests/workers --device NAME`` reaches the trials and the engine, or is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpsweep.workers.noise.noise_sources import make_noise_source
from tests.conftest import set_device
from tests.workers.devices import DEVICE, NAME
from tests.workers.gradients.test_engine import CASES
from tests.workers.trial_specs import small_trial

ROOT = Path(__file__).parents[3]


def test_trials_batches_and_noise_are_on_the_device_that_was_asked_for(request: pytest.FixtureRequest) -> None:
    asked = torch.device(request.config.getoption("--device"))
    assert DEVICE.type == asked.type
    assert small_trial().execution.device == NAME
    before = torch.get_default_device()
    with torch.device(DEVICE):
        x, _ = CASES["linear"].inputs()
        assert x.device.type == next(CASES["linear"].model().parameters()).device.type == asked.type
    assert torch.get_default_device() == before
    assert make_noise_source("seeded", 0, DEVICE).normal((2,), 1.0).device.type == asked.type


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="--device: unknown device 'tpu'"):
        set_device("tpu")


@pytest.mark.long
def test_a_device_that_is_not_here_is_an_error_in_one_line() -> None:
    name, reason = f"cuda:{torch.cuda.device_count()}", "CUDA devices here"
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--device", name]
    done = subprocess.run(
        [*asked, "tests/workers/machine/test_device_option.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert [line for line in done.stderr.splitlines() if line] == [done.stderr.strip()], done.stderr
    assert f"--device: {reason}" in done.stderr or reason in done.stderr
