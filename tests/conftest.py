"""How the gate runs the tests: in which order, and which of them its coverage counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WAITING = (
    "tests/orchestration/test_interruptions.py",
    "tests/orchestration/execution/test_cluster.py",
    "tests/orchestration/execution/test_ranks.py",
    "tests/orchestration/execution/test_session.py",
    "tests/orchestration/test_errors.py",
    "tests/orchestration/test_run.py",
    "tests/orchestration/execution/test_limits.py",
    "tests/orchestration/execution/test_tune.py",
    "tests/orchestration/report/test_growing.py",
    "tests/orchestration/execution/test_memory.py",
    "tests/orchestration/tracking/test_servers.py",
    "tests/test_python_docs.py",
    "tests/orchestration/test_neighbours.py",
    "tests/orchestration/execution/test_log.py",
    "tests/accounting/test_lost_node.py",
    "tests/accounting/test_parallel.py",
    "tests/orchestration/commands/test_main.py",
    "tests/orchestration/commands/test_ending.py",
    "tests/orchestration/execution/test_submission.py",
)
"""Files of tests that mostly wait for other processes."""
UNMEASURED = frozenset(
    {
        "tests/accounting/individual/test_bits.py",
        "tests/accounting/individual/test_epsilons.py",
        "tests/accounting/individual/test_rdp.py",
        "tests/accounting/pld/test_composition.py",
        "tests/accounting/pld/test_extreme_traces.py",
        "tests/accounting/test_accountants.py",
        "tests/accounting/test_auditing.py",
        "tests/accounting/test_curves.py",
        "tests/accounting/test_filters.py",
        "tests/accounting/test_lost_node.py",
        "tests/accounting/test_reductions.py",
        "tests/accounting/test_selection.py",
        "tests/orchestration/commands/test_account.py",
        "tests/orchestration/commands/test_calculator.py",
        "tests/orchestration/commands/test_ending.py",
        "tests/orchestration/comparison/test_findings.py",
        "tests/orchestration/comparison/test_ledger.py",
        "tests/orchestration/execution/test_cluster.py",
        "tests/orchestration/execution/test_coordinator.py",
        "tests/orchestration/execution/test_limits.py",
        "tests/orchestration/execution/test_memory.py",
        "tests/orchestration/execution/test_prediction.py",
        "tests/orchestration/execution/test_ranks.py",
        "tests/orchestration/execution/test_session.py",
        "tests/orchestration/execution/test_status_file.py",
        "tests/orchestration/execution/test_submission.py",
        "tests/orchestration/execution/test_tune.py",
        "tests/orchestration/report/test_page.py",
        "tests/orchestration/sweeps/test_draft.py",
        "tests/orchestration/test_encrypted.py",
        "tests/orchestration/test_errors.py",
        "tests/orchestration/test_growth.py",
        "tests/orchestration/test_hostile_text.py",
        "tests/orchestration/test_interruptions.py",
        "tests/orchestration/test_limits.py",
        "tests/orchestration/test_mnist.py",
        "tests/orchestration/test_run.py",
        "tests/orchestration/test_second_user.py",
        "tests/orchestration/test_selection.py",
        "tests/orchestration/test_tuning.py",
        "tests/orchestration/tracking/test_mlflow.py",
        "tests/orchestration/tracking/test_mlflow_models.py",
        "tests/orchestration/tracking/test_servers.py",
        "tests/test_benchmarks.py",
        "tests/test_examples.py",
        "tests/test_fuzz.py",
        "tests/test_papers.py",
        "tests/test_python_docs.py",
        "tests/workers/clipping/test_filter.py",
        "tests/workers/gradients/test_devices.py",
        "tests/workers/gradients/test_engine.py",
        "tests/workers/test_death.py",
        "tests/workers/test_ranks.py",
        "tests/workers/test_resume.py",
        "tests/workers/test_trials.py",
    }
)
"""Files of tests that compute for long: Python below 3.12 takes half as long again while lines are counted. What they
execute, other files of tests execute too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="what tests/workers trains on: cpu, cuda or cuda:N")


def pytest_configure(config: pytest.Config) -> None:
    set_device(config.getoption("--device"))
    _compile_once(config)


def set_device(name: str) -> None:
    """Tell the tests of training, before they are imported, and the processes that they start."""
    if name != "cpu":
        from workers.devices import choose_device  # late: it imports torch

        try:
            name = str(choose_device(name))
        except ValueError as error:
            raise pytest.UsageError(f"--device: {error}") from None
    os.environ["DPSWEEP_TEST_DEVICE"] = name


def _compile_once(config: pytest.Config) -> None:
    """In a fresh checkout, compile what tests import once, before several processes do it at the same time."""
    if config.getoption("numprocesses", None) and not (ROOT / "workers" / "__pycache__").exists():
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        subprocess.run(collect, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that wait among the first half of the others, which use the processors meanwhile."""
    files = list(dict.fromkeys(_file(item) for item in items))
    others = {file: float(place) for place, file in enumerate(file for file in files if file not in WAITING)}
    distance = len(others) / 2 / len(WAITING)
    places = {**others, **{file: place * distance for place, file in enumerate(WAITING)}}
    items.sort(key=lambda item: places[_file(item)])
    for item in items:
        if _file(item) in UNMEASURED and item.config.pluginmanager.hasplugin("_cov"):
            item.add_marker("no_cover")


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()
