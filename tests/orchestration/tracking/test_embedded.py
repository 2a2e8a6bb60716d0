"""The empty store that is kept is what MLflow would have made, and holds nothing of the sweep that it came from."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpsweep.orchestration.tracking.embedded import client_of, embedded_tracking_uri


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".cache" / "dpsweep"


def made(folder: Path) -> Path:
    """A store that is new."""
    folder.mkdir()
    client_of(embedded_tracking_uri(folder))
    return folder / "mlflow.db"


def schema(file: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()


def experiments(file: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute("SELECT name, artifact_location FROM experiments").fetchall()


def test_a_second_store_is_a_copy_without_what_the_first_one_held(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path / "the-first-sweep")
    (kept,) = cache.iterdir()
    assert b"the-first-sweep" not in kept.read_bytes()
    assert experiments(kept) == []
    monkeypatch.setattr("mlflow.store.db.utils._initialize_tables", lambda engine: pytest.fail("tables are made again"))
    second = made(tmp_path / "second")
    assert schema(second) == schema(first) == schema(kept)
    assert len(schema(first)) > 50
    assert [name for name, _ in experiments(second)] == [name for name, _ in experiments(first)] == ["Default"]


@pytest.mark.long
def test_a_damaged_one_is_made_anew(tmp_path: Path, cache: Path) -> None:
    made(tmp_path / "first")
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    for damaged in (b"no database", whole[: len(whole) // 2]):
        kept.write_bytes(damaged)
        assert schema(made(tmp_path / f"after-{len(damaged)}")) == schema(kept)
        assert len(kept.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert len(schema(made(tmp_path / "first"))) > 50
    assert cache.read_text().startswith("a file")


def test_a_store_that_holds_something_is_left_as_it_is(tmp_path: Path, cache: Path) -> None:
    file = made(tmp_path / "first")
    client_of(embedded_tracking_uri(file.parent)).create_experiment("mine")
    client_of(embedded_tracking_uri(file.parent))
    assert [name for name, _ in experiments(file)] == ["Default", "mine"]


def test_without_a_home_it_is_made_and_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsweep.orchestration.tracking.embedded.user_cache", lambda: None)
    assert [name for name, _ in experiments(made(tmp_path / "first"))] == ["Default"]
