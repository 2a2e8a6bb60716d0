"""Training and accounting stand alone: they run where neither Ray, MLflow nor orchestration is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles

FOLDER = Path(__file__).parent

PROGRAM = """
import importlib, pkgutil, sys

class Absent:
    NAMES = {"ray", "mlflow", "dpsweep.orchestration", "typer", "rich", "plotly", "yaml", "sqlalchemy"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in cls.NAMES or name.partition(".")[0] in cls.NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)

for package in (importlib.import_module("dpsweep.accounting"), importlib.import_module("dpsweep.workers")):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name != "dpsweep.accounting.jobs.parallel":
            importlib.import_module(module.name)

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.traces import read_trace
from tests.workers.trial_specs import small_trial
from dpsweep.workers.trials.trial import run_trial

run_trial(small_trial(), sys.argv[1])
assert not {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules), "a trial loads the compiler"
print(account(read_trace(TrialFiles(sys.argv[1]).trace), delta=1e-5).epsilon)
"""


@pytest.mark.long
def test_training_and_accounting_need_nothing_of_orchestration(tmp_path: Path) -> None:
    """Every module but the Ray actors imports, and a private trial trains and is accounted for, without them."""
    root = str(tmp_path / "trial")
    search = os.pathsep.join((str(FOLDER.parents[1]), str(FOLDER)))
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, root],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    expected = account(read_trace(TrialFiles(root).trace), delta=1e-5).epsilon
    assert float(finished.stdout) == pytest.approx(expected, rel=1e-12)
    assert expected > 0
