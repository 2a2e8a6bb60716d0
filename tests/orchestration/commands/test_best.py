"""`dpsweep best` and `Sweep.best`: the winner, its interval, what cannot be told from it, and its model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import dpsweep
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.comparison.best import Best, best, best_lines
from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Difference, findings
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval, Covers
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.workers.evaluation.outcomes import write_outcomes
from tests.orchestration.execution.test_upkeep import files as files
from tests.orchestration.execution.test_upkeep import trained as trained
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.sample_outcomes import outcomes, sweep_of
from tests.orchestration.sample_results import stored_sample
from tests.orchestration.tracking.recordings import NOTHING

SEEDS: Covers = "seeds and test examples"
KEYS = keys_of(small(clipping=["none", "flat"], noise="constant", seeds=[0, 1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep whose only finished private trial has outcomes, though not those of its evaluation."""
    files = stored_sample(tmp_path / "sweep")
    for name, right in (("flat-seed0", (0.8, 0.6)), ("non-private-seed0", (0.9, 0.9))):
        write_outcomes(files.trial(KEYS[name]).outcomes, replace(outcomes(right), group_names=("a", "b")))
    return tmp_path / "sweep"


def test_it_prints_the_setting_its_interval_and_its_model(folder: Path) -> None:
    first, *others = printed("best", folder, "--max-epsilon", "8", "--at-least", "worst_group=0.5").splitlines()
    assert first.startswith("flat · constant: accuracy 70.0% (95% interval ")
    assert first.endswith("epsilon 3.00 at delta 1e-05 (estimate, add_remove)")
    assert any("test examples alone; whether it is the best is unknown (one seed)" in line for line in others)
    assert f"model: {folder}/trials/{KEYS['flat-seed0']}/model.pt" in others
    assert any(line.startswith("no guarantee (known_seed): the noise is drawn from a known seed") for line in others)


def test_python_and_json_say_the_same(folder: Path) -> None:
    stored = json.loads(printed("best", folder, "--by", "worst_group", "--json"))
    found = dpsweep.open(folder).best("worst_group")
    assert stored == {**found.as_dict(), "model": f"{folder}/trials/{KEYS['flat-seed0']}/model.pt"}
    assert (stored["by"], stored["value"]) == ("worst_group_accuracy", pytest.approx(0.6))
    assert (stored["trial"], stored["epsilon"]) == (KEYS["flat-seed0"], 3.0)
    assert (stored["delta"], stored["adjacency"], stored["unit"]) == (1e-5, "add_remove", "example")


def test_an_older_sweep_has_a_winner_without_an_interval(tmp_path: Path) -> None:
    stored_sample(tmp_path / "old")
    said = printed("best", tmp_path / "old")
    assert said.startswith("flat · constant: accuracy 70.0%, epsilon 3.00")
    assert "no interval is known" in said


def test_impossible_conditions_say_what_is_possible(folder: Path) -> None:
    assert "the most of worst_group_accuracy is 0.6" in refused(
        InvalidInput, "best", folder, "--at-least", "worst_group=0.99"
    )


def test_without_a_known_change_it_says_why() -> None:
    trials, evidence = sweep_of({"flat": (0.9, 0.8)}, seeds=2)
    found = findings(replace(NOTHING, trials=tuple(trials)), gather(trials, evidence))
    for least in ({}, {"accuracy_change": 0.0}):
        with pytest.raises(InvalidInput, match=r"No baseline was trained: add none to clipping$"):
            best(found, "accuracy_change", at_least=least)


def test_numbers_of_another_type_are_one_line(folder: Path) -> None:
    stored = dpsweep.open(folder)
    with pytest.raises(InvalidInput, match="max_epsilon is '8', but must be a number"):
        stored.best(max_epsilon="8")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"at_least\['accuracy'\] is None, but must be a number"):
        stored.best(at_least={"accuracy": None})  # type: ignore[dict-item]
    assert stored.best(max_epsilon=8).value == stored.best().value


@pytest.mark.parametrize("name", ["model", "inputs"])
def test_a_damaged_model_is_not_named(files: SweepFiles, name: str) -> None:
    assert invoked("best", files.root).exit_code == 0
    damaged = Path(getattr(files.trial(chosen_key(files)), name))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert refused(DataCorruption, "best", files.root).startswith(f"{damaged}: its sha256 differs")


def chosen_key(files: SweepFiles) -> str:
    return str(json.loads(printed("best", files.root, "--json"))["trial"])


def alike(count: int, spans: bool = False) -> Best:
    """A winner from which ``count`` settings cannot be told, each a point further away than the one before."""
    trials, evidence = sweep_of({"flat": (0.9, 0.8)}, seeds=2)
    data = replace(NOTHING, trials=tuple(trials))
    found = best(findings(data, gather(trials, evidence)))
    ends = (-1.0, 1.0) if spans else (-0.5, 0.6)
    differences = [
        Difference(found.name, f"other {place}", "accuracy", ConfidenceInterval(0.01 * place, *ends, 2, SEEDS))
        for place in reversed(range(count))
    ]
    return replace(found, alike=tuple(differences))


def test_of_many_that_cannot_be_told_from_it_the_nearest_three_are_named() -> None:
    lines = [line for line in best_lines(alike(99), "model.pt") if "told from it" in line]
    assert lines[0] == "cannot be told from it: 99 settings; the nearest 3 (--all shows the rest):"
    assert [line.partition(" (")[0].removeprefix("cannot be told from it: ") for line in lines[1:]] == [
        "other 0",
        "other 1",
        "other 2",
    ]
    assert "differs by −60.0 to +50.0 points" in lines[1]
    assert sum("told from it" in line for line in best_lines(alike(99), "model.pt", show_all=True)) == 99


def test_an_interval_that_spans_everything_is_said_in_words() -> None:
    found = alike(2, spans=True)
    whole = ConfidenceInterval(found.value, 0.0, 1.0, 2, SEEDS)
    lines = list(best_lines(replace(found, interval=whole), "model.pt"))
    assert "(two seeds cannot tell: the 95% interval spans the whole range)" in lines[0]
    assert "other 1 (measured −1.0 points, but two seeds cannot tell: any difference is possible)" in " ".join(lines)
    assert "100.0" not in " ".join(lines)
