"""Before any comparison stands whether models have learnt something: what has not is never recommended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated import Population, compared, drawn, published
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.best import best, best_lines
from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Findings, as_dict, findings
from dpsweep.orchestration.comparison.settings import best_trade_offs
from dpsweep.orchestration.report.catalogue import drawn_figures
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.report.prose import headline
from dpsweep.orchestration.store.published import PublishedSweep, PublishedTrial
from dpsweep.orchestration.tracking.plain_comparison import comparison
from dpsweep.workers.evaluation.outcomes import Outcomes, ScoredOutcomes
from tests.known import known as present
from tests.orchestration.sample_outcomes import LABELS, of_predictions, outcomes, sweep_of, trial

CONSTANT = float((LABELS == 0).mean())


def with_useless(useless: Outcomes) -> tuple[list[PublishedTrial], dict[str, Outcomes]]:
    """A sweep whose cheapest setting has these predictions, and whose dearer one works."""
    trials, found = sweep_of({"none": (0.95, 0.92)}, seeds=2)
    for seed in range(2):
        for cost, own in ((0.3, useless), (4.0, outcomes((0.93, 0.9), seed))):
            trials.append(trial(own, "flat", seed, cost, level=cost))
            found[trials[-1].key] = own
    return trials, found


def in_sweep(trials: Sequence[PublishedTrial], found: dict[str, Outcomes]) -> tuple[PublishedSweep, Findings]:
    data = PublishedSweep("sample", tuple(trials), 1e-5)
    return data, findings(data, gather(trials, found))


def nearly_constant() -> Outcomes:
    """Always class 0, but for a few examples of each class: as good as the constant prediction."""
    predicted = np.zeros_like(LABELS)
    for label, few in ((0, 12), (1, 14)):
        predicted[np.flatnonzero(label == LABELS)[:few]] = 1
    return of_predictions(predicted)


def test_the_mean_of_runs_that_did_not_diverge_is_not_recommended() -> None:
    population = Population((60,), ((1.7,), (3.7,), (0.9,)), 3, task="regression")
    found = drawn(population, np.random.default_rng(0))
    lost = found["m1-0-1"]
    assert isinstance(lost, ScoredOutcomes)
    found["m1-0-1"] = replace(lost, kept=np.full_like(lost.kept, np.nan))
    every = compared(population, found)
    assert every.useless == {"m1 · constant": "diverged in 1 of 3 runs"}
    assert best(every).name == "m0 · constant"
    assert "Not recommended: m1 · constant diverged in 1 of 3 runs." in headline(published(population, found), every)


def test_two_splits_judge_what_was_learnt_by_test_examples_and_ask_for_more_splits() -> None:
    """Student's t of two splits would tell no setting from a constant prediction, however many seeds each has."""
    population = Population((300,), ((1.0,),), 3, splits=2, of_split=0.8)
    found = compared(population, drawn(population, np.random.default_rng(0)))
    assert found.useless == {}
    (warning,) = (each for each in best(found).warnings if "cannot show" in each)
    assert warning.startswith("6 runs on several splits cannot show that another run of m0")
    assert warning.endswith(": add splits.")


def test_a_baseline_with_a_run_that_diverged_is_compared_with_nothing_and_not_drawn() -> None:
    population = Population((60, 60), ((1.7, 4.0), (2.7, 4.0)), 3, task="regression", baseline=4.0)
    found = drawn(population, np.random.default_rng(0))
    lost = found["none-0-1"]
    assert isinstance(lost, ScoredOutcomes)
    in_last = np.where(lost.groups[:, None] == 1, [1.0, 1e40, 1e20, 1.0, 1.0], 1.0)
    found["none-0-1"] = replace(lost, kept=lost.kept * in_last)
    data = published(population, found)
    known = ((each, present(each.quality)) for each in data.trials)
    data = replace(data, trials=tuple(replace(each, quality=replace(of, constant=0.0)) for each, of in known))
    every = findings(data, gather(data.trials, found))
    assert every.baselines == ()
    assert "the cost of privacy is unknown" in every.unknown_cost
    figures = {each.name: each.figure for each in drawn_figures(data)}
    assert figures["group-accuracy"].layout["yaxis"]["ticktext"] == ["g0", "g1"], "from worst to best of what is drawn"
    names = {trace["name"] for figure in figures.values() for trace in figure.data if "name" in trace}
    assert names == {"m0 · constant", "m1 · constant"}, "others could not be told apart beside -1e40"
    assert "Not drawn, as R² of a run is below −1: non-private." in render(data)


