"""Fixtures that tests of MLflow share, and what all processes that tests start inherit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsweep.orchestration.commands.main import main
from dpsweep.orchestration.tracking.embedded import client_of, embedded_tracking_uri
from tests.orchestration.processes import Command, Ended


@pytest.fixture(scope="session", autouse=True)
def sigint_is_heard() -> None:
    """A background job of a shell script ignores SIGINT, and so would the processes that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def sigterm_interrupts() -> Iterator[None]:
    """As in the command."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


_lasting: set[str] = set()
"""Names of modules that are no test's: thousands, which take longer to look at than most tests."""


@pytest.fixture(autouse=True)
def modules_of_users_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another test's sweep has other modules beside it, of equal names."""
    path = [*sys.path]
    yield
    sys.path[:] = path
    folder = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - _lasting:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
        else:
            _lasting.add(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store of MLflow that is ready."""
    client_of(embedded_tracking_uri(tmp_path))
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["dpsweep", *map(str, arguments)])
        monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as prepare_environment would set it for good
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ended(code, *capsys.readouterr())

    return run
