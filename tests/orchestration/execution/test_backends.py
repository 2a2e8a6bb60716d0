"""A driver on a running cluster plans in another process, and keeps no torch in its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.execution.backends import plan_at
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import NO_PAST
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.orchestration.sample_grids import small

ELSEWHERE = "head.example.org:6379"
TEXT = small(clipping="flat", noise="constant", seeds=[0, 1])
DRIVER = """
import json, sys
import dpsweep.orchestration.execution.on_ray, dpsweep.orchestration.pipeline
from dpsweep.orchestration.execution.backends import plan_at
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import NO_PAST
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE
plan = plan_at(sys.argv[1], parse_sweep(sys.argv[2]), NO_CODE, NO_PAST, SweepFiles("log"))
print(json.dumps({"plan": repr(plan), "torch": "torch" in sys.modules}))
"""
OWN = """
import os, signal
from torch import nn

def talks(feature_shape, num_classes):
    print("a line of the user's own model")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def dies(feature_shape, num_classes):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_plan_is_that_of_one_process_and_the_driver_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER, ELSEWHERE, TEXT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == {"plan": repr(plan_sweep(parse_sweep(TEXT))), "torch": False}


@pytest.mark.long
def test_the_users_own_code_runs_there_and_its_errors_are_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def planned(model: str, **changes: object) -> int:
        sweep = parse_sweep(small(**{"model": f"own:{model}", "clipping": "flat", "noise": "constant", **changes}))
        return len(plan_at(ELSEWHERE, sweep, permitted(sweep, tmp_path), NO_PAST, SweepFiles("log")).trials)

    assert planned("talks") == 2
    said = capfd.readouterr()
    assert "a line of the user's own model" not in said.out, "it is the command's own"
    assert "a line of the user's own model" in said.err
    with pytest.raises(InvalidInput, match="up to 2,000,000 trials, but a sweep at most 10,000"):
        planned("talks", seeds=list(range(1000)), epochs=list(range(1, 2001)))
    with pytest.raises(DpsweepError, match="the process that planned the sweep ended with -9"):
        planned("dies")
