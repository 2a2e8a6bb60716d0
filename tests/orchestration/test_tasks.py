"""Whole sweeps of every task besides classification: results, report, MLflow, choices, and what must be absent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.evidence import Evidence, gather
from dpsweep.orchestration.comparison.formats import in_a_sentence
from dpsweep.orchestration.comparison.metrics import METRICS, known_metrics, main_metric
from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.report.page import comparison_page
from dpsweep.orchestration.store.published import (
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
    TrialState,
)
from dpsweep.workers.evaluation.outcomes import ScoredOutcomes
from dpsweep.workers.tasks import TASKS
from tests.known import known as present
from tests.orchestration.invoking import printed
from tests.orchestration.report.pages import Page
from tests.orchestration.sample_results import stored_sample
from tests.orchestration.tracking.recordings import client_of, runs_of
from tests.workers.data_folders import make_masks, make_numbers, make_texts, make_tokenizer

COMMON = """
sampling: {method: poisson, batch_size: 40}
epochs: 3
clipping: [none, flat]
seeds: [0, 1]
privacy: {target_epsilon: 8, delta: 1e-4}
"""
NUMBERS = "name: csv, path: FOLDER/numbers.csv, group: sex, groups: [f, m], features: [x0, x1, x2, x3], RANGES"
RANGES = "ranges: {x0: [-3, 3], x1: [-3, 3], x2: [-3, 3], x3: [-3, 3]}"
TEXTS = "name: text, path: FOLDER/texts.jsonl, text: body, tokenizer: FOLDER/tokenizer.json, max_length: 8, group: lang"
MASKS = (
    "name: image_masks, path: FOLDER/pictures, size: 16, classes: [ground, disc], groups: FOLDER/pictures/groups.csv"
)
SWEEPS = {
    "regression": f"data: {{{NUMBERS}, label: [y, z], task: regression}}\nmodel: logistic\nloss: mse\n"
    "optimizer: {name: sgd, learning_rate: 1.0}\n",  # enough for a setting that is of use
    "multi_label": f"data: {{{NUMBERS}, label: [red, green, blue], task: multi_label}}\nmodel: logistic\n"
    "loss: binary_cross_entropy\n",
    "language_modelling": f"data: {{{TEXTS}, groups: [de, en], objective: masked_lm}}\n"
    "model: {name: language_model, width: 8, depth: 1, heads: 2}\nloss: masked_lm\n",
    "segmentation": f"data: {{{MASKS}, group_names: [day, night]}}\nmodel: {{name: unet, width: 4}}\n"
    "loss: pixel_cross_entropy\noptimizer: {name: adam, learning_rate: 0.02}\nmin_group_size: 2\n",
}
OF_CLASSIFICATION = {metric.name for metric in METRICS if metric.task == "classification"}


def written(task: str, folder: Path, more: str = "") -> Path:
    """The sweep file of a task, with its data beside it."""
    make_numbers(folder / "numbers.csv")
    make_texts(folder / "texts.jsonl")
    make_tokenizer(folder / "tokenizer.json")
    make_masks(folder / "pictures")
    text = f"name: {task}\n{SWEEPS[task]}{COMMON}{more}".replace("RANGES", RANGES).replace("FOLDER", str(folder))
    (folder / "sweep.yaml").write_text(text)
    return folder / "sweep.yaml"


@pytest.fixture(scope="module", params=SWEEPS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A task, and the folder of its sweep."""
    folder = tmp_path_factory.mktemp(request.param)
    arguments = ["run", str(written(request.param, folder)), "--address", "in-process", "--output", str(folder / "out")]
    printed(*arguments)
    return request.param, folder / "out"


def rows_of(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / "results.json").read_text())
    return found


@pytest.mark.thinned(4)
def test_results_have_the_numbers_of_the_task_and_no_others(ran: tuple[str, Path]) -> None:
    task, output = ran
    names = [score.name for score in TASKS[task].scores]
    for row in rows_of(output):
        assert row["status"] == "finished"
        assert row["task"] == task
        assert not OF_CLASSIFICATION & row.keys()
        assert not {"confusion", "group_accuracies"} & row.keys()
        assert all(math.isfinite(row[name]) for name in names)
        assert all(row["by_group"][group].keys() >= {*names, "loss"} for group in row["by_group"])
        assert row["worst_group_by"] == TASKS[task].main
        of_groups = {group: each[TASKS[task].main] for group, each in row["by_group"].items()}
        worst = min(of_groups.values())
        assert row[f"worst_group_{TASKS[task].main}"] == worst
        served_worst = [group for group, value in of_groups.items() if value == worst]
        assert row["worst_group"] == (None if len(served_worst) == len(of_groups) > 1 else ", ".join(served_worst))
        intervals = row["setting"]["intervals"]
        assert all(intervals[name]["low"] < intervals[name]["value"] < intervals[name]["high"] for name in names)
    assert {"regression": 2, "multi_label": 3, "segmentation": 2}.get(task, 0) == len(
        rows_of(output)[0].get("parts", {})
    )