@pytest.mark.parametrize("useless", [of_predictions(np.zeros_like(LABELS)), nearly_constant()])
def test_what_is_no_better_than_constant_is_never_recommended_and_wears_no_badge(useless: Outcomes) -> None:
    data, found = in_sweep(*with_useless(useless))
    (name,) = found.useless
    assert "level 0.3" in name
    said = " ".join(headline(data, found))
    assert f"Not recommended: {name}" in said
    assert "cannot be told from it" not in said
    assert best(found).name != name
    assert name not in [each.other for each in best(found, "worst_group").alike]
    assert name not in {each.name for each in (*found.front, *found.methods)}
    assert name not in {each.name for each in best_trade_offs(found.settings, found.worst_group, found.useless)}
    stored = {each["name"]: each for each in as_dict(found)["settings"]}
    assert stored[name]["useless"]
    assert not stored[best(found).name]["useless"]


def test_a_setting_that_finds_a_rare_class_is_of_use_though_a_constant_prediction_is_right_more_often() -> None:
    alarms = np.random.default_rng(0).random(len(LABELS)) < np.where(LABELS == 1, 0.5, 0.45)
    _, found = in_sweep(*with_useless(of_predictions(alarms.astype(np.int64))))
    (cheap,) = (each for each in found.private if "level 0.3" in each.name)
    assert cheap.rank(found.main.value) < CONSTANT
    assert found.useless == {}
    assert best(found, "balanced_accuracy", max_epsilon=1.0).name == cheap.name
    told = [each for each in best(found, max_epsilon=1.0).warnings if "by balanced accuracy alone" in each]
    assert len(told) == 1
    assert told[0].startswith(f"{cheap.name} beats always predicting the most frequent class, which reaches ")


def test_luck_with_three_examples_of_a_rare_class_is_no_find() -> None:
    """A model that raises alarms at random finds all three in an eighth of sweeps. One seed then shows 75%."""
    labels = np.where(np.arange(len(LABELS)) < 3, 1, 0)
    lucky = replace(of_predictions(np.where(labels == 1, 1, np.arange(len(LABELS)) % 2)), labels=labels)
    one = trial(lucky, "flat", 0, 1.0)
    _, every = in_sweep([one], {one.key: lucky})
    interval = present(every.interval(every.settings[0], "balanced_accuracy"))
    assert interval.value == pytest.approx(0.75, abs=0.01)
    assert interval.low < 0.5, "an accuracy of about twelve examples"
    assert set(every.useless) == {every.settings[0].name}


def test_best_says_so_where_nothing_else_is_left() -> None:
    _, found = in_sweep(*with_useless(nearly_constant()))
    with pytest.raises(
        InvalidInput, match=r"no setting under these conditions is of use: .*always predicting the most"
    ):
        best(found, max_epsilon=1.0)


def test_a_report_of_nothing_useful_decides_so_and_counts_no_points() -> None:
    trials, outcome = with_useless(of_predictions(np.zeros_like(LABELS)))
    kept = [each for each in trials if each.labels.get("level") != 4.0]
    data, found = in_sweep(kept, {each.key: outcome[each.key] for each in kept})
    said = " ".join(headline(data, found))
    assert "Nothing trained here with privacy is of use" in said
    assert "points below" not in said
    assert "Pareto front" not in render(data, gather(kept, outcome)).split("<table")[1]


def of_users(users: int, share: float = 0.95, reference: float = 0.5) -> tuple[PublishedSweep, Findings]:
    """A sweep of models that are tested on the rows of so many people, beside a reference."""
    trials, found = sweep_of({"none": (share, share - 0.03), "flat": (share - 0.02, share - 0.05)}, seeds=3)
    owners = np.arange(len(LABELS)) % users
    beside = [replace(each, references={"logistic regression": reference}) for each in trials]
    return in_sweep(beside, {key: replace(each, users=owners) for key, each in found.items()})


def test_so_few_people_that_a_perfect_model_could_not_be_told_from_constant_are_the_reason_that_is_given() -> None:
    data, found = of_users(1)
    why = "one test user cannot tell even a perfect model from always predicting the most frequent class: hold out more"
    said = " ".join(headline(data, found))
    assert said.count(f"Nothing trained here can be judged: {why}.") == 1
    assert f"The cost of privacy is unknown: {why}." in said
    page = render(data, found.evidence)
    assert "The baseline is of no use as a reference" in page
    assert "No finished private trial has a non-private baseline" not in page
    assert "longer" not in said
    with pytest.raises(InvalidInput, match=f"no setting can be recommended: {why}"):
        best(found)
    assert of_users(6)[1].too_few_to_test.startswith("6 test users cannot tell")  # 0.025 ** (1 / 6) is 0.54
    assert of_users(40)[1].useless == {}


