"""Python finds dpsweep's parts below its own name, whatever a user's own modules are called."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.orchestration.processes import environment

PARTS = ("accounting", "workers", "orchestration")

SWEEP = """
name: own
data: {name: "workers:people"}
model: {name: "accounting.nets:net"}
loss: "torch_utils:loss"
sampling: {method: poisson, batch_size: 16}
epochs: 1
clipping: flat
privacy: {noise_multiplier: 1.0, delta: 1e-3, accountant: rdp}
norms: off
"""
MODULES = {
    "workers.py": """
        import numpy as np
        from dpsweep.workers.data import Source, make_split
        import torch_utils

        def people():
            rows = np.random.default_rng(0).normal(size=(120, 2)).astype(np.float32)
            split = make_split(rows, labels=(rows[:, 0] > 0).astype(np.int64), groups=np.zeros(120, np.int64))
            return Source("people", split, None, ("all",), torch_utils.CLASSES)
        """,
    "accounting/__init__.py": "",
    "accounting/nets.py": """
        import torch

        def net(): return torch.nn.Linear(2, 2)
        """,
    "torch_utils.py": """
        import torch
        CLASSES = ("left", "right")

        def loss(): return torch.nn.CrossEntropyLoss(reduction="none")
        """,
}


def dpsweep(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command as an installation does, without this checkout's root on Python's path."""
    command = [sys.executable, "-P", "-c", "from dpsweep.orchestration.commands.main import main; main()", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(**changes), capture_output=True, text=True, check=False)


def test_an_installation_has_one_package_at_the_top(tmp_path: Path) -> None:
    code = f"import importlib.util, dpsweep.accounting; print([importlib.util.find_spec(each) for each in {PARTS}])"
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "[None, None, None]\n"


def test_a_sweep_runs_beside_modules_that_are_called_like_our_folders(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    ended = dpsweep(
        tmp_path, "run", "sweep.yaml", "--output", "out", "--address", "in-process", "--tracking-uri", "none"
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "report.html").exists()


def test_the_command_starts_beside_modules_that_are_called_like_our_folders(tmp_path: Path) -> None:
    for part in PARTS:
        (tmp_path / f"{part}.py").write_text("raise SystemExit('imported')\n")
    ended = dpsweep(tmp_path, "epsilon", "--help", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
