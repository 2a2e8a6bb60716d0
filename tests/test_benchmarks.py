"""The command lines of the benchmarks, where they are wrong: errors of argparse, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINING = Path(__file__).parents[1] / "benchmarks" / "training.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "'0' is no number of threads; give 1 to 1024"),
        (["--device", "foo"], "unknown device 'foo'; use auto, cpu, cuda or cuda:N"),
        (["--device", f"cuda:{torch.cuda.device_count()}"], "CUDA devices here"),
    ],
)
def test_mistakes_are_errors_of_argparse(arguments: list[str], message: str) -> None:
    pytest.importorskip("opacus")
    done = subprocess.run([sys.executable, str(TRAINING), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
