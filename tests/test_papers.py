"""The papers' numbers: what `python -m benchmarks.papers` prints, and what the sweeps of sweeps/papers plan."""

from __future__ import annotations

import csv
import os
import re
import runpy
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import dpsweep
from benchmarks.experiments import EXPERIMENTS, PLANNED_ONLY
from benchmarks.measures import measured
from benchmarks.papers import PAPERS
from benchmarks.reproduce import collect
from benchmarks.reproduced import (
    StoredDifference,
    StoredSetting,
    StoredSweep,
    difference,
    over_runs,
    read_stored,
    write_stored,
)
from benchmarks.scorecard import RESULTS, printed_value
from dpsweep.orchestration.store.layout import SweepFiles
from tests.known import known
from tests.workers.data_folders import make_utkface

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "sweeps" / "papers"
SCORECARD = ROOT / "docs" / "reproduction.md"
SCRIPT = runpy.run_path(str(ROOT / "docs" / "reproduction.py"))
CORRELATED = {
    *((3.191, 20), (8.782, 20), (19.535, 20)),
    *((1.831, 20), (4.787, 20), (10.44, 20)),
    *((0.824, 20), (1.611, 20), (3.143, 20)),
}
IN_ORDER = {(21.928, 20), (18.583, 20), (11.719, 20), (9.931, 20), (3.528, 20), (2.99, 20)}
PLANNED: Mapping[str, tuple[set[tuple[float, int]], float]] = {
    "a-mnist": ({(1.724, 40)}, 2.4),
    "a-mnist-hinge": ({(1.705, 40)}, 2.4),
    "a-mnist-cnn": ({(1.705, 40)}, 2.4),
    "a-thresholds": ({(1.323, 20)}, 2.4),
    "a-cifar": ({(3.427, 300)}, 7.8),
    "a-cifar-small": ({(1.311, 30)}, 7.8),
    "c-table2": ({(10.0, 38), (10.0, 31), (10.0, 71), (10.0, 44)}, 6.766),
    "c-table2-uniform": ({(8.0, 100)}, 6.789),
    "c-table2-same-epochs": ({(4.932, 38), (4.454, 31), (6.741, 71), (5.307, 44)}, 6.789),
    "c-table2-longer": ({(6.4, 64), (8.0, 100)}, 6.789),
    "c-table2-validation": ({(10.0, 39)}, 6.601),
    "c-table2-layers": ({(5.657, 100), (7.071, 38)}, 10.052),
    "c-table4": ({(10.0, 60)}, 6.672),
    "c-figure6": ({(10.0, 30), (10.0, 60), (10.0, 100)}, 6.787),
    "c-figure7": ({(10.0, 94), (10.0, 49), (10.0, 28), (10.0, 10), (10.0, 5)}, 6.764),
    "c-figure8": ({(10.0, 20), (10.0, 26), (10.0, 39), (10.0, 72)}, 6.697),
    "c-figure9": ({(10.0, 60)}, 6.672),
    "c-figure10": ({(10.0, 60)}, 6.672),
    "c-figure11": ({(7.0, 60), (10.0, 60), (14.0, 60), (20.0, 60)}, 6.724),
    "c-figure11-decay": ({(7.0, 40), (10.0, 58), (14.0, 77), (20.0, 99)}, 6.770),
    "c-cancer": ({(25.0, 500)}, 4.692),
    "c-cancer-exponential": ({(30.0, 446)}, 4.689),
    "c-cancer-validation": ({(35.0, 833)}, 4.691),
    "d-adult": ({(0.998, 20), (1.003, 20)}, 3.1),
    "d-adult-uci": ({(1.046, 20), (1.052, 20)}, 3.1),
    "d-dutch": ({(0.999, 20), (1.004, 20)}, 2.66),
    "d-mnist": ({(0.8, 60), (0.873, 60)}, 6.55),
    "d-mnist-short": ({(0.803, 20), (0.877, 20)}, 4.2),
    "d-table3": ({(0.803, 20)}, 4.2),
    "d-figure3": ({(0.8, 20), (1.6, 20), (3.2, 20), (6.4, 20)}, 5.192),
    "d-mnist-search": ({(0.807, 6), (0.883, 6), (0.81, 6)}, 3.1),
    "adult-bounds": ({(0.998, 20), (1.003, 20)}, 3.1),
    "adult-payers": ({(0.998, 20), (2.164, 20), (1.003, 20), (2.173, 20)}, 3.1),
    "mnist-payers": ({(0.807, 6), (1.598, 6), (0.81, 6), (1.603, 6)}, 3.1),
    "adult-filter": ({(1.772, 20), (1.418, 20)}, 1.0),
    "adult-tuning": ({(1.808, 10), (1.838, 10)}, 1.0),
    "scattering-mnist": ({(3.003, 40)}, 3.0),
    "scattering-fashion": ({(4.304, 40)}, 3.0),
    "batches-digits": ({(2.725, 30), (3.114, 30), (5.922, 30), (9.161, 30), (10.3, 30), (20.434, 30)}, 4.0),
    "batches-adult": ({(1.601, 3), (1.789, 3), (6.37, 3), (6.682, 3), (7.318, 3), (32.89, 3)}, 1.0),
    "batches-mnist": ({(1.282, 10), (1.386, 10), (3.419, 10), (3.794, 10), (3.942, 10), (11.798, 10)}, 4.0),
    "noise-mnist": (CORRELATED | IN_ORDER, 8.0),
    "noise-cifar": (CORRELATED | IN_ORDER, 8.0),
}
"""The (initial noise multiplier, epochs) of the private trials of each sweep, and the largest epsilon.

Printed: epsilon 2.4 and 7.8 (A); the multipliers and the epochs of C; epsilon 3.1, 2.66 and 6.55 of D, where noise
multipliers of 1, 1 and 0.8 give them at the paper's sizes. The last twelve sweeps go beyond the papers.
"""

