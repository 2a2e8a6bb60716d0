"""The first screen of the report: a decision that a reader can act on, and three answers that agree with the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from benchmarks.simulated import Population, simulated
from dpsweep.accounting.mechanism.samplings import Adjacency, PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.orchestration.comparison.best import best, best_lines
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE, Evidence, gather
from dpsweep.orchestration.comparison.findings import Findings, findings, warnings
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.settings import Setting, best_trade_offs
from dpsweep.orchestration.comparison.wording import NEIGHBOURS, by_selection
from dpsweep.orchestration.report.catalogue import drawn_figures
from dpsweep.orchestration.report.first_screen import Tile, _neighbours, decision, tiles
from dpsweep.orchestration.report.html import sentence
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.report.plot import style_of
from dpsweep.orchestration.report.prose import TERMS, headline
from dpsweep.orchestration.report.tables import trials_table
from dpsweep.orchestration.report.writing import one_page, summary_pdf
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedSweep, PublishedTrial, TrialState
from dpsweep.workers.evaluation.outcomes import Outcomes
from tests.known import known as present
from tests.orchestration.report.pages import Page, rendered
from tests.orchestration.report.test_browser import CHROMIUM, answers
from tests.orchestration.sample_outcomes import LABELS, of_predictions, outcomes, sweep_of, trial
from tests.orchestration.sample_results import EXACT

ROOT = Path(__file__).parents[3]
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium or chrome to draw the page with")


def in_sweep(trials: Sequence[PublishedTrial], found: dict[str, Outcomes]) -> tuple[PublishedSweep, Findings, Evidence]:
    data, evidence = PublishedSweep("sample", tuple(trials), 1e-5), gather(trials, found)
    return data, findings(data, evidence), evidence


def answered(data: PublishedSweep, found: Findings) -> dict[str, Tile]:
    return {tile.question: tile for tile in tiles(data, found, style_of(found.settings))}


def of(found: Findings, clipping: str) -> Setting:
    return next(setting for setting in found.settings if setting.clipping == clipping)


def test_one_group_alone_is_not_served_worst() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)})
    alone = []
    for each in trials:
        assert each.quality is not None
        alone.append(replace(each, quality=replace(each.quality, groups=each.quality.groups[:1])))
    data, found, _ = in_sweep(alone, kept)
    (said, *_) = decision(found, data.delta)
    assert "worst" not in said
    assert answered(data, found)["For whom?"].big == "not compared"
    assert found.headline == ("accuracy",)
    assert not [each for each in headline(data, found) if "worst" in each]
    assert {"Utility and fairness", "Privacy and fairness"}.isdisjoint(each.title for each in drawn_figures(data))
    assert "orst-served" not in trials_table(data.trials, found.worst_group.name)


def test_of_many_groups_that_are_served_alike_the_first_few_are_named() -> None:
    trials, _ = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)}, seeds=1)
    equal = []
    for each in trials:
        quality = present(each.quality)
        worst, best = sorted(quality.groups, key=lambda group: present(group.main))
        groups = (*(replace(worst, name=f"class {number}") for number in range(8)), best)
        equal.append(replace(each, quality=replace(quality, groups=groups)))
    data = PublishedSweep("sample", tuple(equal), 1e-5)
    found = findings(data, NO_EVIDENCE)
    few = "class 0 or class 1 or class 2 or 5 more"
    assert f"worst served: {few} with " in decision(found, data.delta)[0]
    tile = answered(data, found)["For whom?"]
    assert tile.big.startswith(f"{few}: ")
    assert "of each run" not in tile.words[0], "there is one"


def test_names_of_rates_keep_their_letters_where_a_sentence_begins() -> None:
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)}))
    by_rate = replace(found, worst_group=WORST_GROUP_METRICS["true_positive_rate"])
    assert answered(data, by_rate)["For whom?"].words[0].startswith("TPR of the worst-served group")


def test_an_epsilon_of_users_says_so_in_the_headline() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)})
    of_users = [
        each if each.privacy is None else replace(each, privacy=replace(each.privacy, unit="user")) for each in trials
    ]
    data, found, _ = in_sweep(of_users, kept)
    assert re.search(r"at ε = [\d.]+ per user \(", decision(found, data.delta)[0])


@pytest.mark.parametrize("is_added", [False, True])
def test_what_all_models_cost_bears_its_own_kind(is_added: bool) -> None:
    """Each model is a guarantee, and all together an estimate where results decided that one was added."""
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)})
    run = Trace(1000, (Segment(0, 10, PoissonSampling(0.05), 1.0),))
    counted = [
        each
        if each.is_baseline
        else replace(each, is_added=is_added, attempts=(Attempt(each.key, 1, 1e-5, run, ended=True),))
        for each in trials
    ]
    data, found, _ = in_sweep(counted, kept)
    one, both = answered(data, found)["How private?"].words
    assert one.endswith(": a guarantee.")
    assert re.search(r"at work: ε = [\d.]+, (.*)\.$", both)
    assert both.endswith(", an estimate, no guarantee." if is_added else ", a guarantee.")
    names = " ".join(map(str, present(answered(data, found)["How private?"].picture).plain().values()))
    assert ("seeds of it (estimate)" in names) == is_added


def test_an_epsilon_of_one_row_says_so_where_the_data_name_users() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)})
    owned = [replace(each, params={**each.params, "spec.data.params.user": "customer"}) for each in trials]
    data, found, _ = in_sweep(owned, kept)
    assert re.search(r"at ε = [\d.]+ per row \(", decision(found, data.delta)[0])
    assert "every ε is that of one row, and protects nobody who owns several as much" in " ".join(headline(data, found))
    assert "anybody" not in " ".join(map(str, present(answered(data, found)["How private?"].picture).plain().values()))
    alone, of_nobody, _ = in_sweep(trials, kept)
    assert "one row" not in " ".join(headline(alone, of_nobody))


def test_a_setting_that_lacks_a_seed_says_in_which_ones_its_change_was_measured() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)}, seeds=3)
    low = outcomes((0.94, 0.91), 1000)
    last = next(each for each in trials if not each.is_baseline and each.labels["seed"] == 2)
    poor = trial(low, "none", 2)
    changed = [poor if each.key == poor.key else each for each in trials if each.key != last.key]
    data, found, _ = in_sweep(changed, {**kept, poor.key: low})
    assert "points below no privacy in the two seeds that both have [" in decision(found, data.delta)[0]
    cost = answered(data, found)["At what cost?"].words[0]
    assert "without privacy in the two seeds that both have [" in cost
    assert cost.endswith(" over all seeds.") or " over all seeds. " in cost
    data, found, _ = in_sweep(trials, kept)
    assert "that both have" not in " ".join(headline(data, found))


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_numbers_of_equal_seeds_are_not_said_to_be_of_those_in_common(seeds: int) -> None:
    """Rounding errors tell the mean of differences from the difference of means."""
    population = Population((300,), ((1.5,), (2.0,)), seeds, task="regression", baseline=3.0)
    for found in simulated(population, 3, resamples=50):
        said = " ".join(
            (*decision(found, 1e-5), *answered(PublishedSweep("s", (), 1e-5), found)["At what cost?"].words)
        )
        assert "below no privacy [" in said
        assert "that both have" not in said


def test_the_picture_of_epsilons_shows_none_too_small() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)})
    paid = [
        each if each.is_baseline else replace(each, privacy=PublishedPrivacy(11.04, 1e-5, "pld")) for each in trials
    ]
    data, found, _ = in_sweep(paid, kept)
    tile = answered(data, found)["How private?"]
    assert list(present(tile.picture).data[0]["text"]) == ["11.1"]
    assert tile.big == "ε = 11.1"


def test_the_decision_names_setting_quality_cost_and_who_is_served_worst() -> None:
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80), "dpsgd_f": (0.85, 0.78)}))
    (said, *more) = decision(found, data.delta)
    best = of(found, "flat")
    accuracy, worst = (present(best.over_seeds(metric(name).value)) for name in ("accuracy", "worst_group_accuracy"))
    interval = present(found.interval_of_best(best, "accuracy"))
    against = present(found.change_of_chosen(best, "accuracy"))
    assert said == (
        f"Take flat · constant: accuracy {accuracy.mean:.1%} [{100 * interval.low:.1f} to {interval.high:.1%} "
        f"after choosing among 2] at ε = 3.00 (δ = 1e-05), {abs(100 * against.value):.1f} points below no privacy "
        f"[{100 * against.low:+.1f} to {100 * against.high:+.1f}]; worst served: "
        f"few with {worst.mean:.1%}{_corrected(found, best, worst.mean)} "
        f"[{_ends(found, best, 'worst_group_accuracy')}]."
    ).replace("-0", "−0").replace("[-", "[−").replace("to -", "to −").replace("1e−05", "1e-05")
    assert more == []
    cost = answered(data, found)["At what cost?"].words[0]
    assert f"{100 * against.high:+.1f} after choosing among 2]: ".replace("-", "−") in cost, "why one end is further"
    alone, of_one, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80)}))
    assert "after choosing" not in " ".join(headline(alone, of_one))
    assert "after choosing" not in answered(alone, of_one)["At what cost?"].words[0]


@pytest.mark.parametrize("seeds", [2, 5])
def test_of_equal_settings_none_is_recommended(seeds: int) -> None:
    """One is ahead by chance, and with two seeds by much."""
    for known in simulated(Population((300,), ((1.7,), (1.7,)), seeds, baseline=2.2), 8):
        said = decision(known, 1e-5)
        assert " reaches accuracy " in said[0]
        assert any("cannot be told from it" in each for each in said)


def test_a_setting_as_good_as_its_baseline_is_not_said_to_be_below_it() -> None:
    same = outcomes((0.9, 0.8))
    trials = [trial(same, clipping, seed) for clipping in ("none", "flat") for seed in range(5)]
    data, found, _ = in_sweep(trials, {each.key: same for each in trials})
    assert ", as shown no different from no privacy [" in decision(found, data.delta)[0]
    assert "may be chance" not in decision(found, data.delta)[0]
    cost = answered(data, found)["At what cost?"]
    assert (cost.big, "may be chance" in " ".join(cost.words)) == ("0.0 points", False)


def test_long_names_of_methods_are_told_apart_in_their_picture() -> None:
    both: dict[str, Any] = {"user sampling": "els", "max records per user": 4}
    trials = list[PublishedTrial]()
    kept = dict[str, Outcomes]()
    for clipping, share in (("flat", 0.9), ("dpsgd_f", 0.8)):
        own = outcomes((share, 0.8))
        trials += [trial(own, clipping, seed, **both) for seed in range(3)]
        kept |= {each.key: own for each in trials[-3:]}
    data, found, _ = in_sweep(trials, kept)
    picture = answered(data, found)["At what cost?"].picture
    assert picture is not None
    assert [each["text"] for each in picture.layout["annotations"]][:2] == ["flat", "dpsgd_f"]


@pytest.mark.parametrize("other", ["add_remove", "zero_out"])
def test_epsilons_of_several_adjacencies_are_not_compared(other: Adjacency) -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.80), "dpsgd_f": (0.912, 0.79)})
    mixed = [
        replace(each, privacy=replace(each.privacy, epsilon=1.0, adjacency=other))
        if each.labels["clipping"] == "dpsgd_f" and each.privacy
        else each
        for each in trials
    ]
    data, found, _ = in_sweep(mixed, kept)
    said, warned = " ".join(decision(found, data.delta)), " ".join(warnings(found))
    is_alike = other == "add_remove"
    assert ("More private" in said, "The best at ε" in said) == (is_alike,) * 2
    assert ("epsilons are of several adjacencies, add_remove and zero_out, and must not be" in warned) != is_alike


@pytest.mark.parametrize("other", ["add_remove", "zero_out"])
def test_each_adjacency_has_a_pareto_front_of_its_own(other: Adjacency) -> None:
    trials, kept = sweep_of({"flat": (0.92, 0.80), "dpsgd_f": (0.80, 0.60)})
    mixed = [
        replace(each, privacy=replace(present(each.privacy), adjacency=other))
        if each.labels["clipping"] == "dpsgd_f"
        else each
        for each in trials
    ]
    _, found, _ = in_sweep(mixed, kept)
    expected = ["flat"] if other == "add_remove" else ["flat", "dpsgd_f"]
    for front in (found.front, best_trade_offs(found.settings, WORST_GROUP_METRICS["accuracy"])):
        assert [each.clipping for each in front] == expected


def _corrected(found: Findings, setting: Setting, value: float) -> str:
    interval = present(found.interval(setting, "worst_group_accuracy"))
    words = by_selection(metric("worst_group_accuracy"), value, interval)
    return f" ({words})" if words else ""


def _ends(found: Findings, setting: Setting, name: str) -> str:
    interval = present(found.interval_of_chosen(setting, name))
    return f"{100 * interval.low:.1f} to {interval.high:.1%}"


def test_methods_that_cannot_be_told_apart_are_said_to_be_so_and_each_level_has_its_best() -> None:
    trials, found = [], {}
    for seed in range(3):
        for clipping, cost, right in (
            ("none", 1.0, 0.95),
            ("flat", 1.0, 0.85),
            ("flat", 8.004, 0.90),
            ("naive", 8.004, 0.9),
        ):
            own = outcomes((right, right), seed)
            trials.append(trial(own, clipping, seed, cost, level=round(cost)))
            found[trials[-1].key] = own
    data, known, _ = in_sweep(trials, found)
    said = " ".join(decision(known, data.delta))
    assert re.search(r"(naive|flat) · constant · level 8 cannot be told from it in accuracy", said, re.IGNORECASE)
    assert re.search(r"The best at ε = 1\.00: 8\d\.\d% and ε = 8\.01: (89|90)\.\d%\.", said)


def test_a_more_private_setting_that_may_be_as_good_is_named() -> None:
    trials, found = [], {}
    for seed in range(3):
        for clipping, cost, shares in (
            ("none", 1.0, (0.95, 0.95)),
            ("flat", 1.0, (0.92, 0.9)),
            ("flat", 8.0, (0.91, 0.935)),
            ("naive", 8.0, (0.905, 0.94)),
        ):
            own = outcomes(shares, seed)
            made = trial(own, clipping, seed, cost)
            trials.append(replace(made, key=f"{made.key}-{cost}", labels={**made.labels, "epsilon": cost}))
            found[trials[-1].key] = own
    data, known, _ = in_sweep(trials, found)
    taken, cheaper, others, _ = decision(known, data.delta)
    assert taken.startswith("flat · constant · epsilon 8 reaches accuracy ")
    assert re.fullmatch(
        r"More private, and cannot be told from it in accuracy: flat · constant · epsilon 1, \d+\.\d% at ε = 1\.00"
        r", which serves \w+ worst, with \d+\.\d%\.",
        cheaper,
    )
    assert others == "naive · constant · epsilon 8 cannot be told from it either."
    chosen = best(known)
    assert list(best_lines(chosen, "model.pt"))[1] == chosen.as_dict()["more_private"] == cheaper
    assert best(known, max_epsilon=1.0).more_private == ""
    by_group = best(known, "worst_group")
    assert by_group.name == "flat · constant · epsilon 8"
    assert by_group.more_private.startswith("More private, and cannot be told from it in worst_group_accuracy: flat")


def test_a_cost_whose_interval_holds_no_cost_may_be_chance() -> None:
    for accuracy, is_chance in ((0.9, True), (0.8, False)):
        data, found, _ = in_sweep(*sweep_of({"none": (0.9, 0.9), "flat": (accuracy, accuracy)}))
        said, words = decision(found, data.delta)[0], answered(data, found)["At what cost?"].words[0]
        assert ("], which may be chance; worst served" in said) is is_chance
        assert ("The difference may be chance." in words) is is_chance


def test_one_seed_decides_for_now_only() -> None:
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.9), "naive": (0.85, 0.8)}, seeds=1))
    assert "is unknown (one seed)" in decision(found, data.delta)[-1]


def test_an_average_of_the_seeds_that_a_scheduler_left_is_said_to_flatter() -> None:
    trials, known = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.9), "naive": (0.85, 0.8)}, seeds=2)
    *left, last = trials
    del known[last.key]
    data, found, _ = in_sweep([*left, replace(last, state=TrialState.STOPPED)], known)
    said = "Averages of naive · constant are too good: they keep only seeds that began well."
    assert said in headline(data, found)


def test_gaps_are_those_of_the_tables_with_the_groups_at_their_ends() -> None:
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.75)}))
    best = of(found, "flat")
    words = " ".join(answered(data, found)["For whom?"].words)
    for name, spoken in (
        ("accuracy_gap", "Accuracy"),
        ("demographic_parity_difference", "Selection rate"),
        ("false_positive_rate_difference", "False positive rate"),
        ("equal_opportunity_difference", "False negative rate"),
    ):
        mean, interval = present(best.over_seeds(metric(name).value)), present(found.interval(best, name))
        ends = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
        raw, said = f"{100 * mean.mean:.1f}", by_selection(metric(name), mean.mean, interval)
        word = f" ({said})" if said else ""
        of_class = "" if spoken == "Accuracy" else " (class 1)"
        assert f"{spoken}{of_class}: gap {raw} points{word} [{ends}], " in words
    assert re.search(r"False positive rate \(class 1\): [^:]* few \d+%, many \d+%\.", words)


def test_a_gap_between_other_groups_in_each_run_is_told_from_that_between_means() -> None:
    trials, kept = sweep_of({"none": (0.95, 0.93)})
    for seed, shares in enumerate(((0.95, 0.75), (0.75, 0.95), (0.95, 0.75))):
        own = outcomes(shares, seed)
        trials.append(trial(own, "flat", seed))
        kept[trials[-1].key] = own
    data, found, _ = in_sweep(trials, kept)
    (words,) = [each for each in answered(data, found)["For whom?"].words if each.startswith("Accuracy: gap ")]
    assert re.search(r" points.* in each run; over all, many \d\d%, few \d\d%\.$", words)
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.75)}))
    assert "in each run" not in " ".join(answered(data, found)["For whom?"].words)


def test_gaps_name_the_class_that_is_predicted_and_no_group_where_all_are_alike() -> None:
    trials, outcome = sweep_of({"none": (0.95, 0.93)})
    trials.append(trial(of_predictions(LABELS), "flat"))
    outcome[trials[-1].key] = of_predictions(LABELS)
    declared = [replace(each, params={"spec.data.params.classes": '["no", "yes"]'}) for each in trials]
    data, found, _ = in_sweep(declared, outcome)
    words = " ".join(answered(data, found)["For whom?"].words)
    assert re.search(r"False negative rate \(class yes\): gap 0\.0 points[^,]*, 0% in every group\.", words)
    assert "Accuracy: gap 0.0 points" in words


def test_where_the_cost_is_unknown_no_number_stands_for_it() -> None:
    constant = float((LABELS == 0).mean())
    trials, outcome = sweep_of({"none": (constant + 0.04,) * 2, "flat": (constant + 0.03,) * 2}, seeds=3)
    data, found, evidence = in_sweep(trials, outcome)
    page = Page(render(data, evidence)).text
    cost = answered(data, found)["At what cost?"]
    assert (cost.big, "points" in " ".join(cost.words)) == ("unknown", False)
    assert "what privacy costs is unknown, because the baseline hardly beats a constant prediction" in page
    assert not re.search(r"[−+]\d+\.\d points (below|above|against)", page)
    assert "The baseline is of no use as a reference, so changes against it would say nothing." in page


def test_nothing_of_use_is_taken_by_nobody() -> None:
    useless = of_predictions(np.zeros_like(LABELS))
    trials, outcome = sweep_of({"none": (0.95, 0.93)}, seeds=2)
    worse = of_predictions(1 - LABELS)
    for seed in range(2):
        for predicted, clipping in ((worse, "automatic"), (useless, "flat")):
            trials.append(trial(predicted, clipping, seed))
            outcome[trials[-1].key] = predicted
    data, found, _ = in_sweep(trials, outcome)
    shown = answered(data, found)
    assert shown["For whom?"].words == (
        "nothing shows that flat · constant has learnt, so its gaps between groups say nothing.",
    )
    assert decision(found, data.delta)[0].startswith("Nothing trained here with privacy is of use: flat · constant")
    assert (shown["For whom?"].big, shown["At what cost?"].big) == ("nobody", "of no use")
    assert decision(findings(PublishedSweep("none yet", (), 1e-5), found.evidence), 1e-5) == [
        "No private trial has finished, so there is no trade-off to show."
    ]


@pytest.mark.parametrize("adjacency", get_args(Adjacency))
def test_every_adjacency_has_words(adjacency: Adjacency) -> None:
    """Which data sets a claim is about is never left open, whatever the claim."""
    private = present(trial(of_predictions(LABELS), "flat").privacy)
    said = _neighbours(replace(private, adjacency=adjacency, unit="user"))
    assert re.match(r"the records of one user \w+", said)
    assert ("who owns which is taken as known" in said) == (adjacency == "fixed_graph")
    assert f"{adjacency}: {NEIGHBOURS[adjacency].meaning}. " in TERMS["Neighbouring data sets"]


def test_verdicts_that_were_read_add_no_seeds_by_themselves() -> None:
    """One look may end it, and settings of one method may stay alike."""
    data, found, _ = in_sweep(*sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.75)}))
    said = " ".join(headline(data, replace(found, looks=2)))
    assert "Verdicts were read 2 times to decide whether to add seeds: all hold together with 99.24%" in said
    assert "were added" not in said


@pytest.mark.parametrize(("medians", "where"), [((1.0, 1.0), ":"), ((1.0, 3.0), " under some settings:")])
def test_the_worst_case_overstates_where_it_does(medians: tuple[float, float], where: str) -> None:
    trials, _ = sweep_of({"none": (0.95, 0.93), "flat": (0.92, 0.75), "naive": (0.92, 0.75)})
    paid = dict(zip(("flat", "naive"), medians, strict=True))
    known = [
        replace(each, individuals=replace(EXACT, median=paid[str(each.labels["clipping"])])) if each.privacy else each
        for each in trials
        if each.labels["clipping"] in paid
    ]
    data, found, _ = in_sweep(known, {})
    assert f"The worst case overstates what most examples paid{where} under flat" in " ".join(headline(data, found))


QUESTIONS = {
    "Which setting do I take?": (".lead", r"^flat · constant reaches "),
    "How good is it, and how sure is that?": (
        ".lead",
        r"accuracy 8\d\.\d% \[8\d\.\d to \d\d\.\d% after choosing among \d\]",
    ),
    "What can it not be told from?": (".lead", r"cannot be told from it in accuracy"),
    "How private is one model?": (".tile:nth-child(1) .big", r"^ε = 3\.00$"),
    "Is that a guarantee, at which δ, for which neighbours?": (
        ".tile:nth-child(1) li:nth-child(1)",
        r"at δ = 1e-05, for one record added or removed, by pld: a guarantee\.",
    ),
    "How private is all that this page shows?": (
        ".tile:nth-child(1) li:nth-child(2)",
        r"sees all 15 private models at work: ε = \d",
    ),
    "For whom is it worst?": (".tile:nth-child(2) .big", r"^few: 79\.\d%$"),
    "Do groups differ in selection, false positives or false negatives?": (
        ".tile:nth-child(2) ul",
        r"Selection rate \(class 1\): gap .*False positive rate .*gap .*False negative rate .*few \d+%, many \d+%",
    ),
    "What does privacy cost?": (".tile:nth-child(3) .big", r"^−5\.\d points$"),
    "Which differences could these seeds have shown?": (
        ".tile:nth-child(3) li:last-child",
        r"5 seeds find differences between methods of \d\.\d points in accuracy and \d+\.\d points in the accuracy",
    ),
}
"""Where on the first screen each question of docs/results.md is answered, and the answer."""
LOOK = """<script>
const wait = setInterval(() => {
  if (!document.body.dataset.drawn) return;
  clearInterval(wait);
  const bottoms = Array.from(document.querySelectorAll(".tile .plot"), plot => plot.getBoundingClientRect().bottom);
  document.body.dataset.tiles = bottoms.length;
  document.body.dataset.lowest = Math.ceil(Math.max(...bottoms));
  PLACES.forEach((place, number) => {
    const part = document.querySelector(place), box = part.getBoundingClientRect();
    const seen = box.height > 0 && box.top >= 0 && box.bottom <= 900 && box.right <= innerWidth;
    document.body.dataset["answer" + number] = seen ? part.innerText.replace(/\\s+/g, " ") : "not on the first screen";
  });
}, 50);
</script></body>"""


@needs_browser
def test_ten_questions_and_three_pictures_are_answered_without_scrolling(tmp_path: Path) -> None:
    shares = {"none": (0.95, 0.93), "flat": (0.92, 0.80), "dpsgd_f": (0.91, 0.80), "naive": (0.85, 0.7)}
    trials, outcome = sweep_of(shares)
    run = Trace(1000, (Segment(0, 100, PoissonSampling(0.1), 2.0),))
    released = [
        replace(each, attempts=(Attempt(each.key, 1, 1e-5, run, ended=True),)) if each.tags["baseline"] else each
        for each in trials
    ]
    data, _, evidence = in_sweep(released, outcome)
    places = json.dumps([place for place, _ in QUESTIONS.values()])
    page = render(data, evidence).replace("</body>", LOOK.replace("PLACES", places))
    found = answers(page, tmp_path, 1400)
    assert found["tiles"] == "3"
    assert int(found["lowest"]) <= 900
    for number, (question, (_, expected)) in enumerate(QUESTIONS.items()):
        assert re.search(expected, unescape(found[f"answer{number}"])), question
    listed = re.findall(r"^\| (\S.*\?) \|", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE)
    assert listed == list(QUESTIONS)


PAPER = """<script>
const wait = setInterval(() => {
  if (!document.body.dataset.drawn) return;
  clearInterval(wait);
  dispatchEvent(new Event("beforeprint"));
  const tops = Array.from(document.querySelectorAll(".tile"), tile => tile.getBoundingClientRect().top);
  const edge = document.querySelector("main").getBoundingClientRect().right + 1;
  const pictures = Array.from(document.querySelectorAll(".plot")).filter(plot => plot.offsetParent);
  const isInside = plot => Array.from(plot.querySelectorAll(".main-svg"), svg => svg.getBoundingClientRect())
    .every(svg => svg.width > 0 && svg.width <= plot.clientWidth + 1 && svg.right <= edge);
  document.body.dataset.width = Math.round(document.querySelector("main").clientWidth);
  document.body.dataset.outside = pictures.filter(plot => !isInside(plot)).map(plot => plot.dataset.figure);
  document.body.dataset.pictures = pictures.length;
  document.body.dataset.tops = new Set(tops).size;
}, 50);
</script></body>"""


@pytest.mark.long
@needs_browser
def test_the_summary_is_one_page_and_pictures_fit_the_paper(tmp_path: Path) -> None:
    """Millimetres of CSS are 96 / 25.4 pixels: 277 of landscape A4 between its margins, 182 of upright A4."""
    page = rendered("private")
    printed = summary_pdf(page)
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    for paper, window, width in ((one_page(page), 800, 1047), (page, 1400, 688)):
        found = answers(paper.replace("</body>", PAPER), tmp_path, window)
        assert (int(found["width"]), found["outside"]) == (width, "")
        assert found["tops"] == "1"
        assert int(found["pictures"]) >= 3


def test_no_line_ends_between_a_symbol_and_its_number_or_inside_an_interval() -> None:
    assert sentence("ε = 3 [7 to 8%], δ < 1 <b>") == "ε\xa0=\xa03 [7\xa0to\xa08%], δ\xa0&lt;\xa01 &lt;b&gt;"
