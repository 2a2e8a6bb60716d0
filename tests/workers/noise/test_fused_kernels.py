"""The kernels of CUDA, compiled there, and run by Triton's interpreter on other machines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.workers.devices import DEVICE

CHECK = """
import math, sys, torch
from dpsweep.workers.noise import fused_kernels
from dpsweep.workers.noise.chacha import keystream
from dpsweep.workers.noise.gaussian_sources import _normal, _uniform

device, cpu = torch.device(sys.argv[1]), torch.device("cpu")
key, nonce = bytes(range(7, 39)), bytes(range(12))
for first in (0, 2**31 - 50, 2**32 - 100):
    made = torch.zeros(8 * 100, dtype=torch.int64, device=device)
    fused_kernels.write_words(made, key, nonce, first)
    assert torch.equal(made.cpu(), keystream(key, nonce, first, 100, cpu)), first
count, scale, grid = 1101, 1.7, 2.0**-11
for draws in fused_kernels.DRAWS:
    for dtype in (torch.float32, torch.float64):
        values = torch.linspace(-5.0, 5.0, count, dtype=dtype)
        blocks = -(-count * draws // 8)
        uniform = _uniform(keystream(key, nonce, 5, blocks, cpu)).view(-1, 2)
        normal = torch.stack(_normal(*uniform.unbind(1)), 1).flatten()[: count * draws].view(-1, draws).sum(1)
        expected = normal.mul_(scale).add_(values).div_(grid).round_().mul_(grid).to(dtype)
        noisy = values.to(device)
        fused_kernels.add_noise(noisy, key, nonce, 5, draws, scale, grid)
        assert torch.equal(noisy.cpu(), expected), (draws, dtype, (noisy.cpu() - expected).abs().max())
ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -1e30, 0.25], dtype=torch.float64, device=device)
fused_kernels.add_noise(ties, key, nonce, 0, 1, 0.0, 1.0)
assert ties.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 1e30, -1e30, 0.0], "of two multiples the even one"
print("equal")
"""


def test_words_are_openssls_and_noise_is_that_of_a_cpu() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if DEVICE.type == "cpu" else {})}
    command = [sys.executable, "-c", CHECK, str(DEVICE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr
