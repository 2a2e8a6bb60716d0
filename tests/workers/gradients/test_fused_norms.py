"""The kernels of CUDA beside operations of torch; other machines run them by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.workers.devices import DEVICE

CHECK = """
import sys, torch
from dpsweep.workers.gradients import factors
from dpsweep.workers.gradients.fused_norms import ghost_norms, scaled_halves

device, generator = torch.device(sys.argv[1]), torch.Generator().manual_seed(0)
interpreted = device.type == "cpu"
limits = factors.CANCELLATION, factors.COHERENT_CANCELLATION, factors.LOST_SHARE, factors.LARGE_SQUARE
for examples, length in ((5, 7), (3, 64), (2, 100)):
    inputs = torch.randn(examples, length, 20, generator=generator)
    grads = torch.randn(examples, length, 5, generator=generator)
    grads[0] -= grads[0].mean(0)
    inputs[0] = inputs[0, :1]  # terms that cancel
    inputs[1] *= 1e8
    grams = [each.double() @ each.double().mT for each in (inputs, grads)]
    expected = factors.gram_norm_sq(grams[0].clone(), grams[1]).float()
    found = ghost_norms(*(each.float().to(device) for each in grams), *limits).cpu()
    assert torch.equal(found.isnan(), expected.isnan()) and found[0].isnan(), (found, expected)
    assert torch.allclose(found[1:], expected[1:], rtol=1e-5), (found, expected)
values, weights = torch.randn(6, 33, 5, generator=generator), torch.rand(6, generator=generator)
for given in (values, values.bfloat16()):
    halves = scaled_halves(given.to(device), weights.to(device))
    exact = given.double() * weights[:, None, None]
    error = (sum(each.cpu().double() for each in halves) - exact).abs() / exact.abs()
    assert error.max() <= (2.0**-14 if interpreted else 2.0**-17), error.max()  # the interpreter cuts bits off
print("equal")
"""


def test_ghost_norms_and_halves_are_those_of_torch() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if DEVICE.type == "cpu" else {})}
    command = [sys.executable, "-c", CHECK, str(DEVICE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("the interpreter of this Triton does not take this numpy")
    assert done.stdout == "equal\n", done.stderr
