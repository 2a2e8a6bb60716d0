"""New rows are read as those of the training table were, whatever else and in whatever order their table holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import NewRows, load_source, reader_of_rows
from dpsweep.workers.spec import DataSpec

DECLARED: dict[str, Any] = {
    "label": "y",
    "features": ["pay", "code", "job", "emb", "note"],
    "ranges": {"pay": [0, 2000], "emb": [0, 1]},
    "categories": {"code": ["007", "7"], "job": ["a", "b"]},
    "numbers": {"pay": "comma"},
    "hashed": {"note": 32},
    "ignore_case": ["job"],
    "classes": ["no", "yes"],
}
ROWS = pa.table(
    {
        "id": ["u", "v", "w"],
        "job": ["A", "b", "a"],
        "note": ["call me", "later", "now"],
        "pay": ["1.000,5 €", "20", "2.500"],
        "code": ["007", "7", "007"],
        "emb": [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]],
        "y": ["no", "yes", "no"],
    }
)
Read = Callable[[pa.Table], NewRows]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Rows of a .parquet file, by the columns of a source of `ROWS`."""
    path = tmp_path / "people.parquet"
    parquet.write_table(ROWS, path)
    columns = load_source(DataSpec("parquet", {"path": str(path), **DECLARED})).columns
    assert columns is not None

    def read(rows: pa.Table) -> NewRows:
        parquet.write_table(rows, tmp_path / "new.parquet")
        return reader_of_rows(columns).encoded(str(tmp_path / "new.parquet"))

    return read


def test_features_are_those_of_training_without_labels_and_in_any_order(read: Read, tmp_path: Path) -> None:
    expected = load_source(DataSpec("parquet", {"path": str(tmp_path / "people.parquet"), **DECLARED})).train.features
    found = read(ROWS.drop_columns(["y"]).select(["code", "emb", "id", "note", "job", "pay"]).take([2, 0, 1]))
    assert np.array_equal(found.features, expected.numpy()[[2, 0, 1]])
    assert found.notes == ("pay: 1 of 3 rows lie outside the range 0 to 2000, and are cut",)


def test_missing_and_undeclared_values_are_counted(read: Read) -> None:
    jobs = ROWS.set_column(1, "job", pa.array(["c", None, "a"])).drop_columns(["y"])
    found = read(jobs)
    assert (found.complete.tolist(), found.total, len(found.features)) == ([0, 2], 3, 2)
    assert (found.notes[0], found.notes[2]) == (
        "1 of 3 rows have no prediction: they lack a value (job 1)",
        "job: 1 of 2 rows hold no declared category, and count as none",
    )


def test_numbers_of_another_convention_are_said_to_be_missing(read: Read) -> None:
    found = read(ROWS.set_column(3, "pay", pa.array(["1,000.5", "2.5", "3"])))
    assert found.notes[0] == (
        "2 of 3 rows have no prediction: they lack a value or write numbers otherwise than declared (pay 2)"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda rows: rows.slice(0, 0), "has no rows"),
        (lambda rows: rows.drop_columns(["job"]), "there is no column 'job' in"),
        (lambda rows: rows.append_column("job", rows["job"]), "more than one column called 'job'; leave one"),
        (lambda rows: rows.set_column(5, "emb", pa.array([[0.1] * 3] * 3)), r"'emb' holds lists of 3 numbers .* of 2"),
        (lambda rows: rows.set_column(5, "emb", pa.array([[0.1]] * 3)), r"'emb' holds lists of 1 numbers .* of 2"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(
    read: Read, changed: Callable[[pa.Table], pa.Table], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(changed(ROWS))


def test_texts_where_numbers_were_declared_are_refused(tmp_path: Path) -> None:
    csv.write_csv(pa.table({"x": [1, 2], "y": ["a", "b"]}), tmp_path / "old.csv")
    params = {"path": str(tmp_path / "old.csv"), "label": "y", "ranges": {"x": [0, 5]}}
    columns = load_source(DataSpec("csv", params)).columns
    assert columns is not None
    assert columns["outputs"] is None, "classes were read off the rows"
    csv.write_csv(pa.table({"x": ["1", "many"]}), tmp_path / "new.csv")
    with pytest.raises(InvalidInput, match=r"column 'x' has a range but holds more than numbers; .* with `numbers`"):
        reader_of_rows(columns).encoded(str(tmp_path / "new.csv"))


def test_what_was_read_off_the_rows_is_not_kept(tmp_path: Path) -> None:
    csv.write_csv(pa.table({"x": [1, 2], "z": [1, 2], "y": ["a", "b"]}), tmp_path / "old.csv")
    params = {"path": str(tmp_path / "old.csv"), "label": "y", "ranges": {"x": [0, 5]}}
    assert load_source(DataSpec("csv", params)).columns is None