@pytest.mark.thinned(4)
def test_the_report_speaks_of_the_task(ran: tuple[str, Path]) -> None:
    task, output = ran
    page = Page((output / "report.html").read_text())
    heading = main_metric(task).heading
    assert f"{heading} on test data" in page.text
    if task != "multi_label":  # each of whose labels has an accuracy
        assert "accuracy" not in page.text.lower().replace("token accuracy", "").replace("pixel accuracy", "")
    for absent in ("Equalised odds", "Calibration error", "What each class is taken for", "predicted one class", "NaN"):
        assert absent not in page.text
    assert {"group-accuracy", "utility-fairness", "accuracy", "loss"} <= set(page.plots)
    assert ("Every label, target or class" in page.text) == (task != "language_modelling")


@pytest.mark.thinned(4)
def test_headings_are_explained_for_their_task(ran: tuple[str, Path]) -> None:
    task, output = ran
    html = (output / "report.html").read_text()
    of_main = in_a_sentence(main_metric(task).heading)
    tooltips = dict(re.findall(r'title="([^"]*)">(Change|Change, points|Worst-served group)</th>', html))
    assert {heading for meaning, heading in tooltips.items() if of_main in meaning} == {*tooltips.values()}
    assert len(tooltips) == 2, "one for the change, one for the worst group"


@pytest.mark.thinned(4)
def test_beside_a_sweep_of_another_task_headings_say_whose_they_are(ran: tuple[str, Path], tmp_path: Path) -> None:
    task, output = ran
    compared = dpsweep.compare(output, stored_sample(tmp_path / "classes").root)
    heads = compared.table().columns
    assert heads.is_unique
    words = task.replace("_", " ")
    assert {f"Worst-served group ({words})", "Worst-served group (classification)", "Worst-case ε"} <= {*heads}
    page = comparison_page(compared)
    assert page.count(f"Worst-served group ({words})</") == 2, "a heading and its meaning"


@pytest.mark.thinned(4)
def test_mlflow_has_its_metrics(ran: tuple[str, Path]) -> None:
    task, output = ran
    runs = runs_of(client_of(output))
    trials = [run for run in runs if f"final/{TASKS[task].main}" in run.data.metrics and "seed" in run.data.params]
    assert len(trials) == 4
    for run in trials:
        assert {f"final/{score.name}" for score in TASKS[task].scores} <= run.data.metrics.keys()
        assert f"fairness/worst_group_{TASKS[task].main}" in run.data.metrics
        assert "final/accuracy" not in run.data.metrics
    assert any(name.startswith("final/f1_of_") for name in trials[0].data.metrics) == (task == "multi_label")
    assert ("final/iou_of_disc" in trials[0].data.metrics) == (task == "segmentation")


@pytest.mark.thinned(4)
def test_the_best_and_the_table_go_by_its_main_number(ran: tuple[str, Path]) -> None:
    task, output = ran
    sweep = dpsweep.open(output)
    if task in {"multi_label", "language_modelling"}:  # little of their data can be learnt
        with pytest.raises(InvalidInput, match=r"no setting .* is of use: flat · constant .* always predicting the"):
            sweep.best()
    else:
        best = sweep.best()
        assert best.by == TASKS[task].main
        by_name = sweep.best(TASKS[task].scores[1].name)
        assert by_name.setting.name == best.setting.name, "there is one private setting"
    with pytest.raises(InvalidInput, match=f"'accuracy' is no metric of {task}; "):
        sweep.best("accuracy")
    columns = set(sweep.results(all_columns=True).columns)
    assert {f"worst_group_{TASKS[task].main}", f"setting.intervals.{TASKS[task].main}.low"} <= columns
    assert not OF_CLASSIFICATION & columns
    assert f"{in_a_sentence(main_metric(task).heading)} " in printed("status", output)


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (
            "regression",
            "compare: {worst_group: tpr}",
            "worst_group is true_positive_rate, which regression does not",
        ),
        ("multi_label", "compare: {worst_group: mse}", "which multi_label does not have; choose micro_f1, macro_f1"),
        ("regression", "loss: cross_entropy", "loss 'cross_entropy' is for classification, but the data are for regr"),
        (
            "language_modelling",
            "model: transformer",
            r"must return \(3, 8, 16\): for each row at each position one logit",
        ),
        (
            "regression",
            "tune: {parameters: {optimizer.learning_rate: [0.1, 1]}, privacy: unaccounted}",
            "tune.select_by is accuracy, which regression does not have; choose r2, worst_group_r2",
        ),
    ],
)
def test_what_a_task_does_not_have_is_refused_when_planned(task: str, more: str, message: str, tmp_path: Path) -> None:
    file = written(task, tmp_path)
    name, _, _ = more.partition(":")
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{name}:")]
    text = "\n".join([*lines, more])
    if name == "tune":
        text = text.replace("task: regression}", "task: regression, public_fraction: 0.2}")
    file.write_text(text)
    reasons = "\n".join(each.reason for each in dpsweep.plan(file).refusals)
    assert re.search(message, reasons), reasons


