"""`dpsweep list FOLDER`: each sweep below a folder in one line."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.commands.main import app
from dpsweep.orchestration.records.states import TrialState
from dpsweep.orchestration.records.status_snapshot import SweepSnapshot, TrialSnapshot, write_snapshot
from tests.hostile.of_folders import write_json
from tests.orchestration.sample_results import stored_sample

TRIALS = (
    TrialSnapshot("a", TrialState.FINISHED, 20, 20),
    TrialSnapshot("b", TrialState.TRAINING, 10, 20),
    TrialSnapshot("c", TrialState.ACCOUNTING, 20, 20),
    TrialSnapshot("d", TrialState.PENDING, 0, 20),
)


def listed(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["list", *map(str, arguments)], env={"RAY_API_SERVER_ADDRESS": ""})


def found(folder: object) -> dict[str, Any]:
    """By folder, from ``--json``."""
    return {Path(each["folder"]).name: each for each in json.loads(listed(folder, "--json").stdout)["sweeps"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short path, so that no line of a table with paths is broken."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_sweeps_are_found_at_any_depth_with_trials_by_state_and_last_change(folder: Path) -> None:
    stored_sample(folder / "runs" / "deep" / "old")
    running = stored_sample(folder / "runs" / "new", name="digits")
    beat = time.time() - 2.0
    write_snapshot(
        running.status, SweepSnapshot("digits", "id", "running", beat, 9.0, 9.0, "h", 1, None, TRIALS), False
    )
    (folder / "runs" / "empty").mkdir()
    sweeps = found(folder)
    assert sweeps.keys() == {"old", "new"}
    assert sweeps["old"]["trials"] == {"finished": 2, "failed": 2}
    assert (sweeps["old"]["name"], sweeps["old"]["state"], sweeps["old"]["problem"]) == ("small", "unknown", None)
    assert sweeps["new"]["trials"] == {"pending": 1, "running": 2, "finished": 1}
    assert (sweeps["new"]["state"], sweeps["new"]["changed"]) == ("running", beat)
    lines = listed(folder).stdout.splitlines()
    assert len(lines) == 3
    minute = time.strftime("%Y-%m-%d %H:%M", time.gmtime(beat))
    row = next(line for line in lines if line.startswith("digits"))
    assert f"running  1 pending, 2 running, 1 finished  {minute}" in " ".join(row.split(" "))


def test_a_driver_that_is_gone_is_called_stale(tmp_path: Path) -> None:
    files = stored_sample(tmp_path)
    gone = SweepSnapshot("small", "id", "running", time.time() - 600.0, 9.0, 9.0, "h", 1, None, TRIALS)
    write_snapshot(files.status, gone, False)
    assert found(f"file://{tmp_path}").popitem()[1]["state"] == "stale"


def test_links_hidden_folders_and_the_inside_of_sweeps_are_left_out(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep")
    stored_sample(tmp_path / "sweep" / "trials" / "copy")
    stored_sample(tmp_path / ".hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(found(tmp_path)) == ["sweep"]


def test_what_is_no_sweep_is_refused_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        refused = listed(folder)
        assert isinstance(refused.exception, InvalidInput)
        assert str(refused.exception).splitlines() == [
            f"{folder} holds no sweep, and no folder below it does; name one that `dpsweep run` wrote to"
        ]
    stored_sample(tmp_path / "good")
    damaged = stored_sample(tmp_path / "bad")
    Path(damaged.manifest).write_text("{}")
    shown = listed(tmp_path)
    assert isinstance(shown.exception, DataCorruption)
    assert "bad/sweep.json" in str(shown.exception)
    assert "good" in shown.stdout


def test_neither_folder_nor_cluster_is_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"give a FOLDER .* or the --address"):
        raise listed().exception or AssertionError


@pytest.mark.parametrize(
    ("name", "value"),
    [("heartbeat", math.nan), ("heartbeat", 1e300), ("elapsed", math.inf), ("seconds_left", math.nan)],
)
def test_numbers_that_no_driver_writes_are_damage(folder: Path, name: str, value: float) -> None:
    stored_sample(folder / "good")
    status = stored_sample(folder / "bad", name="forged").status
    write_snapshot(status, SweepSnapshot("forged", "id", "running", 1.0, 9.0, 9.0, "h", 1, None, TRIALS), False)
    write_json(Path(status), {**json.loads(Path(status).read_text()), name: value})
    assert listed(folder, "--json").exit_code == 1
    sweeps = found(folder)
    assert "is no status of this version" in sweeps["bad"]["problem"]
    assert sweeps["good"]["problem"] is None


@pytest.mark.parametrize("changes", [{"created": "2020-13-45"}, {"sweep_id": None}, {"sweep": []}, {"more": 1}])
def test_a_manifest_of_other_values_is_damage(folder: Path, changes: dict[str, object]) -> None:
    manifest = Path(stored_sample(folder / "bad").manifest)
    write_json(manifest, {**json.loads(manifest.read_text()), **changes})
    assert "is no manifest of this version" in found(folder)["bad"]["problem"]


def test_folders_in_one_another_without_end_and_odd_names_are_named(folder: Path) -> None:
    stored_sample(folder / "good")
    folder.joinpath(*80 * "d").mkdir(parents=True)
    (folder / os.fsdecode(b"\xff\x1b]0;title\x07")).mkdir()
    sweeps = json.loads(listed(folder, "--json").stdout)["sweeps"]
    problems = [each["problem"] for each in sweeps if each["problem"]]
    assert len(problems) == 2
    assert any("lies more than 64 folders deep" in each for each in problems)
    assert any("\\xff" in each and "no UTF-8" in each for each in problems)
    shown = listed(folder)
    assert "\x1b" not in shown.output
    assert isinstance(shown.exception, DataCorruption)
    assert "good" in shown.stdout