def test_test_data_of_a_single_class_ask_for_other_labels_and_not_for_more_of_the_same() -> None:
    trials, found = [], {}
    for clipping in ("none", "flat"):
        own = replace(of_predictions(np.zeros_like(LABELS)), labels=np.zeros_like(LABELS))
        trials.append(trial(own, clipping, 0))
        found[trials[-1].key] = own
    said = " ".join(headline(*in_sweep(trials, found)))
    why = f"always predicting the most frequent class is right for all {len(LABELS)} test examples"
    assert f"Nothing trained here can be judged: {why}: hold out some with other labels." in said
    assert "hold out more" not in said


@pytest.mark.parametrize("share", [CONSTANT + 0.04, CONSTANT + 0.005])
def test_a_baseline_near_the_constant_prediction_leaves_the_cost_unknown(share: float) -> None:
    data, found = in_sweep(*sweep_of({"none": (share, share), "flat": (share - 0.001, share - 0.001)}, seeds=3))
    assert "the baseline hardly beats a constant prediction; the cost of privacy is unknown" in found.unknown_cost
    said = headline(data, found)
    assert found.unknown_cost in said
    assert "points below" not in " ".join(said)
    assert found.baselines == ()
    assert as_dict(found)["unknown_cost"] == found.unknown_cost
    changed = [replace(each, quality=replace(present(each.quality), accuracy_change=0.01)) for each in data.trials]
    anew = findings(replace(data, trials=tuple(changed)), found.evidence)
    assert "_change" not in json.dumps(as_dict(anew)["settings"])
    in_mlflow = comparison(anew)
    names = {*in_mlflow.short, *in_mlflow.best_means, *(name for each in in_mlflow.numbers.values() for name in each)}
    assert not [name for name in names if "change" in name]


def test_a_baseline_below_a_reference_that_costs_nothing_leaves_the_cost_unknown() -> None:
    trials, outcome = sweep_of({"none": (0.85, 0.85), "flat": (0.84, 0.84)}, seeds=3)
    references = {"the best rule on a single column": 0.95, "logistic regression": 0.94}
    beside = [replace(each, references=references) if each.is_baseline else each for each in trials]
    data, found = in_sweep(beside, outcome)
    worse = "the baseline is worse than the best rule on a single column"
    assert f"what privacy costs is unknown, because {worse}" in " ".join(headline(data, found))
    assert "hardly beats" not in " ".join(headline(data, found))
    assert "but the best rule on a single column, which costs nothing, 95.0%" in found.unknown_cost
    assert next(best_lines(best(found), "model.pt")) == found.unknown_cost, "the first line of `best`"
    _, without = in_sweep(trials, outcome)
    assert without.unknown_cost == ""
    low = [replace(each, references={"logistic regression": 0.8}) if each.is_baseline else each for each in trials]
    assert in_sweep(low, outcome)[1].unknown_cost == ""


def test_few_who_are_tested_do_not_show_that_a_baseline_is_bad() -> None:
    assert of_users(40, reference=1.0)[1].unknown_cost == "", "a reference may be right for 40 of 40 by luck"
    assert "is worse than logistic regression" in of_users(400, reference=1.0)[1].unknown_cost
    unknown = of_users(8, share=0.75)[1].unknown_cost
    assert "nothing shows that the baseline beats a constant prediction" in unknown
    assert "hold out more, or train it longer" in unknown


def test_the_luckiest_of_twenty_settings_that_have_learnt_nothing_is_not_taken() -> None:
    population = Population((100,), ((0.0,),) * 20, 3, of_example=0.3, baseline=2.0)
    found = drawn(population, np.random.default_rng((5, 4)))
    every = compared(population, found)
    assert every.useful, "by itself, one looks useful"
    said = headline(published(population, found), every)
    assert said[0].startswith(f"{best(every).name} reaches accuracy ")
    assert "another run of" in said[1]
    assert best(every).interval == every.interval_of_best(best(every).setting, "accuracy")


def test_two_seeds_that_differ_do_not_show_that_another_run_learns_anything() -> None:
    trials, found = sweep_of({"none": (0.95, 0.92)}, seeds=2)
    for seed, right in enumerate((0.93, 0.75)):
        for level in (1.0, 4.0):
            trials.append(trial(outcomes((right, right), seed), "flat", seed, level, level=level))
            found[trials[-1].key] = outcomes((right, right), seed)
    data, both = in_sweep(trials, found)
    said = f"always predicting the most frequent class, which reaches {100 * CONSTANT:.1f}%: add seeds."
    assert both.useless == {}, "over test examples alone, both beat it"
    assert [each for each in headline(data, both) if each.startswith("Two seeds cannot show") and each.endswith(said)]
    assert [each for each in best(both).warnings if each.endswith(said)]
    assert headline(data, both)[0].startswith(f"{best(both).name} reaches accuracy "), "nobody is told to take it"
    steady = in_sweep(*sweep_of({"none": (0.95, 0.95), "flat": (0.9, 0.9)}, seeds=3))[1]
    assert "add seeds" not in " ".join(best(steady).warnings)
