"""How the gate runs the tests: in which order, and on which device."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WAITING = (
    "tests/orchestration/test_interruptions.py",
    "tests/orchestration/execution/test_cluster.py",
    "tests/orchestration/execution/test_ray_ranks.py",
    "tests/orchestration/execution/test_session.py",
    "tests/orchestration/test_errors.py",
    "tests/orchestration/test_run.py",
    "tests/orchestration/execution/test_limits.py",
    "tests/orchestration/execution/test_ray_tune.py",
    "tests/orchestration/report/test_writing.py",
    "tests/orchestration/execution/test_memory.py",
    "tests/orchestration/tracking/test_servers.py",
    "tests/test_python_docs.py",
    "tests/orchestration/test_neighbours.py",
    "tests/orchestration/execution/test_log.py",
    "tests/accounting/jobs/test_lost_node.py",
    "tests/accounting/jobs/test_parallel.py",
    "tests/orchestration/commands/test_main.py",
    "tests/orchestration/commands/test_running.py",
    "tests/orchestration/execution/test_submission.py",
)
"""Files of tests that mostly wait for other processes."""
_COMPILING = "DPSWEEP_TEST_COMPILING"
"""Of the processes of xdist: a folder that is there until the first one has imported all tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="what tests/workers trains on: cpu, cuda or cuda:N")


def pytest_configure(config: pytest.Config) -> None:
    set_device(config.getoption("--device"))
    # Commands that tests start with another home share the machine code of this one.
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    # Ray gives its workers a niceness of 15: beside busy tests they would hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _compile_once(config)


def set_device(name: str) -> None:
    """Tell the tests of training, before they are imported, and the processes that they start."""
    if name != "cpu":
        from dpsweep.workers.machine.devices import choose_device  # late: it imports torch

        try:
            name = str(choose_device(name))
        except ValueError as error:
            raise pytest.UsageError(f"--device: {error}") from None
    os.environ["DPSWEEP_TEST_DEVICE"] = name


def _compile_once(config: pytest.Config) -> None:
    """In a fresh checkout, what tests import is compiled by the first of several processes, and the others wait."""
    if config.getoption("numprocesses", None) and not (ROOT / "workers" / "__pycache__").exists():
        os.environ[_COMPILING] = tempfile.mkdtemp(prefix="dpsweep-compiling-")
    compiling, deadline = os.environ.get(_COMPILING), time.monotonic() + 300.0
    while compiling and _worker() not in ("", "gw0") and Path(compiling).exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _worker() -> str:
    """The name of this process of xdist, gw0 for the first one; "" for any other process."""
    return os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_collection() -> None:
    """Imports leave a million objects that are never freed; later collections of garbage skip them."""
    gc.disable()


def pytest_collection_finish() -> None:
    if (compiling := os.environ.get(_COMPILING)) and _worker() == "gw0":
        shutil.rmtree(compiling, ignore_errors=True)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thin large grids, and spread the files that wait among the first half of the others, which compute meanwhile."""
    cases: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("thinned"):
            function = item.nodeid.partition("[")[0]
            if cases[function] % mark.args[0]:
                item.add_marker(pytest.mark.long)
            cases[function] += 1
    files = list(dict.fromkeys(_file(item) for item in items))
    others = {file: float(place) for place, file in enumerate(file for file in files if file not in WAITING)}
    distance = len(others) / 2 / len(WAITING)
    places = {**others, **{file: place * distance for place, file in enumerate(WAITING)}}
    items.sort(key=lambda item: places[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()
