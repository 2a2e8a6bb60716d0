"""Every example does what it says: sweeps are planned and trained, programs are run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpsweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.processes import environment

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_sweeps_train(file: Path, tmp_path: Path) -> None:
    """Each trial in this process; how sweeps run under Ray is tested elsewhere."""
    sweep = parse_sweep(file.read_text(), str(file))
    assert sweep.name == file.stem
    plan, code = dpsweep.plan(file), permitted(sweep, FOLDER)
    assert plan.refusals == ()
    assert len(plan.trials) == 2
    for trial in plan.trials:
        result = run_trial(trial.spec, str(tmp_path / trial.key), code=code, releases=trial.releases)
        assert result.evaluation.main > 0.4, "far above chance, or half of it for two classes"
        assert len(result.evaluation.groups) == len(result.group_names)


@pytest.mark.parametrize(
    ("program", "absent", "printed"),
    [
        (
            "accounting_alone.py",
            ("torch", "ray"),
            r"epsilon \d\.\d+ at delta 1e-05, a guarantee by \w+\n.*\n.*noise 1\.\d",
        ),
        ("one_trial.py", ("ray", "mlflow"), r"accuracy 0\.[6-9].*\n455 examples: median epsilon 1\.\d+, estimate\n"),
        ("accelerate_loop.py", ("ray", "mlflow"), r"epsilon 3\.00 after 30 steps\n178 parameters"),
        pytest.param(
            *(
                "optuna_study.py",
                ("ray",),
                r"best of 3: accuracy 0\.[5-9].*\n.*epsilon 1\.[5-9]\d together \(guarantee",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_programs_run(program: str, absent: tuple[str, ...], printed: str, tmp_path: Path) -> None:
    """They never load the packages that they are said not to need."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        f"assert not {set(absent)!r} & set(sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / program), str(tmp_path / "trial")],
        env=environment(PYTHONPATH=str(FOLDER.parent)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(printed, finished.stdout), finished.stdout


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_run_in_a_kernel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs are those of a user: the plan as a table, the same predictions, and an edit that is refused."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    notebook = nbformat.read(file, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    planned, ran, same = shown
    assert "Plan of 2 trials, 0 refused" in planned["text/html"]
    assert "2 finished" in ran["text/plain"]
    assert "epsilon" in ran["text/html"]
    assert same["text/plain"] == "True"
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert printed.strip() == "given/Net.py has changed"
    for code in tmp_path.glob("runs/*/trials/*/code/given/Net.py"):
        assert code.read_text().startswith("import torch.nn as nn\n\nclass Net(nn.Module):")


def test_the_index_names_every_example() -> None:
    index = (FOLDER / "README.md").read_text()
    files = {file.name for file in FOLDER.iterdir() if file.suffix in (".py", ".yaml", ".ipynb")}
    assert {name for name in files if f"({name})" not in index} == set()
