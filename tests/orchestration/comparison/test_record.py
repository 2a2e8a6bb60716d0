"""What is shown of a sweep's trials, to everybody and to the owner of the data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.record import SweepRecord, parse_failures, rows
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.report.prose import SENSITIVE, headline
from dpsweep.orchestration.store.published import PublishedTrial, TrialState
from dpsweep.orchestration.store.status import status_of
from tests.known import known
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.sample_results import EXACT, result_of, sample_record, stopped_of

KEYS = keys_of(small(clipping=["none", "flat"], noise="constant", seeds=[0, 1]))
PRIVATE, BASELINE = KEYS["flat-seed0"], KEYS["non-private-seed0"]


def trials(record: SweepRecord) -> dict[str, PublishedTrial]:
    return {trial.key: trial for trial in record.data().trials}


def first_private(record: SweepRecord) -> PublishedTrial:
    return next(record.trial(point) for point in record.points if point.is_private)


def test_the_owners_report_is_marked_as_sensitive_whatever_the_sweep_says(tmp_path: Path) -> None:
    record, files = sample_record(tmp_path)
    everybody, owner = record.data(), record.data(files)
    assert (everybody.disclosure, owner.disclosure) == ("none", "raw")
    assert {trial.key: trial.individuals for trial in owner.trials}[PRIVATE] == EXACT
    assert not any(trial.individuals for trial in everybody.trials)
    assert SENSITIVE not in render(everybody)
    assert SENSITIVE in render(owner)


@pytest.mark.parametrize(("release", "tag"), [("none", None), ("private", None), ("raw", "true")])
def test_only_exact_results_are_tagged_as_sensitive(tmp_path: Path, release: str, tag: str | None) -> None:
    record, _ = sample_record(tmp_path, release=release)
    assert first_private(record).tags.get("sensitive") == tag


@pytest.mark.parametrize(("source", "reasons"), [("seeded", ("known_seed",)), ("os_entropy", ())])
def test_noise_from_a_known_seed_is_a_reason(tmp_path: Path, source: str, reasons: tuple[str, ...]) -> None:
    record, _ = sample_record(tmp_path, noise_source=source)
    assert first_private(record).reasons == reasons
    data = record.data()
    warned = "subtract it" in " ".join(headline(data, findings(data, NO_EVIDENCE)))
    assert warned == bool(reasons), "the page says first whether its ε hold against those who know the seeds"


def test_pretrained_weights_are_said_to_be_outside_every_epsilon(tmp_path: Path) -> None:
    """A model that was trained on these very rows would make the claim void."""
    text = {"name": "resnet20_gn", "initial_weights": "/models/faces.pt"}
    plain, _ = sample_record(tmp_path / "plain")
    given, _ = sample_record(tmp_path / "given", model=text)
    said = "pretrained weights /models/faces.pt are taken as public: no ε covers what they were trained on"
    assert [said in trial.notes for trial in trials(given).values()] == [True] * len(given.points)
    assert said in " ".join(headline(given.data(), findings(given.data(), NO_EVIDENCE)))
    assert not any("weights" in note for trial in trials(plain).values() for note in trial.notes)


def test_a_finished_trial_is_compared_with_its_baseline(tmp_path: Path) -> None:
    shown = trials(sample_record(tmp_path)[0])[PRIVATE]
    assert shown.quality is not None
    assert shown.quality.accuracy_change == pytest.approx(-0.2)
    assert [group.accuracy_change for group in shown.quality.groups] == pytest.approx([-0.2, -0.2])
    assert (shown.quality.accuracy, shown.quality.loss) == (0.7, 0.5)
    assert [(epoch.epoch, epoch.step, epoch.metrics["epsilon"]) for epoch in shown.history] == [
        (0, 10, 1.5),
        (1, 20, 3.0),
    ]
    assert shown.wall_seconds == 7.5


@pytest.mark.parametrize(
    "lost",
    [{"loss": math.inf}, {"task": "regression", "accuracy": None, "scores": {"r2": -4.0}, "constant": 0.0}],
    ids=["diverged", "worse than the mean"],
)
def test_nothing_is_compared_with_a_baseline_that_has_learnt_nothing(tmp_path: Path, lost: dict[str, Any]) -> None:
    record, _ = sample_record(tmp_path)
    found = known(record.finished(BASELINE))
    training = replace(found.training, evaluation=replace(found.evaluation, **lost))
    status = status_of(replace(found, training=training))
    shown = trials(replace(record, statuses={**record.statuses, BASELINE: status}))[PRIVATE]
    assert shown.quality is not None
    assert shown.quality.accuracy_change is None
    assert [group.accuracy_change for group in shown.quality.groups] == [None, None]
    assert shown.tags["baseline"] == ""


def test_selected_candidates_are_compared_although_their_seeds_differ(tmp_path: Path) -> None:
    record, _ = sample_record(tmp_path)
    drawn = ((place, point.spec) for place, point in enumerate(record.points))
    specs = [replace(spec, seed=100 + place) for place, spec in drawn]
    points = tuple(replace(point, spec=spec) for point, spec in zip(record.points, specs, strict=True))
    assert trials(replace(record, points=points))[PRIVATE].tags["baseline"] == BASELINE


def test_nothing_is_compared_with_a_baseline_that_diverged_for_another_seed(tmp_path: Path) -> None:
    record, _ = sample_record(tmp_path, finished=(0, 1))
    other = KEYS["non-private-seed1"]
    found = known(record.finished(other))
    lost = replace(found.training, evaluation=replace(found.training.evaluation, loss=math.nan))
    statuses = {**record.statuses, other: status_of(replace(found, training=lost))}
    assert trials(replace(record, statuses=statuses))[PRIVATE].tags["baseline"] == ""


def test_costs_are_shown_as_what_they_are(tmp_path: Path) -> None:
    record, _ = sample_record(tmp_path)
    point = next(point for point in record.points if point.key == PRIVATE)
    estimated = status_of(result_of(point, 0.7, "estimate"))
    shown = known(trials(replace(record, statuses={**record.statuses, PRIVATE: estimated}))[PRIVATE].privacy)
    assert (shown.epsilon, shown.kind, shown.adjacency) == (3.0, "estimate", "add_remove")
    assert shown.group_epsilons == {1: 3.0, 2: 7.5}
    baseline = known(trials(record)[BASELINE].privacy)
    assert baseline.epsilon == math.inf


def test_a_baseline_is_one_also_when_it_failed(tmp_path: Path) -> None:
    failed = trials(sample_record(tmp_path)[0])
    assert failed[KEYS["non-private-seed1"]].is_baseline
    assert not failed[KEYS["flat-seed1"]].is_baseline
    assert failed[KEYS["flat-seed1"]].error == "lost"


def test_a_stopped_trial_shows_what_it_had_reached_and_cost(tmp_path: Path) -> None:
    record, _ = sample_record(tmp_path)
    point = next(point for point in record.points if point.key == PRIVATE)
    stopped = replace(record, statuses={**record.statuses, PRIVATE: status_of(stopped_of(point))})
    shown = trials(stopped)[PRIVATE]
    assert shown.state is TrialState.STOPPED
    assert known(shown.privacy).epsilon == 1.5
    assert "after epoch 1 of 2" in str(shown.error)
    assert shown.notes == in_words(("known_seed",))
    assert known(shown.quality).accuracy_change is None


def test_failures_are_read_back_from_the_table_and_nothing_else_is(tmp_path: Path) -> None:
    found = parse_failures(rows(sample_record(tmp_path)[0]))
    assert {key: (status.state, status.error) for key, status in found.items()} == {
        KEYS["non-private-seed1"]: (TrialState.FAILED, "lost"),
        KEYS["flat-seed1"]: (TrialState.FAILED, "lost"),
    }


def test_the_table_of_results_holds_numbers_or_nothing(tmp_path: Path) -> None:
    table = {row["key"]: row for row in rows(sample_record(tmp_path)[0])}
    row = table[PRIVATE]
    assert (row["accuracy"], row["loss"], row["seconds"], row["epsilon"]) == (0.7, 0.5, 7.5, 3.0)
    assert (row["worst_group"], row["worst_group_accuracy"]) == ("b", pytest.approx(0.6))
    assert [group["epsilon"] for group in row["groups"]] == [3.0, 7.5]
    assert table[BASELINE]["epsilon"] is None
    assert table[KEYS["flat-seed1"]]["error"] == "lost"