def test_a_sweep_has_one_task(tmp_path: Path) -> None:
    file = written("regression", tmp_path)
    text = file.read_text().replace("data: {", "data: [{name: digits}, {")
    file.write_text(text.replace("task: regression}", "task: regression}]"))
    reasons = " ".join(each.reason for each in dpsweep.plan(file).refusals)
    assert "for classification, but" in reasons or "is for regression, but the data are for classification" in reasons


ROWS = 400


def scored(draw: np.random.Generator, seed: int, error: float) -> tuple[PublishedTrial, ScoredOutcomes]:
    """A trial whose squared errors have the mean ``error``; of the first group they are twice as large."""
    groups = np.repeat([0, 1], ROWS // 2)
    squared = draw.exponential(error * np.where(groups == 0, 4 / 3, 2 / 3))
    targets = draw.normal(size=ROWS)
    kept = np.stack([np.ones(ROWS), squared, np.sqrt(squared), targets, targets**2], 1)
    outcomes = ScoredOutcomes(np.arange(ROWS), groups, kept, ("a", "b"), "regression", "digest")
    task = TASKS["regression"]

    def scores(rows: slice) -> Mapping[str, float]:
        return {score.name: float(score.of(kept[rows].sum(0))) for score in task.scores}

    quality = PublishedQuality(
        None,
        float(squared.mean()),
        groups=tuple(
            PublishedGroup(name, ROWS // 2, None, scores=scores(rows))
            for name, rows in (("a", slice(0, ROWS // 2)), ("b", slice(ROWS // 2, ROWS)))
        ),
        task="regression",
        scores=scores(slice(None)),
    )
    labels: dict[str, str | int] = {"clipping": "flat", "schedule": "constant", "seed": seed}
    privacy = PublishedPrivacy(3.0, 1e-5, "pld")
    return PublishedTrial(f"flat-{seed}", labels, TrialState.FINISHED, privacy=privacy, quality=quality), outcomes


def evidence_of(trial: PublishedTrial, outcomes: ScoredOutcomes) -> Evidence:
    return gather([trial], {trial.key: outcomes})


def test_intervals_of_means_cover_them() -> None:
    """Of 200 test sets of skewed errors, the interval of their mean holds the true one in about 95 of 100."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(200):
        trial, outcomes = scored(draw, 0, 1.0)
        (setting,) = finished_settings([trial])
        found = present(evidence_of(trial, outcomes).interval(setting, "mse"))
        held += found.low <= 1.0 <= found.high
        assert found.value == pytest.approx(outcomes.kept[:, 1].mean(), rel=1e-6)
    assert 0.90 <= held / 200 <= 0.98


def test_an_interval_is_the_normal_one_of_a_mean() -> None:
    trial, outcomes = scored(np.random.default_rng(1), 0, 1.0)
    (setting,) = finished_settings([trial])
    evidence = evidence_of(trial, outcomes)
    for group, rows in (("", slice(None)), ("a", slice(0, ROWS // 2))):
        errors = outcomes.kept[rows, 1]
        found = present(evidence.interval(setting, "mse", group))
        half = 1.96 * errors.std() / math.sqrt(len(errors))
        assert (found.high - found.low) / 2.0 == pytest.approx(half, rel=0.12)
    assert evidence.interval(setting, "accuracy") is None
    worst = present(evidence.interval(setting, "worst_group_mse"))
    assert worst.value == pytest.approx(max(outcomes.kept[: ROWS // 2, 1].mean(), outcomes.kept[ROWS // 2 :, 1].mean()))
    explained = present(evidence.interval(setting, "r2"))
    assert explained.low < 0.3, "no share: it may be negative"


def test_there_are_intervals_where_every_group_is_too_small_to_be_shown() -> None:
    trial, outcomes = scored(np.random.default_rng(3), 0, 1.0)
    hidden = replace(trial, quality=replace(present(trial.quality), groups=()))
    (setting,), evidence = finished_settings([hidden]), evidence_of(hidden, outcomes)
    found = present(evidence.interval(setting, "mse"))
    assert found.low < found.value < found.high
    assert evidence.interval(setting, "worst_group_mse") is None


def test_numbers_without_anything_to_count_are_left_out() -> None:
    trial, _ = scored(np.random.default_rng(2), 0, 1.0)
    assert known_metrics(trial)["r2_change"] is None
    assert "accuracy" not in known_metrics(trial)