FACES = "a-utkface"
"""The sweep whose data are not at hand."""

SLOW = (
    *("a-cifar", "a-cifar-small", "scattering-mnist", "scattering-fashion"),
    *("batches-adult", "batches-mnist", "noise-mnist", "noise-cifar"),
)
"""Sweeps whose data take long to load, or whose noise to calibrate."""


def test_every_verdict_follows_from_the_numbers_beside_it() -> None:
    """Computed anew from the rows of the table, whose intervals are rounded to four digits."""
    verdicts: Counter[str] = Counter()
    for row in csv.DictReader((ROOT / "docs" / "reproduction.csv").open()):
        verdicts[row["verdict"]] += 1
        if row["verdict"] not in ("inside", "outside"):
            continue
        printed, low, high = row["printed"].removeprefix("> "), float(row["low"]), float(row["high"])
        slack = 0.5 * 10.0 ** -len(printed.partition(".")[2]) + 0.0001 * max(1.0, abs(high))
        inside = float(printed) - slack <= high and (row["printed"] > ">" or float(printed) + slack >= low)
        clearly = slack < min(abs(float(printed) - end) for end in (low, high))
        assert not clearly or inside == (row["verdict"] == "inside"), row
    assert verdicts["inside"] + verdicts["outside"] > 150
    counts = known(re.search(r"(\d+) lie inside our interval and (\d+) outside", SCORECARD.read_text()))
    assert [int(count) for count in counts.groups()] == [verdicts["inside"], verdicts["outside"]]


def test_every_printed_number_belongs_to_one_line_of_the_scorecard() -> None:
    """But for Paper A's Figures 1 and 4 with another network, the epochs of Cancer, and an outside table."""
    lines = Counter((each.sweep, item.item) for paper in RESULTS.values() for each in paper for item in each.of())
    assert set(lines.values()) == {1}
    printed = {(name, item.item) for name, of in EXPERIMENTS.items() for item in of.items if printed_value(item)}
    left = {name for name, _ in printed - lines.keys()}
    assert left == {"a-mnist-cnn", "c-cancer", "scattering-mnist", "scattering-fashion"}
    results = [each for paper in RESULTS.values() for each in paper if each.of()]
    assert all(each.headline in {item.item for item in each.of()} for each in results)


def test_the_scorecard_fits_two_pages_and_says_how_each_line_was_judged() -> None:
    text = SCORECARD.read_text()
    rows = re.findall(r"^\| .* \| (\d+) of (\d+)(?:, (\d+) of (\d+))? \| ([\w ]+) \| .* \|$", text, re.MULTILINE)
    assert len(rows) > 10
    for inside, numbers, told, pairs, said in rows:
        every = told == pairs != ""
        assert said == ("reproduced" if inside == numbers else "in shape" if every else "not")
    assert len(text.split()) < 2_200


@pytest.mark.thinned(2)
@pytest.mark.parametrize("paper", PAPERS)
def test_what_accounting_can_check_holds(paper: str) -> None:
    items = list(PAPERS[paper]())
    assert items
    assert [item for item in items if not item.holds] == []


def test_every_sweep_is_known() -> None:
    assert {file.stem for file in SWEEPS.glob("*.yaml")} == {*PLANNED, FACES} == set(EXPERIMENTS)


