"""A database of MLflow from somebody else: SQLite neither deletes what it names, nor runs what it holds."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpsweep.orchestration.tracking.embedded import client_of, embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker, end_running
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable
from tests.hostile.of_databases import plant_journal


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database of MLflow that its driver has left."""
    MlflowTracker(embedded_tracking_uri(tmp_path), artifact_root=str(tmp_path / "artifacts"))
    return tmp_path / "mlflow.db"


def refusals(database: Path) -> list[str]:
    """What is said by all who open a database."""
    uri, said = f"sqlite:///{database}", []
    for opened in (lambda: MlflowTracker(uri), lambda: end_running(uri, "id")):
        with pytest.raises(TrackingUnavailable) as raised:
            opened()
        said.append(str(raised.value))
    return said


def test_a_journal_that_names_a_file_deletes_nothing(database: Path, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("mine")
    plant_journal(database, precious)
    assert all("names another file, which SQLite would delete" in said for said in refusals(database))
    assert precious.read_text() == "mine"
    with closing(sqlite3.connect(database)) as opened:  # so much for what it would do
        opened.execute("SELECT * FROM experiments")
    assert not precious.exists()


def test_a_journal_of_a_killed_driver_is_played_back(database: Path) -> None:
    plant_journal(database, None)
    MlflowTracker(f"sqlite:///{database}")
    assert not Path(f"{database}-journal").exists()


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("CREATE VIEW other AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n", "view"),
        ("CREATE TRIGGER other AFTER INSERT ON runs BEGIN DELETE FROM experiments; END", "trigger"),
        ("CREATE VIRTUAL TABLE other USING fts5(text)", "table"),
    ],
)
def test_what_runs_by_itself_is_refused(database: Path, sql: str, kind: str) -> None:
    with closing(sqlite3.connect(database)) as opened:
        opened.execute(sql)
    assert all(f"holds the {kind} 'other', which MLflow has not made" in said for said in refusals(database))


@pytest.mark.long
def test_a_store_of_mlflow_is_known_without_the_cache(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    client_of(f"sqlite:///{database}").create_experiment("mine")
    shutil.rmtree(tmp_path / "home")
    client_of(f"sqlite:///{database}").create_experiment("another")
