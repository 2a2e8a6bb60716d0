"""A sweep that protects users, from its file to results: whose an epsilon is, and measures over users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.main import app
from dpsweep.orchestration.pipeline import render_again, run_sweep
from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes
from tests.orchestration.sample_grids import in_process
from tests.orchestration.sample_people import sweep_of_people, write_people

pytestmark = pytest.mark.long
"""Its short siblings: test_user_accuracy.py and, with the other way of forging a unit, test_claims.py."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("people")
    text = sweep_of_people(write_people(folder / "people.csv", people=40, seed=2), noise_multiplier=2)
    run_sweep(in_process(text, folder / "out"))
    return folder / "out"


def trial_of(folder: Path) -> TrialFiles:
    (root,) = (folder / "trials").iterdir()
    return TrialFiles(str(root))


def test_accuracy_over_users_counts_everybody_once(finished: Path) -> None:
    (row,) = json.loads((finished / "results.json").read_text())
    found = read_outcomes(trial_of(finished).outcomes)
    assert isinstance(found, Outcomes)
    assert found.users is not None
    right = found.predicted == found.labels
    by_user = {user: right[found.users == user].mean() for user in np.unique(found.users)}
    assert row["user_accuracy"] == pytest.approx(np.mean(list(by_user.values())))
    assert row["user_accuracy"] != pytest.approx(row["accuracy"])
    of_groups = []
    for place, name in enumerate(found.group_names):
        mine = np.unique(found.users[found.groups == place])
        of_groups.append(np.mean([by_user[user] for user in mine]))  # each is in one group
        assert row["by_group"][name]["user_accuracy"] == pytest.approx(of_groups[-1])
    assert row["user_accuracy_gap"] == pytest.approx(max(of_groups) - min(of_groups))
    assert row["worst_group_user_accuracy"] == pytest.approx(min(of_groups))
    interval = row["setting"]["intervals"]["user_accuracy"]
    assert interval["low"] < row["user_accuracy"] < interval["high"]


def claims_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result["worst_case"], *result["others"], *result["groups"]]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "epsilon": (
        lambda result: [each.update(unit="example") for each in claims_of(result)],
        "claims epsilon per example, but its trace costs that per user",
    ),
    "another word": (
        lambda result: result["worst_case"].update(unit="row of a user"),
        "per row of a user, but its trace costs that per user",
    ),
    "specification": (
        lambda result: [
            result["spec"].pop("users"),
            *(each.update(unit="example") for each in (*claims_of(result), *result["risks"])),
        ],
        "its trace protects user of 2 rows, but its spec example of 1",
    ),
    "attacks": (lambda result: result["risks"][0].update(unit="example"), "attacks on example"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_unit_is_refused(finished: Path, tmp_path: Path, forgery: str) -> None:
    shutil.copytree(finished, tmp_path / "out")
    change, message = FORGERIES[forgery]
    uri = trial_of(tmp_path / "out").result
    values = json.loads(read_sealed(uri, "") or b"")
    change(values)
    write_sealed(uri, json.dumps(values).encode())
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "out")])
    assert verified.exit_code != 0
    with pytest.raises(DataCorruption, match=message):
        render_again(str(tmp_path / "out"))


def test_a_forged_unit_in_the_table_of_results_is_found(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    table = tmp_path / "out" / "results.json"
    assert '"unit": "user"' in table.read_text()
    table.write_text(table.read_text().replace('"unit": "user"', '"unit": "example"'))
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "out")])
    assert "results.json: its sha256 di" in str(verified.exception)
