"""`dpsweep best` and `Sweep.best`: the winner, its interval, what cannot be told from it, and its model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import dpsweep
from accounting.errors import DataCorruption, InvalidInput
from orchestration.commands.main import app
from orchestration.records.layout import SweepFiles
from tests.orchestration.execution.test_upkeep import files as files
from tests.orchestration.execution.test_upkeep import trained as trained
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.sample_outcomes import outcomes
from tests.orchestration.sample_results import stored_sample
from workers.outcomes import write_outcomes

KEYS = keys_of(small(clipping=["none", "flat"], noise="constant", seeds=[0, 1]))


def chosen(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["best", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep whose only finished private trial has outcomes, though not those of its evaluation."""
    files = stored_sample(tmp_path / "sweep")
    for name, right in (("flat-seed0", (0.8, 0.6)), ("non-private-seed0", (0.9, 0.9))):
        write_outcomes(files.trial(KEYS[name]).outcomes, replace(outcomes(right), group_names=("a", "b")))
    return tmp_path / "sweep"


def test_it_prints_the_setting_its_interval_and_its_model(folder: Path) -> None:
    done = chosen(folder, "--max-epsilon", "8", "--at-least", "worst_group=0.5")
    assert done.exit_code == 0, done.output
    first, *others = done.stdout.splitlines()
    assert first.startswith("flat · constant: accuracy 70.0% (95% interval ")
    assert "epsilon 3.00" in first
    assert "the interval is of the choice of test examples alone: there is one seed" in others
    assert f"model: {folder}/trials/{KEYS['flat-seed0']}/model.pt" in others
    assert any(line.startswith("no guarantee (known_seed): the noise is drawn from a known seed") for line in others)


def test_python_and_json_say_the_same(folder: Path) -> None:
    stored = json.loads(chosen(folder, "--by", "worst_group", "--json").stdout)
    found = dpsweep.open(folder).best("worst_group")
    assert stored == {**found.as_dict(), "model": f"{folder}/trials/{KEYS['flat-seed0']}/model.pt"}
    assert (stored["by"], stored["value"]) == ("worst_group_accuracy", pytest.approx(0.6))
    assert (stored["trial"], stored["epsilon"]) == (KEYS["flat-seed0"], 3.0)


def test_an_older_sweep_has_a_winner_without_an_interval(tmp_path: Path) -> None:
    stored_sample(tmp_path / "old")
    done = chosen(tmp_path / "old")
    assert done.stdout.startswith("flat · constant: accuracy 70.0%, epsilon 3.00")
    assert "no interval is known" in done.stdout


def test_impossible_conditions_say_what_is_possible(folder: Path) -> None:
    refused = chosen(folder, "--at-least", "worst_group=0.99").exception
    assert isinstance(refused, InvalidInput)
    assert "the most of worst_group_accuracy is 0.6" in str(refused)


def test_numbers_of_another_type_are_one_line(folder: Path) -> None:
    stored = dpsweep.open(folder)
    with pytest.raises(InvalidInput, match="max_epsilon is '8', but must be a number"):
        stored.best(max_epsilon="8")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"at_least\['accuracy'\] is None, but must be a number"):
        stored.best(at_least={"accuracy": None})  # type: ignore[dict-item]
    assert stored.best(max_epsilon=8).value == stored.best().value


@pytest.mark.parametrize("name", ["model", "inputs"])
def test_a_damaged_model_is_not_named(files: SweepFiles, name: str) -> None:
    assert chosen(files.root).exit_code == 0
    damaged = Path(getattr(files.trial(chosen_key(files)), name))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    refused = chosen(files.root).exception
    assert isinstance(refused, DataCorruption)
    assert str(refused).startswith(f"{damaged}: its sha256 differs")


def chosen_key(files: SweepFiles) -> str:
    return str(json.loads(chosen(files.root, "--json").stdout)["trial"])