def test_the_sweep_of_faces_is_ready_for_whoever_has_them(tmp_path: Path) -> None:
    """On 90 drawn faces, in batches that they fill, on a CPU."""
    sweep = yaml.safe_load((SWEEPS / f"{FACES}.yaml").read_text())
    folder = str(make_utkface(tmp_path))
    sweep["data"] = [{**each, "root": folder, "size": 16} for each in sweep["data"]]
    plan = dpsweep.plan({**sweep, "sampling": {"method": "poisson", "batch_size": 8}, "resources": {"cpus": 1}})
    assert plan.refusals == ()
    assert {planned.dataset.group_names for planned in plan.trials} == {("White", "Black", "Asian", "Indian")}
    assert {planned.dataset.class_names[0] for planned in plan.trials} == {"male", "30 or older"}


@pytest.mark.thinned(7)
@pytest.mark.skipif(not os.environ.get("DPSWEEP_DATA"), reason="needs real data: set DPSWEEP_DATA")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in PLANNED],
)
def test_each_sweep_plans_what_the_paper_prints(name: str) -> None:
    if name == "scattering-fashion" and not (Path(os.environ["DPSWEEP_DATA"]) / "FashionMNIST").is_dir():
        pytest.skip("needs FashionMNIST below DPSWEEP_DATA; its sweep file says where it is found")
    plan = dpsweep.plan(SWEEPS / f"{name}.yaml")
    assert plan.refusals == ()
    private = [planned for planned in plan.trials if planned.spec.is_private]
    found = set()
    for planned in private:
        steps = planned.trace.steps
        size = planned.dataset.train_size
        per_epoch = -(-size // planned.spec.sampling.expected_size(size))
        found.add((round(planned.spec.noise.initial_noise_multiplier, 3), -(-steps // per_epoch)))
    expected, epsilon = PLANNED[name]
    assert found == expected
    assert max(planned.worst_case.epsilon for planned in private) == pytest.approx(epsilon, abs=1e-3)


class TestStored:
    def test_every_sweep_has_a_result_or_a_reason(self) -> None:
        stored = {name for name in EXPERIMENTS if read_stored(name) is not None}
        assert stored ^ set(PLANNED_ONLY) == set(EXPERIMENTS), "run: python -m benchmarks.reproduce NAME"

    def test_the_page_is_what_is_stored(self) -> None:
        """Else run: python -m docs.reproduction"""
        stored, docs = SCRIPT["stored_results"](), ROOT / "docs"
        for name in SCRIPT["PAGES"]:
            text = (docs / f"{name}.txt").read_text()
            assert SCRIPT["page"](text, stored) == (docs / f"{name}.md").read_text()
        assert SCRIPT["table"](stored) == (docs / "reproduction.csv").read_text()
        for name, svg in SCRIPT["figures"](stored).items():
            assert (ROOT / "docs" / "images" / name).read_text() == svg
            assert ET.fromstring(svg).tag.endswith("svg")

    def test_everything_that_is_stored_is_shown(self) -> None:
        rows = csv.DictReader((ROOT / "docs" / "reproduction.csv").open())
        texts = [(ROOT / "docs" / f"{name}.txt").read_text() for name in ("beyond", "who-gains")]
        beyond = re.findall(r"^@(?:source|verdicts) (.*)$", "\n".join(texts), re.M)
        shown = {row["sweep"] for row in rows} | {name for line in beyond for name in line.split()}
        assert SCRIPT["stored_results"]().keys() == shown - set(PLANNED_ONLY)

    def test_settings_of_the_page_are_stored(self) -> None:
        for name, sweep in SCRIPT["stored_results"]().items():
            names = {setting.name for setting in sweep.settings}
            assert {item.setting for item in EXPERIMENTS[name].items} <= names, name

    def test_a_number_that_is_not_stored_is_refused(self) -> None:
        with pytest.raises(ValueError, match="names no setting of made, which has \\['a', 'b'\\]"):
            SCRIPT["page"]("{made: c: accuracy}", {"made": made()})
        assert SCRIPT["page"]("{made: b − a: accuracy}", {"made": made()}) == "+.100 [-.148, +.348]\n"

    def test_verdicts_are_those_of_the_report_turned_to_the_first_setting(self) -> None:
        first, second = made().settings
        numbers = {each: over_runs([0.5]) for each in ("noise_multiplier", "mean_squared_error")}
        settings = [
            replace(
                each,
                parameters={"epsilon": 1.0, "schedule": noise, "sampling.method": "poisson"},
                numbers={**numbers, **each.numbers, "worst_group_accuracy": each.numbers["accuracy"]},
            )
            for each, noise in ((first, "constant"), (second, "banded"))
        ]
        said = (StoredDifference("a", "b", "accuracy", -0.1, -0.15, -0.05, "worse"),)
        sweep = replace(made(), settings=tuple(settings), differences=said)
        rows = SCRIPT["page"]("@verdicts made", {"made": sweep}).splitlines()
        assert rows[2] == "| 1 | `poisson` | 0.5 | 0.5 | .600 |  | .600 |  |"
        told = "+.100 [+.050, +.150] better | .700 | one of both learnt nothing"
        assert rows[3] == f"| 1 | `banded`, `poisson` | 0.5 | 0.5 | .700 | {told} |"


def made() -> StoredSweep:
    """Two settings with three runs each, of splits that do not overlap."""
    values = {"a": (0.5, 0.6, 0.7), "b": (0.6, 0.8, 0.7)}
    settings = (
        StoredSetting(name, {}, ((0, 0), (0, 1), (0, 2)), {"accuracy": over_runs(found)})
        for name, found in values.items()
    )
    return StoredSweep("made", "", "", "", "", 6, 6, 100, 25, 0.0, 1.0, tuple(settings))


def test_differences_are_paired_by_run(tmp_path: Path) -> None:
    write_stored(made(), tmp_path)
    stored = read_stored("made", tmp_path)
    assert stored == made()
    first, second = stored.settings
    found = difference(stored, second, first, "accuracy")
    assert found.values == pytest.approx((0.1, 0.2, 0.0))


def test_splits_of_the_same_rows_widen_the_interval() -> None:
    """By sqrt((1 / 4 + 1 / 4) / (1 / 4)) where the test set is a quarter of the training set."""
    alone, drawn = over_runs([1.0, 2.0, 3.0, 4.0]), over_runs([1.0, 2.0, 3.0, 4.0], (0, 1, 2, 3), 0.25)
    assert (drawn.high or 0.0) - drawn.mean == pytest.approx(2.0**0.5 * ((alone.high or 0.0) - alone.mean))
    assert over_runs([1.0]).low is None


def test_the_command_stores_what_a_sweep_has_found(tmp_path: Path) -> None:
    sweep = {
        "name": "tumours",
        "data": "breast_cancer",
        "model": "logistic",
        "sampling": {"method": "poisson", "batch_size": 64},
        "epochs": 1,
        "clipping": ["none", "flat"],
        "seeds": [0, 1],
        "privacy": {"target_epsilon": 3, "delta": 1e-5, "accountant": "rdp"},
        "release": "raw",
    }
    stored = dpsweep.run(sweep, output=tmp_path / "tumours", address="in-process")
    found = collect(stored, "c-cancer", cpu_seconds=3.0)
    assert (found.asked, found.finished, found.overlap) == (4, 4, 0.0)
    flat = next(setting for setting in found.settings if setting.name.startswith("flat"))
    results = stored.results(all_columns=True)
    assert flat.runs == ((0, 0), (1, 0))
    assert flat.numbers["accuracy"].values == pytest.approx(
        results[results["labels.clipping"] == "flat"]["accuracy"].tolist(), abs=1e-6
    )
    sigma, steps = flat.numbers["noise_multiplier"].mean, flat.numbers["steps"].mean
    assert flat.numbers["mean_squared_error"].mean == pytest.approx(sigma**2 * (steps + 1) / 2, rel=1e-5)
    assert found.differences == (), "one private setting"
    accuracy = flat.numbers["accuracy"]
    assert accuracy.covers == "seeds and test examples"
    assert known(accuracy.low) <= accuracy.mean
    assert 0.5 < flat.numbers["training_accuracy"].mean <= 1.0


def test_what_paper_a_measures_of_a_trial(tmp_path: Path) -> None:
    """Estimates that see every step are exact, PLD is no higher than Renyi, and every group is attacked."""
    sweep = {
        "name": "tumours",
        "data": {"name": "breast_cancer", "keep": {"malignant": 0.3, "benign": 0.3}},
        "model": "logistic",
        "sampling": {"method": "poisson", "batch_size": 46},
        "epochs": 2,
        "clipping": "flat",
        "privacy": {"target_epsilon": 3, "delta": 1e-5, "accountant": "rdp"},
        "norms": {"refreshes_per_epoch": 3, "exact_examples": 50},
        "release": "raw",
    }
    stored = dpsweep.run(sweep, output=tmp_path / "tumours", address="in-process")
    (trial,) = stored.trials.values()
    found = measured("a-mnist", trial, SweepFiles(stored.folder).trial(trial.key))
    assert trial.trace.steps == 6
    assert found["refreshes_3.correlation"] == pytest.approx(1.0)
    assert -1.0 <= (found["refreshes_0.5.correlation"] or 0.0) < 1.0
    assert 0.0 < (found["mean_example_epsilon_by_pld"] or 0.0) < (found["mean_example_epsilon"] or 0.0)
    assert (found["mean_example_epsilon_by_pld"] or 0.0) <= (found["worst_case_by_pld"] or 0.0) < 3.0
    assert found["group_correlation"] == pytest.approx(-1.0) or found["group_correlation"] == pytest.approx(1.0)
    assert {"membership", "membership.malignant", "membership.benign"} <= set(found)
    assert 0.3 < (found["membership"] or 0.0) < 0.7
