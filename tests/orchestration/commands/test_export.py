"""`dpsweep export`: one row per trial, the columns of the library, no formulas, nothing private."""

from __future__ import annotations

import csv
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import csv as arrow_csv
from pyarrow import parquet

import dpsweep
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.comparison.metrics import of_task
from dpsweep.orchestration.comparison.stored import stored_record, stored_settings
from dpsweep.orchestration.comparison.trials_table import FORMULA, as_csv, as_parquet
from dpsweep.orchestration.report.writing import write_reports
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.workers.evaluation.outcomes import write_outcomes
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.sample_outcomes import outcomes
from tests.orchestration.sample_results import EXACT, stored_sample

KEYS = keys_of(small(clipping=["none", "flat"], noise="constant", seeds=[0, 1]))


def export(folder: Path, file: Path, *options: str) -> str:
    return printed("export", folder, "--to", file, *options or ("--all-columns",))


def read_csv(file: Path) -> dict[str, dict[str, str]]:
    """The rows by the key of their trial, as texts."""
    with file.open(newline="") as text:
        return {row["key"]: row for row in csv.DictReader(text)}


def test_a_row_per_trial_has_what_varies_its_state_and_all_metrics(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    assert "4 trials" in export(tmp_path / "sweep", tmp_path / "a.csv")
    rows = read_csv(tmp_path / "a.csv")
    baseline, private, failed = (rows[KEYS[name]] for name in ("non-private-seed0", "flat-seed0", "flat-seed1"))
    assert {metric.name for metric in of_task("classification")} <= private.keys()
    assert (private["status"], failed["status"], failed["error"]) == ("finished", "failed", "lost")
    assert [row["labels.seed"] for row in rows.values()] == ["0", "1", "0", "1"]
    assert [row["parameters.clipping.name"] for row in rows.values()] == ["none", "none", "flat", "flat"]
    assert (failed["parameters.target_epsilon"], baseline["parameters.target_epsilon"]) == (
        "5",
        "",
    )
    assert (float(private["epsilon"]), float(private["accuracy"])) == (3.0, 0.7)
    assert (private["private"], baseline["epsilon"]) == ("true", "")
    assert (private["groups.2.epsilon"], private["fairness.accuracy_gap"]) == ("7.5", "0.2")
    assert not any(name.startswith("parameters.model") for name in private), "it does not vary"


def test_changes_that_no_baseline_bears_are_not_written(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    files = SweepFiles(str(tmp_path / "sweep"))
    write_reports(files, stored_record(files))
    export(tmp_path / "sweep", tmp_path / "known.csv")
    known = read_csv(tmp_path / "known.csv")[KEYS["flat-seed0"]]
    assert float(known["accuracy_change"]) == pytest.approx(-0.2)
    stored = json.loads(Path(files.comparison).read_text())
    Path(files.comparison).write_text(json.dumps({**stored, "unknown_cost": "The baseline is of no use."}))
    export(tmp_path / "sweep", tmp_path / "unknown.csv")
    unknown = read_csv(tmp_path / "unknown.csv")[KEYS["flat-seed0"]]
    assert unknown["setting.unknown_cost"] == "The baseline is of no use."
    assert {value for name, value in unknown.items() if "_change" in name and "setting" not in name} == {""}


def test_python_has_the_same_columns_and_values(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    export(tmp_path / "sweep", tmp_path / "a.parquet")
    export(tmp_path / "sweep", tmp_path / "a.csv")
    table = dpsweep.open(tmp_path / "sweep").results(all_columns=True)
    stored = parquet.read_table(tmp_path / "a.parquet")
    assert stored.column_names == list(table.columns) == arrow_csv.read_csv(tmp_path / "a.csv").column_names
    for name in ("key", "status", "error"):
        assert stored[name].to_pylist() == [value if isinstance(value, str) else None for value in table[name]]
    assert stored["accuracy"].to_pylist()[0] == table["accuracy"][0] == 0.9


def test_texts_are_no_formulas_and_numbers_stay_numbers(tmp_path: Path) -> None:
    files = stored_sample(tmp_path / "sweep")
    results = Path(files.results)
    rows = json.loads(results.read_text())
    for row in rows:
        if row["error"]:
            row["error"] = '=HYPERLINK("http://x","y"),\n"z"'
    results.write_text(json.dumps(rows))
    export(tmp_path / "sweep", tmp_path / "a.csv")
    exported = read_csv(tmp_path / "a.csv")
    assert exported[KEYS["flat-seed1"]]["error"] == '\'=HYPERLINK("http://x","y"),\n"z"'
    assert float(exported[KEYS["flat-seed0"]]["accuracy_change"]) == pytest.approx(-0.2), (
        "a negative number is no formula"
    )
    export(tmp_path / "sweep", tmp_path / "a.parquet")
    errors = parquet.read_table(tmp_path / "a.parquet")["error"].to_pylist()
    assert '=HYPERLINK("http://x","y"),\n"z"' in errors, "only CSV is read as formulas"


@pytest.mark.parametrize("first", FORMULA)
def test_every_way_to_begin_a_formula_is_neutralised(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv([{f"{first}name": f"{first}1", "n": -1.5, "mixed": 1}]))
    with (tmp_path / "a.csv").open(newline="") as text:
        assert list(csv.reader(text)) == [[f"'{first}name", "n", "mixed"], [f"'{first}1", "-1.5", "1"]]


def test_a_column_of_numbers_and_words_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(
        as_parquet([{"x": 1, "y": 2}, {"x": "flat", "y": 2.5}, {"x": None, "y": None}])
    )
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert table == {"x": ["1", "flat", None], "y": [2.0, 2.5, None]}


def test_nothing_private_is_exported_and_exact_numbers_make_a_private_file(tmp_path: Path) -> None:
    """The owner's statistics lie in ``private/`` of both sweeps; only ``release: raw`` shows them."""
    stored_sample(tmp_path / "closed")
    stored_sample(tmp_path / "open", individuals=EXACT, release="raw")
    for name in ("closed", "open"):
        (tmp_path / f"{name}.csv").touch(0o644)
        export(tmp_path / name, tmp_path / f"{name}.csv")
    closed, shown = (read_csv(tmp_path / f"{name}.csv")[KEYS["flat-seed0"]] for name in ("closed", "open"))
    assert (closed["mean_example_epsilon"], shown["mean_example_epsilon"]) == ("", str(EXACT.mean))
    assert str(EXACT.mean) not in (tmp_path / "closed.csv").read_text()
    modes = [stat.S_IMODE((tmp_path / f"{name}.csv").stat().st_mode) for name in ("closed", "open")]
    assert modes[0] != 0o600
    assert modes[1] == 0o600


def test_nobody_but_its_owner_can_write_what_is_exported(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    before = os.umask(0)
    try:
        export(tmp_path / "sweep", tmp_path / "a.csv")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.csv").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.xlsx", "format of --to"), ("missing/a.csv", "--to .*missing/a.csv cannot be written: No such file")],
)
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    stored_sample(tmp_path / "sweep")
    with pytest.raises(InvalidInput, match=message):
        printed("export", tmp_path / "sweep", "--to", tmp_path / name)


def test_rows_have_the_intervals_of_their_setting(tmp_path: Path) -> None:
    files = stored_sample(tmp_path / "sweep", compare={"worst_group": "log_loss"})
    for name, right in (("flat-seed0", (0.8, 0.6)), ("non-private-seed0", (0.9, 0.9))):
        write_outcomes(files.trial(KEYS[name]).outcomes, replace(outcomes(right), group_names=("a", "b")))
    record = stored_record(files)
    write_reports(files, record)
    export(tmp_path / "sweep", tmp_path / "a.csv")
    rows = read_csv(tmp_path / "a.csv")
    private, failed = rows[KEYS["flat-seed0"]], rows[KEYS["flat-seed1"]]
    for column in ("setting.intervals.accuracy", "setting.groups.b.log_loss", "setting.groups.b.calibration_error"):
        low, value, high = (float(private[f"{column}.{end}"]) for end in ("low", "value", "high"))
        assert low < value < high, column
    assert (private["setting.name"], private["setting.runs"]) == ("flat · constant", "1")
    assert private["setting.covers"] == "test examples"
    assert (failed["setting.name"], private["worst_group_by"]) == ("", "log_loss")
    stored = {row["key"]: row for row in json.loads(Path(files.results).read_text())}
    kept = stored[KEYS["flat-seed0"]]["setting"]["intervals"]
    assert kept["accuracy"]["low"] == pytest.approx(float(private["setting.intervals.accuracy.low"]))
    Path(files.comparison).write_text("{}")
    with pytest.raises(DataCorruption, match=r"comparison\.json is damaged; delete it"):
        stored_settings(files)


def test_by_default_there_are_only_columns_that_say_something(tmp_path: Path) -> None:
    files = stored_sample(tmp_path / "sweep")
    write_reports(files, stored_record(files))
    all_of_them = export(tmp_path / "sweep", tmp_path / "all.parquet")
    said = printed("export", files.root, "--to", tmp_path / "a.parquet")
    table, whole = (parquet.read_table(tmp_path / name) for name in ("a.parquet", "all.parquet"))
    assert f"{len(whole.column_names)} columns" in all_of_them
    assert f"{len(table.column_names)} columns; --all-columns writes all {len(whole.column_names)}" in said
    assert set(table.column_names) < set(whole.column_names)
    assert {"key", "labels.seed", "status", "error", "epsilon", "kind", "accuracy", "group_accuracies.a"} <= set(
        table.column_names
    )
    assert not any(column.null_count == len(column) for column in table.columns), "none is empty"
    assert "parameters.target_epsilon" in table.column_names
    assert not any(name.startswith(("by_group.", "risks.", "groups.")) for name in table.column_names)
    for name in table.column_names:
        assert table[name].to_pylist() == whole[name].to_pylist()
