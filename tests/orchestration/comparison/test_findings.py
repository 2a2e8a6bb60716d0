"""What is said of settings whose models predict known test examples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fairlearn import metrics as fairlearn_metrics
from sklearn import metrics as sklearn_metrics

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.best import best, best_lines, parse_conditions
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE, Evidence, gather
from dpsweep.orchestration.comparison.findings import Findings, as_dict, findings, tuned_values, warnings
from dpsweep.orchestration.comparison.metrics import METRICS, known_metrics, of_task
from dpsweep.orchestration.comparison.metrics import metric as metric_called
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS, WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.sanity import has_diverged
from dpsweep.orchestration.comparison.settings import Setting, finished_settings, group_value
from dpsweep.orchestration.comparison.wording import by_selection, unknown_of_one_seed
from dpsweep.orchestration.report.prose import headline
from dpsweep.orchestration.store.published import PublishedSweep, PublishedTrial, PublishedTuning
from dpsweep.workers.evaluation.outcomes import Outcomes
from tests.known import known as present
from tests.orchestration.sample_outcomes import GROUPS, LABELS, LUCK, of_predictions, outcomes, sweep_of, trial

SHARES = {"none": (0.95, 0.92), "flat": (0.90, 0.80), "dpsgd_f": (0.899, 0.803), "individual": (0.85, 0.62)}


def published(trials: Sequence[PublishedTrial]) -> PublishedSweep:
    return PublishedSweep("sample", tuple(trials), 1e-5)


def found_in(trials: Sequence[PublishedTrial], outcomes: Mapping[str, Outcomes]) -> Findings:
    return findings(published(trials), gather(trials, outcomes))


@pytest.fixture(scope="module")
def sample() -> Findings:
    return found_in(*sweep_of(SHARES))


def setting(found: Findings, clipping: str):  # type: ignore[no-untyped-def]  # a Setting
    return next(each for each in found.settings if each.clipping in (clipping, {"none": "non-private"}.get(clipping)))


def test_every_number_that_test_examples_decide_has_an_interval_around_it(sample: Findings) -> None:
    flat = setting(sample, "flat")
    for metric in METRICS:
        mean, interval = flat.over_seeds(metric.value), sample.interval(flat, metric.name)
        if metric.measure is not None and mean is not None:
            assert interval is not None, metric.name
            assert interval.value == pytest.approx(mean.mean, abs=1e-6), metric.name
            assert interval.low < mean.mean < interval.high, metric.name
    assert sample.interval(flat, "epsilon") is None


def test_groups_have_intervals_too_and_small_ones_wider(sample: Findings) -> None:
    flat = setting(sample, "flat")
    for metric in GROUP_METRICS:
        mean = flat.over_seeds(group_value("few", metric.value))
        if metric.measure is not None and mean is not None:
            interval = sample.evidence.interval(flat, metric.name, "few")
            assert interval is not None, metric.name
            assert interval.value == pytest.approx(mean.mean, abs=1e-6), metric.name
            assert interval.low < mean.mean < interval.high, metric.name
    many, few = (present(sample.evidence.interval(flat, "true_positive_rate", group)) for group in ("many", "few"))
    assert few.high - few.low > many.high - many.low


def test_a_change_is_paired_with_its_baseline(sample: Findings) -> None:
    """Shared test examples leave it far sharper than the two accuracies."""
    flat, none = setting(sample, "flat"), setting(sample, "none")
    change, alone = present(sample.interval(flat, "accuracy_change")), present(sample.interval(flat, "accuracy"))
    difference = present(sample.evidence.difference(flat, none, "accuracy"))
    assert (change.low, change.high) == pytest.approx((difference.low, difference.high), abs=0.002)
    assert change.high - change.low < 0.95 * (alone.high - alone.low)


def test_verdicts_are_three_and_turn_with_the_order(sample: Findings) -> None:
    flat, fair, own = (setting(sample, name) for name in ("flat", "dpsgd_f", "individual"))
    assert sample.difference(flat, fair, "accuracy").verdict == "not distinguishable"
    assert sample.difference(flat, own, "accuracy").verdict == "better"
    assert sample.difference(own, flat, "accuracy").verdict == "worse"
    assert sample.difference(flat, own, "accuracy_gap").verdict == "better", "a smaller gap is better"
    assert Findings(sample.settings, NO_EVIDENCE).difference(flat, own, "accuracy").verdict == "unknown"


def test_more_comparisons_widen_every_interval(sample: Findings) -> None:
    flat, own = setting(sample, "flat"), setting(sample, "individual")
    one, many = (present(sample.evidence.difference(flat, own, "accuracy", comparisons=count)) for count in (1, 6))
    assert many.high - many.low > 1.2 * (one.high - one.low)
    assert sample.comparisons == 6, "three pairs of private settings by two metrics"
    assert sample.difference(flat, own, "accuracy").interval == many


def test_shares_differ_by_at_most_everything(sample: Findings) -> None:
    """At a level that a thousand comparisons share, two seeds alone would allow for more."""
    flat, own = setting(sample, "flat"), setting(sample, "individual")
    found = present(sample.evidence.difference(flat, own, "accuracy", comparisons=10**12))
    assert (found.low, found.high) == (-1.0, 1.0)


def of_first(found: Outcomes, count: int) -> Outcomes:
    """The outcomes of the first test examples alone."""
    return Outcomes(
        found.example_ids[:count],
        found.labels[:count],
        found.groups[:count],
        found.predicted[:count],
        found.log_losses[:count],
        found.confidences[:count],
        found.group_names,
        found.num_classes,
    )


@pytest.mark.parametrize(("count", "verdict"), [(1, "not distinguishable"), (5, "not distinguishable"), (8, "better")])
@pytest.mark.parametrize("paired", [True, False])
def test_few_examples_decide_nothing_even_if_they_agree(count: int, verdict: str, paired: bool) -> None:
    right, wrong = (of_first(of_predictions(labels), count) for labels in (LABELS, 1 - LABELS))
    trials = [
        trial(own, clipping, seed)
        for own, clipping, seeds in ((right, "flat", (0, 1)), (wrong, "dpsgd_f", (0, 1) if paired else (2, 3)))
        for seed in seeds
    ]
    found = found_in(
        [replace(each, quality=replace(each.quality, groups=())) for each in trials],  # type: ignore[type-var]  # has one
        {each.key: right if each.labels["clipping"] == "flat" else wrong for each in trials},
    )
    difference = found.difference(setting(found, "flat"), setting(found, "dpsgd_f"), "accuracy")
    assert (present(difference.interval).value, difference.verdict) == (1.0, verdict)


def test_models_that_predict_alike_are_equal_up_to_the_number_of_test_examples() -> None:
    same = outcomes((0.9, 0.8))
    trials = [trial(same, clipping, 0) for clipping in ("none", "flat", "dpsgd_f")]
    found = found_in(trials, {each.key: same for each in trials})
    flat, fair = setting(found, "flat"), setting(found, "dpsgd_f")
    for name, reach in (("accuracy", 1.0 - 0.025 ** (1.0 / 4000)), ("accuracy_gap", 0.1)):
        difference = present(found.evidence.difference(flat, fair, name))
        assert difference.value == 0.0
        assert -reach * 1.001 <= difference.low < 0.0 < difference.high <= reach * 1.001, name
    change, difference = (
        present(found.interval(flat, "accuracy_change")),
        present(found.evidence.difference(flat, fair, "accuracy")),
    )
    assert (change.low, change.high) == pytest.approx((-0.00092, 0.00092), abs=5e-5), "unseen examples may change"


def test_the_headline_says_what_can_be_told_apart(sample: Findings) -> None:
    trials, _ = sweep_of(SHARES)
    said = " ".join(headline(published(trials), sample))
    assert "cannot be told from it in accuracy" in said
    assert re.search(r"\w+ · constant beats individual · constant by [\d.]+ to [\d.]+ points in accuracy", said)
    assert "points below no privacy [" in said
    assert "Always predicting the most frequent class reaches" in said


def test_the_front_is_marked_beyond_noise_only_where_nothing_may_equal_it(sample: Findings) -> None:
    assert [each.clipping for each in sample.front] == []
    alone = found_in(*sweep_of({name: SHARES[name] for name in ("flat", "individual")}))
    assert [each.clipping for each in alone.front] == ["flat"]


def test_a_private_setting_above_its_baseline_is_a_warning() -> None:
    found = found_in(*sweep_of({"none": (0.80, 0.80), "flat": (0.88, 0.88)}))
    (said,) = warnings(found)
    assert "points above the best non-private setting (beyond its interval)" in said


def test_a_setting_above_its_baseline_by_less_than_is_shown_is_no_warning() -> None:
    same = outcomes((0.9, 0.8))
    wrong = int(np.flatnonzero(same.predicted != LABELS)[0])
    one_more = of_predictions(np.where(np.arange(len(LABELS)) == wrong, LABELS, same.predicted))
    trials = [trial(same, "none", seed) for seed in range(5)] + [
        trial(one_more if seed == 0 else same, "flat", seed) for seed in range(5)
    ]
    found = found_in(trials, {each.key: one_more if each.key == "flat-0" else same for each in trials})
    flat, none = (setting(found, name).mean(metric_called("accuracy").value) for name in ("flat", "none"))
    assert flat > none
    assert warnings(found) == []


def test_a_diverged_baseline_is_named_and_compared_with_nothing() -> None:
    trials, found = sweep_of({"flat": (0.85, 0.80)})
    lost = of_predictions(np.zeros_like(LABELS))
    for seed in range(5):
        good = outcomes((0.95, 0.9), seed)
        for rate, own in ((0.5, good), (64.0, lost)):
            trials.append(trial(own, "none", seed, learning_rate=rate))
            found[trials[-1].key] = own
    all_found = found_in(trials, found)
    assert [each.labels["learning_rate"] for each in all_found.baselines] == [0.5]
    said = " ".join(warnings(all_found))
    assert "learning rate 64 diverged, or did no better than" in said
    assert "above" not in said


def test_a_constant_predictor_is_flagged() -> None:
    trials, found = sweep_of({"none": (0.95, 0.92)})
    constant = of_predictions(np.ones_like(LABELS))
    for seed in range(5):
        trials.append(trial(constant, "flat", seed))
        found[trials[-1].key] = constant
    all_found = found_in(trials, found)
    flat = setting(all_found, "flat")
    assert has_diverged(flat)
    gap = present(flat.over_seeds(next(each for each in METRICS if each.name == "demographic_parity_difference").value))
    assert gap.mean == 0.0
    said = " ".join(warnings(all_found))
    assert "Not recommended: flat · constant predicted one class for everybody in each group" in said
    assert "which reaches 59.3%" in said


@pytest.mark.long
def test_settings_that_were_not_tuned_alike_are_a_warning() -> None:
    trials, found = sweep_of({"none": (0.95, 0.92), "dpsgd_f": (0.88, 0.80)})
    for bound in (0.5, 2.0):
        for seed in range(5):
            own = outcomes((0.8 + 0.05 * bound, 0.7), seed)
            trials.append(trial(own, "flat", seed, bound=bound))
            found[trials[-1].key] = own
    all_found = found_in(trials, found)
    assert "not tuned alike. Tried were dpsgd_f with 1, flat with 2" in " ".join(warnings(all_found))
    assert [each.labels.get("bound") for each in all_found.methods] == [None, 2.0], "each method at its best"


def test_baselines_of_other_batches_are_not_tuned_values() -> None:
    trials, found = sweep_of({name: SHARES[name] for name in ("none", "flat")})
    for clipping in ("none", "flat"):
        for seed in range(5):
            own = outcomes(SHARES[clipping], seed)
            trials.append(trial(own, clipping, seed, sampling="shuffle256"))
            found[trials[-1].key] = own
    all_found = found_in(trials, found)
    assert tuned_values(all_found) == {"flat": 1, "non-private": 1}
    assert "not tuned alike" not in " ".join(warnings(all_found))


@pytest.mark.long
def test_methods_that_were_tried_once_are_not_called_better_as_methods() -> None:
    """Another clipping bound could turn the difference around."""
    both = found_in(*sweep_of({name: SHARES[name] for name in ("none", "flat", "individual")}))
    (said,) = warnings(both)
    assert "no clipping method was tuned: flat and individual were tried with one choice each" in said
    assert not warnings(found_in(*sweep_of({name: SHARES[name] for name in ("none", "flat")})))
    trials, outcomes_by_key = sweep_of({name: SHARES[name] for name in ("none", "flat", "individual")})
    tuning = PublishedTuning("public_accuracy", {"clipping.bound": 1.0}, (({"clipping.bound": 1.0}, 0.9),))
    assert not warnings(found_in([replace(each, tuning=tuning) for each in trials], outcomes_by_key))


def test_the_best_setting_is_named_with_what_cannot_be_told_from_it(sample: Findings) -> None:
    found = best(sample, "worst_group", max_epsilon=8.0, at_least={"accuracy": 0.5})
    assert (found.setting.clipping, found.by) == ("dpsgd_f", "worst_group_accuracy")
    assert [each.other for each in found.alike] == ["flat · constant"]
    assert found.trial.labels["seed"] == 0, "not the seed with the best result"
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    assert found.as_dict()["not_distinguishable"][0]["verdict"] == "not distinguishable"


def test_a_worst_case_is_never_shown_below_itself(sample: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "highest_epsilon", property(lambda _: 2.00041))
    assert ", ε 2.001 (" in repr(best(sample))
    with pytest.raises(InvalidInput, match=r"the least epsilon is 2\.001"):
        best(sample, max_epsilon=1.0)


def test_settings_of_unknown_order_have_a_word_of_their_own() -> None:
    """One common seed decides nothing, and neither do other test examples: neither is "cannot be told apart"."""
    trials, found = sweep_of({name: SHARES[name] for name in ("none", "dpsgd_f")})
    own, other = outcomes(SHARES["individual"], 0), outcomes(SHARES["individual"], 9)
    elsewhere = replace(other, example_ids=other.example_ids + 10**6)
    for name, seed, each in (("flat", 0, own), ("individual", 9, elsewhere)):
        trials.append(trial(each, name, seed))
        found[trials[-1].key] = each
    data = published(trials)
    every = findings(data, gather(trials, found))
    chosen = best(every)
    assert chosen.setting.clipping == "dpsgd_f"
    assert [(each.other, each.verdict) for each in chosen.unordered] == [
        ("flat · constant", "unknown (one seed)"),
        ("individual · constant", "unknown"),
    ]
    assert (chosen.alike, chosen.as_dict()["not_distinguishable"]) == ((), [])
    assert [each["verdict"] for each in chosen.as_dict()["unknown_order"]] == ["unknown (one seed)", "unknown"]
    lines = " | ".join(best_lines(chosen, "here"))
    assert "order unknown (one common seed): flat · constant (" in lines
    assert (
        "cannot be compared with it, without common test examples, or with a run that has no finite score: ind" in lines
    )
    assert "cannot be told from it" not in lines
    said = " ".join(headline(data, every))
    assert "Whether dpsgd_f · constant is better than flat · constant in accuracy is unknown (one common seed)." in said
    assert "dpsgd_f · constant cannot be compared with individual · constant in accuracy" in said
    assert "cannot be told" not in said


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ({"by": "acuracy"}, "unknown metric 'acuracy'.*accuracy"),
        ({"by": "delta"}, "unknown metric 'delta'"),
        ({"by": "perplexity"}, "'perplexity' is no metric of classification; valid: accuracy, accuracy_gap, "),
        ({"max_epsilon": 1.0}, "no private setting has epsilon at most 1; the least epsilon is 3"),
        ({"at_least": {"worst_group": 0.9}}, "the most of worst_group_accuracy is 0.8"),
        ({"max_epsilon": float("nan")}, "must be a finite number"),
        ({"max_epsilon": 0.0}, r"must be greater than 0\.0"),
    ],
)
def test_what_cannot_be_chosen_is_refused(sample: Findings, conditions: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        best(sample, **conditions)  # type: ignore[arg-type]  # keyword arguments of several types


def test_a_sweep_without_a_finished_private_trial_lists_no_metrics() -> None:
    with pytest.raises(InvalidInput, match="no private trial of this sweep has finished; resume it, or"):
        best(findings(published(()), NO_EVIDENCE), "perplexity")


@pytest.mark.parametrize("text", ["worst_group", "worst_group=", "worst_group=much", "=0.7x", "a=nan"])
def test_a_condition_is_a_metric_and_a_number(text: str) -> None:
    assert parse_conditions(["worst_group=0.7", "accuracy=.5"]) == {"worst_group": 0.7, "accuracy": 0.5}
    with pytest.raises(InvalidInput, match="METRIC=NUMBER"):
        parse_conditions([text])


def test_trials_of_older_versions_have_no_intervals_and_no_claims() -> None:
    trials, _ = sweep_of(SHARES)
    found = findings(published(trials), NO_EVIDENCE)
    said = " ".join(headline(published(trials), found))
    assert "Whether differences exceed chance cannot be told" in said
    assert "beats" not in said
    assert not any(each["intervals"] or each["groups"] for each in as_dict(found)["settings"])
    assert best(found).interval is None


def selective(found: float, wrong: float, seed: int) -> Outcomes:
    """A model that finds this share of the positives of the small group and selects this share of its negatives."""
    score, predicted = LUCK + 0.3 * np.random.default_rng(seed).random(len(GROUPS)), LABELS.copy()
    for label, share in ((1, found), (0, 1.0 - wrong)):
        mine = (GROUPS == 1) & (label == LABELS)
        predicted[mine & (score > np.quantile(score[mine], share))] = 1 - label
    return of_predictions(predicted)


@pytest.fixture(scope="module")
def disputed() -> tuple[list[PublishedTrial], Evidence]:
    """Of the small group, flat finds half of the positives, and dpsgd_f most of them at the price of its negatives."""
    trials, found = sweep_of({"none": (0.95, 0.92)})
    for clipping, shares in (("flat", (0.5, 0.02)), ("dpsgd_f", (0.8, 0.4))):
        for seed in range(5):
            own = selective(*shares, seed)
            trials.append(trial(own, clipping, seed))
            found[trials[-1].key] = own
    return trials, gather(trials, found)


@pytest.mark.parametrize(
    ("worst_group", "winner", "said"),
    [
        ("accuracy", "flat", "flat · constant also has the highest accuracy of a worst-served group."),
        ("true_positive_rate", "dpsgd_f", "The highest TPR of a worst-served group is that of dpsgd_f · constant"),
        ("false_positive_rate", "flat", "flat · constant also has the lowest FPR of a worst-served group."),
    ],
)
def test_the_metric_of_the_worst_group_is_the_users_choice(
    disputed: tuple[list[PublishedTrial], Evidence], worst_group: str, winner: str, said: str
) -> None:
    trials, evidence = disputed
    data = replace(published(trials), worst_group=worst_group)
    found = findings(data, evidence)
    name = f"worst_group_{worst_group}"
    assert found.headline == ("accuracy", name)
    chosen = best(found, "worst_group")
    assert (chosen.setting.clipping, chosen.by) == (winner, name)
    assert as_dict(found)["worst_group"] == name
    assert {each["metric"] for each in as_dict(found)["differences"]} == {"accuracy", name}
    assert said in " ".join(headline(data, found))
    (difference,) = [each for each in as_dict(found)["differences"] if each["metric"] == name]
    flat_first = winner == difference["one"].split(" ")[0]
    assert difference["verdict"] == ("better" if flat_first else "worse")


def test_no_setting_is_said_to_serve_a_group_best_that_measured_worse() -> None:
    """Its groups take turns at being the worst, which correction allows for: ranks are by the corrected value."""
    trials, found = sweep_of({"none": (0.99, 0.95)})
    for clipping, shares in (("flat", ((0.99, 0.5), (0.99, 0.5))), ("dpsgd_f", ((0.9, 0.49), (0.48, 0.9)))):
        for seed, share in enumerate(shares):
            own = outcomes(share, seed)
            trials.append(trial(own, clipping, seed))
            found[trials[-1].key] = own
    told = findings(published(trials), gather(trials, found))
    fairest = present(told.best("worst_group_accuracy"))
    assert fairest.clipping == "dpsgd_f"
    said = " ".join(headline(published(trials), told))
    assert "of a worst-served group" not in said
    assert "flat · constant cannot be told from dpsgd_f · constant for the worst-served group." in said


def test_no_setting_is_said_to_serve_a_group_best_that_none_serves() -> None:
    trials, found = sweep_of({"none": (0.95, 0.92)})
    for clipping, share in (("flat", 0.9), ("dpsgd_f", 0.8)):
        for seed in range(5):
            own = of_predictions(np.where(GROUPS == 1, 0, outcomes((share, 0.9), seed).predicted))
            trials.append(trial(own, clipping, seed))
            found[trials[-1].key] = own
    data = replace(published(trials), worst_group="true_positive_rate")
    said = " ".join(headline(data, findings(data, gather(trials, found))))
    assert "The TPR of the worst-served group is 0.0% in each of 2 private settings." in said
    assert "also has" not in said


def test_every_setting_is_stored_with_all_its_intervals(sample: Findings) -> None:
    stored = next(each for each in as_dict(sample)["settings"] if each["name"] == "flat · constant")
    measured = {metric.name for metric in of_task("classification") if metric.measure and "user" not in metric.name}
    changes = {"worst_group_accuracy_change", "accuracy_change", "unequal_cost"}
    assert measured - changes <= stored["intervals"].keys()
    assert stored["groups"].keys() == {"many", "few"}
    assert {"true_positive_rate", "log_loss", "calibration_error"} <= stored["groups"]["few"].keys()
    low, value, high = (stored["groups"]["few"]["log_loss"][name] for name in ("low", "value", "high"))
    assert low < value < high


def test_a_group_without_positives_has_no_interval_of_equalized_odds() -> None:
    """Only one group has a true positive rate, and two have a false positive rate: the larger gap is of that."""
    trials, found = sweep_of({"flat": (0.9, 0.8), "dpsgd_f": (0.85, 0.8)}, seeds=2)
    kept = {key: replace(each, labels=np.where(each.groups == 1, 0, each.labels)) for key, each in found.items()}
    for place, each in enumerate(trials):
        trials[place] = trial(kept[each.key], str(each.labels["clipping"]), int(str(each.labels["seed"])))
    every = found_in(trials, kept)
    odds = metric_called("equalized_odds_difference")
    assert every.settings[0].over_seeds(odds.value) is not None
    assert every.interval(every.settings[0], odds.name) is None
    one, other = every.settings
    assert every.evidence.difference(one, other, odds.name) is None
    assert as_dict(every)["settings"][0]["intervals"]["demographic_parity_difference"] is not None


def test_a_condition_on_what_is_better_when_low_is_an_upper_bound(
    disputed: tuple[list[PublishedTrial], Evidence],
) -> None:
    trials, evidence = disputed
    found = findings(published(trials), evidence)
    limit = {"worst_group_false_positive_rate": 0.1}
    assert best(found, "worst_group_true_positive_rate", at_least=limit).setting.clipping == "flat"
    with pytest.raises(InvalidInput, match=r"worst_group_false_positive_rate at most 0\.001; the least of"):
        best(found, at_least={"worst_group_false_positive_rate": 0.001})


def test_every_metric_of_the_worst_group_is_that_of_fairlearns_metric_frame() -> None:
    own = selective(0.6, 0.1, 0)
    table = {
        "accuracy": sklearn_metrics.accuracy_score,
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score,
        "true_positive_rate": fairlearn_metrics.true_positive_rate,
        "false_positive_rate": fairlearn_metrics.false_positive_rate,
        "precision": sklearn_metrics.precision_score,
    }
    frame = fairlearn_metrics.MetricFrame(
        metrics=table, y_true=own.labels, y_pred=own.predicted, sensitive_features=own.groups
    )
    found = known_metrics(trial(own, "flat"))
    for name in table:
        worst = frame.group_max() if WORST_GROUP_METRICS[name].better == "lower" else frame.group_min()
        assert found[f"worst_group_{name}"] == pytest.approx(worst[name], abs=1e-12), name


def test_one_seed_decides_nothing() -> None:
    trials, outcomes_by_key = sweep_of(SHARES, seeds=1)
    found = found_in(trials, outcomes_by_key)
    flat, own = setting(found, "flat"), setting(found, "individual")
    assert found.difference(flat, own, "accuracy").verdict == "unknown (one seed)"
    said = " ".join(headline(published(trials), found))
    assert "unknown (one seed): intervals are of the choice of test examples alone" in said
    assert not any(word in said for word in ("Take", "beats", "cannot be told from"))
    assert all(each["verdict"] == "unknown (one seed)" for each in as_dict(found)["differences"])
    (unknown,) = unknown_of_one_seed(flat, found.private)
    assert unknown in said
    (alone,) = unknown_of_one_seed(flat, [flat])
    assert "another seed may turn any difference around" in alone


def test_the_worst_of_many_groups_is_said_to_be_low_by_selection(sample: Findings) -> None:
    trials, _ = sweep_of(SHARES)
    said = " ".join(headline(published(trials), sample))
    assert re.search(r"worst served: few with [\d.]+% (\(low by selection, corrected [\d.]+%\) )?\[", said)
    lowest, largest = metric_called("worst_group_accuracy"), metric_called("accuracy_gap")
    interval = present(sample.interval(setting(sample, "flat"), "worst_group_accuracy"))
    assert by_selection(lowest, 0.5, replace(interval, corrected=0.52)) == "low by selection, corrected 52.0%"
    assert by_selection(largest, 0.12, replace(interval, corrected=0.1)) == "high by selection, corrected 10.0"
    assert by_selection(lowest, 0.5, replace(interval, corrected=0.50001)) == "", "nothing that a reader could see"
    wide = replace(interval, low=0.3, high=0.7)
    shown = [by_selection(lowest, 0.5, replace(wide, corrected=value)) for value in (0.509, 0.511)]
    assert shown == ["", "low by selection, corrected 51.1%"], "a correction that its simulation makes by chance"
    flat = setting(sample, "flat")
    worst, gap = (present(sample.interval(flat, name)) for name in ("worst_group_accuracy", "accuracy_gap"))
    assert worst.value <= present(worst.corrected) <= worst.value + 0.01
    assert gap.value - 0.02 <= present(gap.corrected) <= gap.value


def test_the_interval_of_the_best_of_several_allows_for_the_choice(sample: Findings) -> None:
    chosen = best(sample)
    alone = present(sample.interval(chosen.setting, "accuracy"))
    assert chosen.interval is not None
    assert chosen.interval.low < alone.low - 0.1 * (alone.high - alone.low)
    highest = max(present(sample.interval(each, "accuracy")).high for each in sample.useful)
    assert chosen.interval.high == highest, "no setting widens it that is worse beyond its own interval"
    one = best(sample, max_epsilon=8.0, at_least={"accuracy": chosen.value - 1e-9})
    assert one.interval is not None
    assert one.interval.low == chosen.interval.low, "the only one that fulfils the condition is chosen by it"
    assert one.interval.high > alone.high


def test_other_numbers_of_the_chosen_setting_allow_for_the_choice(sample: Findings) -> None:
    chosen, baseline = best(sample).setting, sample.baselines[0]
    assert sample.interval_of_chosen(chosen, "accuracy") == best(sample).interval
    pairs = [
        (sample.interval_of_chosen(chosen, "accuracy_gap"), sample.interval(chosen, "accuracy_gap")),
        (sample.change_of_chosen(chosen, "accuracy"), sample.evidence.difference(chosen, baseline, "accuracy")),
    ]
    for found, alone in pairs:
        assert found is not None
        assert alone is not None
        assert found.low <= alone.low < alone.value < alone.high <= found.high
        assert found.high - found.low > alone.high - alone.low
    assert replace(sample, settings=sample.private).change_of_chosen(chosen, "accuracy") is None


def test_settings_without_common_test_examples_are_not_compared() -> None:
    trials, found = sweep_of({"flat": (0.9, 0.9), "dpsgd_f": (0.8, 0.8)}, seeds=2)
    other = {
        key: each if key.startswith("flat") else Outcomes(each.example_ids + 10**6, *list(vars(each).values())[1:])
        for key, each in found.items()
    }
    one, two = finished_settings(trials)
    assert gather(trials, other).difference(one, two, "accuracy") is None
    assert gather(trials, found).difference(one, two, "accuracy") is not None


def test_values_of_the_best_method_are_named_where_they_cannot_be_told_from_it() -> None:
    trials, found = sweep_of({"none": (0.95, 0.92)}, seeds=3)
    for place, bound in enumerate((0.5, 1.0, 2.0)):
        for seed in range(3):
            own = outcomes((0.9, 0.9) if bound < 2.0 else (0.8, 0.8), 10 * place + seed)
            trials.append(trial(own, "flat", seed, clipping_bound=bound))
            found[trials[-1].key] = own
    data = PublishedSweep("sample", tuple(trials), 1e-5)
    compared = findings(data, gather(trials, found))
    taken = present(compared.best("accuracy"))
    assert len(compared.methods) == 1
    near, far = compared.rivals(taken) if compared.rivals(taken)[1].name.endswith("2") else compared.rivals(taken)[::-1]
    (told,) = [each for each in headline(data, compared) if "cannot be told from it in accuracy" in each]
    assert near.name in told
    assert far.name not in told, "it is worse"
    assert compared.detectable("accuracy") is not None
