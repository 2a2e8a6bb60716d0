"""What the documents say of Python is true: their examples run, and the reference is that of the docstrings."""

from __future__ import annotations

import doctest
import re
import runpy
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from torch import nn

import dpsweep
from tests.warm import FORKS

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS


def run_examples(text: str, name: str) -> None:
    """The ``>>>`` lines of ``text``, in order and in one namespace."""
    test = doctest.DocTestParser().get_doctest(re.sub(r"^```.*$", "", text, flags=re.MULTILINE), {}, name, name, 0)
    assert test.examples
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


def test_the_docstring_of_the_package_runs() -> None:
    run_examples(dpsweep.__doc__ or "", "dpsweep")


def test_the_page_about_loops_runs() -> None:
    run_examples((ROOT / "docs" / "loop.md").read_text(), "loop.md")


def test_the_page_about_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder and a process of its own: a process reads once whether its Ray clusters require a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with ProcessPoolExecutor(1, mp_context=FORKS) as alone:
        alone.submit(run_examples, (ROOT / "docs" / "python.md").read_text(), "python.md").result()


def _net(feature_shape: tuple[int, ...], num_classes: int, hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(feature_shape[0], hidden), nn.Linear(hidden, num_classes))


def test_sizes_of_a_class_vary_as_the_page_about_python_says() -> None:
    """A list in a component of the user's own is one value."""
    (params,) = re.findall(r'{"name": Net, (.*?}})', (ROOT / "docs" / "python.md").read_text())
    sweep = {"name": "sizes", "data": "breast_cancer", "model": {"name": _net, **eval("{" + params)}}
    sampled = {"sampling": {"method": "poisson", "batch_size": 64}, "epochs": 1, "clipping": "none"}
    plan = dpsweep.plan(sweep | sampled | {"privacy": {"noise_multiplier": 1, "delta": 1e-5}})
    assert [trial.spec.model.params for trial in plan.trials] == [{"hidden": 8}, {"hidden": 32}], plan.refusals


def test_the_reference_is_up_to_date() -> None:
    """Else run: python docs/reference.py"""
    assert (ROOT / "docs" / "reference.md").read_text() == runpy.run_path(str(ROOT / "docs" / "reference.py"))[
        "reference"
    ]()


def test_exported_names() -> None:
    """A name that leaves this list breaks programs of users: add, do not remove."""
    assert dpsweep.__all__ == [
        "DPClassifier",
        "DataCorruption",
        "DpsweepError",
        "InvalidInput",
        "PrivateTraining",
        "StorageError",
        "StoredSweep",
        "Sweep",
        "Trial",
        "Unreachable",
        "UnsupportedMechanism",
        "compare",
        "open",
        "plan",
        "run",
    ]
    assert all(callable(getattr(dpsweep, name)) for name in dpsweep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'close'"):
        dpsweep.close  # noqa: B018


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
