"""Parameters and tables that a tracker is given, and a sweep that is recorded nowhere but in its folder."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from dpsweep.orchestration.comparison.parameters import parameters
from dpsweep.orchestration.store.layout import DATABASE
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.tracking.tracker import group_rows
from tests.known import known
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_sweeps import sample_trial
from tests.orchestration.tracking.recordings import client_of, runs_of


def test_no_parameter_repeats_a_label() -> None:
    """Also where the label is called otherwise than the field of the specification."""
    point = grid(parse_sweep(Path(__file__).parents[3].joinpath("sweeps", "users.yaml").read_text()))[-1]
    assert (point.labels["user_sampling"], point.labels["max_records_per_user"]) == ("uls", 8)
    shown = parameters(point.spec, point.labels)
    assert not [name for name in shown if "user" in name]
    assert "spec.users.sampling" in parameters(point.spec, {})


def test_the_table_of_groups_holds_no_number_that_json_lacks() -> None:
    """A model that diverged has a loss that is none."""
    trial = sample_trial("flat", "constant")
    quality = known(trial.quality)
    first, *others = quality.groups
    lost = replace(quality, groups=(replace(first, loss=math.nan), replace(others[0], loss=math.inf), *others[1:]))
    rows = group_rows([replace(trial, quality=lost)])
    assert [row["loss"] for row in rows[:2]] == [None, None]
    assert rows[2]["loss"] == others[1].loss
    json.dumps(rows, allow_nan=False)


def test_it_leaves_no_store_and_is_recorded_later_by_a_run_with_mlflow(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    file.write_text(small(model="logistic", clipping=["none", "flat"], noise="constant", seeds=0, epochs=1))
    run = ("run", file, "--output", out, "--address", "in-process")
    done = dpsweep(*run, "--tracking-uri", "none")
    assert (done.returncode, "Open the report:" in done.stdout, "MLflow" in done.stdout) == (0, True, False)
    assert (out / "report.html").exists()
    assert not (out / DATABASE).exists()
    shown = dpsweep("report", out)
    assert (shown.returncode, "Open the report:" in shown.stdout, "MLflow" in shown.stdout) == (0, True, False)
    refused = dpsweep("best", out, "--register", "winner", "--tracking-uri", "none")
    assert refused.returncode == 2
    assert "give the --tracking-uri of one in place of 'none'" in refused.stderr
    again = dpsweep(*run)
    assert (again.returncode, "Open MLflow:" in again.stdout) == (0, True)
    kinds = [found.data.tags["dpsweep.kind"] for found in runs_of(client_of(out))]
    assert sorted(kinds) == ["sweep", "trial", "trial"]
