"""The text of the report below its first screen: cautions, findings and explanations. Pure; every string is plain text.

`dpsweep.orchestration.report.page` escapes the strings and adds markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import count_of
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.comparison.findings import Difference, Findings, warnings
from dpsweep.orchestration.comparison.formats import (
    Format,
    at_most,
    correlation,
    first_few,
    in_one_word,
    number,
    per_unit,
)
from dpsweep.orchestration.comparison.ledger import ComposedGroup, composed
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.metrics import of_task
from dpsweep.orchestration.comparison.rate_metrics import group_metric, spoken
from dpsweep.orchestration.comparison.record import shared_notes, told
from dpsweep.orchestration.comparison.sanity import best_constant, constant_of
from dpsweep.orchestration.comparison.settings import (
    Setting,
    group_epsilon,
    group_epsilon_error,
    group_names,
    group_value,
    served_worst,
    setting_name,
    whose,
)
from dpsweep.orchestration.comparison.statistics import Correlation, correlated
from dpsweep.orchestration.comparison.values import epsilon, median_epsilon, worst_over_median
from dpsweep.orchestration.comparison.wording import NEIGHBOURS, by_selection, in_brackets, unknown_of_one_seed
from dpsweep.orchestration.report.catalogue import are_per_user, norms_are_off
from dpsweep.orchestration.report.first_screen import decision
from dpsweep.orchestration.store.published import PublishedSweep, PublishedTrial, TrialState, task_of
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.workers.tasks import task_called

SENSITIVE = (
    "Sensitive. This page shows exact statistics of the training examples, which no differential-privacy guarantee "
    "covers. Treat it like the training data."
)

TERMS: Final[Mapping[str, str]] = {
    "ε of a group of k": "The bound for any k records together, such as one person's, from a mixture-of-Gaussians "
    "analysis of each step; tighter than k-fold group privacy.",
    "Neighbouring data sets": "".join(f"{name}: {each.meaning}. " for name, each in NEIGHBOURS.items())
    + "Epsilons under different adjacencies must not be compared.",
    "Mean and spread": "Averages over seeds; ± is one standard deviation, whiskers reach from the lowest to the "
    "highest seed.",
    "Interval": "Where the number would lie with other seeds, splits and test examples, in 95 of 100 sweeps: test "
    "examples (or users, if the data name them) are resampled, the same for all trials; seeds and splits enter with "
    "Student’s t, their spread pooled over private settings: with two or three seeds, a setting whose seeds spread "
    "eight times as much as the others’ may go unnoticed, and its interval covers in 85 of 100 sweeps. With one seed "
    "an interval says nothing of other seeds. It is no statement about privacy.",
    "Low or high by selection": "The worst of several groups is partly the unluckiest: its measured value is too low, "
    "and a gap between groups too large. The corrected value is without that bias, settings are ordered by it, and "
    "the interval is of the true extreme.",
    "Better, worse, not distinguishable, unknown": "Differences are paired: equal seed, equal split, equal test "
    "examples. Their intervals are widened so that all of them together hold in 95 of 100 sweeps (Bonferroni, over "
    "all pairs of private settings in each metric). A setting is better or worse where the interval leaves out 0, and "
    "with one seed nothing is known. In sentences, intervals of the best of several settings allow for that choice "
    "and reach further than in tables.",
    "Pareto front": "The private settings that no other one of the same neighbouring data sets dominates in "
    "worst-case ε (two significant digits), {main} and the metric of the worst-served group. Beyond noise: none that "
    "costs as little is as good in both, by intervals.",
    "Composed ε": "What several trials cost together, at the same δ: all seeds of a setting, which its averages show, "
    "or all private trials of the sweep, which this page shows. Their mechanisms are composed, with every earlier "
    "start of a trial, as if each record, or user, were in the data of all. Baselines are not in it: nothing protects "
    "the records from what is shown of a baseline.",
    "One model or many": "Worst-case ε is the cost of publishing that one model and nothing else. Publishing several, "
    "or averages over them, costs the composed ε; so does choosing one by its results on private data.",
}


ATTACK = (
    "Membership attack",
    "How often a threshold on the loss of an example tells whether it was trained on, at equal numbers of training and "
    "test examples: 50% is chance. The threshold is found on one half of them and measured on the other; ± is a "
    "standard error. It is no bound on ε: a better attack may succeed where this one fails, and this one also succeeds "
    "where test examples differ from training examples by more than membership.",
)


def meanings(data: PublishedSweep) -> list[tuple[str, str]]:
    """Return the terms of the page with their meanings: metrics, comparison, and attacks if shown."""
    is_exact = release_mode(data.disclosure).is_sensitive
    metrics = [metric for metric in of_task(data.task) if metric.meaning and (is_exact or not metric.exact)]
    attacked = any(trial.attacks for trial in data.trials)
    main = spoken(group_metric(task_called(data.task).main))
    terms = ((term, meaning.replace("{main}", main)) for term, meaning in TERMS.items())
    return [*((metric.heading, metric.meaning) for metric in metrics), *terms, *([ATTACK] if attacked else [])]


def headline(data: PublishedSweep, found: Findings) -> list[str]:
    """Return everything that the page says in sentences: the decision, the cautions, and the findings."""
    decided = decision(found, data.delta) if data.trials else []
    return list(dict.fromkeys([*decided, *cautions(data, found), *sentences(data, found)]))


def cautions(data: PublishedSweep, found: Findings) -> list[str]:
    """Return what to know before a number is quoted: why epsilons are estimates, which rows are in no number, what
    cannot be compared, failures.
    """
    return list(
        dict.fromkeys([*told(data.trials), *shared_notes(data.trials), *warnings(found), *_failures(data, found)])
    )


def sentences(data: PublishedSweep, found: Findings) -> list[str]:
    """Return the findings that the first screen has no room for: comparisons, composed and individual epsilons."""
    return [*_comparisons(found), *composed_cost(data.trials), *_individuals(data, found.settings)]


def _comparisons(found: Findings) -> list[str]:
    """Return sentences on the settings that the best one beats, on the one that serves the worst group best, and on
    limits of the verdicts.
    """
    main, worst = found.main, found.worst_group
    best = found.best(main.name)
    if best is None:
        return []
    said = _ordered(found, best, main, f"in {found.word}")
    constant = None if main.task == "regression" else constant_of(best)
    if constant is not None:
        said += [f"Always predicting {best_constant(main)} reaches {main.format.one(constant)}."]
    fairest = found.best(worst.name, [best, *found.useful]) if found.has_groups and len(found.private) > 1 else None
    if fairest is not None:
        if worst.format.one(fairest.mean(worst.value)) == worst.format.one(best.mean(worst.value)):
            fairest = best  # a difference that is not shown is no rank
        by = found.worst_word_unless_main
        where = f"in the{by} of the worst-served group" if by else "for the worst-served group"
        alike = [each.other for each in found.alike(fairest, worst.name)]
        said += [_fairest(found, fairest, best)] if _measured_alike(found, fairest, best) else []
        said += _ordered(found, fairest, worst, where)
        said += [f"{first_few(alike)} cannot be told from {fairest.name} {where}."] if alike else []
    return [*said, *_looks(found), *_caveats(found, best)]


def _ordered(found: Findings, best: Setting, of: Metric, where: str) -> list[str]:
    """Return sentences on the settings that ``best`` beats in a metric, and on others of unknown order."""
    differences = [found.difference(best, other, of.name) for other in found.rivals(best)]
    beaten = [f"{each.other} by {_range(each, of.format)}" for each in differences if each.verdict == "better"]
    single = [each.other for each in differences if each.verdict == "unknown (one seed)"]
    apart = [each.other for each in differences if each.verdict == "unknown"]
    said = [f"{best.name} beats {first_few(beaten)}{of.format.points} {where}."] if beaten else []
    if single and not unknown_of_one_seed(best, found.private):
        said += [f"Whether {best.name} is better than {first_few(single)} {where} is unknown (one common seed)."]
    if apart and found.interval(best, found.main.name):
        said += [
            f"{best.name} cannot be compared with {first_few(apart)} {where}: no test examples are common to both, or "
            "a run has no finite score."
        ]
    return said


def _range(of: Difference, shown: Format) -> str:
    """Return the ends of the interval of a difference, without sign; percentage points for shares."""
    low, high = sorted(abs(end) for end in ((of.interval.low, of.interval.high) if of.interval else (0.0, 0.0)))
    return f"{100 * low:.1f} to {100 * high:.1f}" if shown.is_share else f"{number(low)} to {number(high)}"


def _measured_alike(found: Findings, fairest: Setting, best: Setting) -> bool:
    """Return whether ``fairest`` serves its worst group at least as well as ``best`` as measured too, uncorrected."""
    own, other = (each.mean(found.worst_group.value) for each in (fairest, best))
    if fairest is best or own is None or other is None:
        return True
    return own >= other if found.worst_group.better == "higher" else own <= other


def _fairest(found: Findings, fairest: Setting, best: Setting) -> str:
    worst, by = found.worst_group, found.worst_word
    high = "highest" if worst.better == "higher" else "lowest"
    shown = {worst.format.one(each.mean(worst.value)) for each in found.useful}
    if len(shown) == 1 and len(found.useful) > 1:
        return f"The {by} of the worst-served group is {shown.pop()} in each of {len(found.useful)} private settings."
    if fairest is best:
        return f"{best.name} also has the {high} {by} of a worst-served group."
    who = served_worst(worst, fairest) if whose(worst, fairest) else "every group"
    whom = f"{who} gets {_with_interval(found, fairest, worst)}"
    other, total = _with_interval(found, best, worst), _with_interval(found, fairest, found.main)
    return (
        f"The {high} {by} of a worst-served group is that of {fairest.name}: {whom}, against {other} under "
        f"{best.name}; its {found.word} is {total} overall."
    )


def _with_interval(found: Findings, setting: Setting, of: Metric) -> str:
    """Return a metric of a setting that results have chosen, with its interval."""
    value, interval = setting.mean(of.value), found.interval_of_chosen(setting, of.name)
    return of.format.one(value) + in_brackets(interval, of.format, by_selection(of, value, interval))


def _looks(found: Findings) -> list[str]:
    """Return a sentence on verdicts that decided whether to add seeds; none if that was not asked."""
    if not found.looks:
        return []
    times = "once" if found.looks == 1 else f"{found.looks} times"
    return [
        f"Verdicts were read {times} to decide whether to add seeds: all hold together with "
        f"{100 * found.level:.2f}%, so that any at any time is wrong in at most 5 of 100 sweeps."
    ]


def _caveats(found: Findings, best: Setting) -> list[str]:
    if found.interval(best, found.main.name) is not None or len(found.private) < 2:
        return []
    return [
        "Whether differences exceed chance cannot be told: what the models predict of single test examples is not "
        "stored beside this sweep."
    ]


def composed_cost(trials: Sequence[PublishedTrial]) -> list[str]:
    """Return a sentence on the composed epsilon of all private trials; nothing if only one was ever started."""
    found = composed(trials)
    if found is None or found.trials + found.attempts + found.candidates < 2:
        return []
    anew = found.included
    whole = f"All {found.trials} private trials together{anew}" if found.trials > 1 else f"The private trial{anew}"
    if found.estimate is None:
        return [f"{whole} have no composed ε: {found.refusal}."]
    estimate = found.estimate
    claim = "a guarantee" if estimate.kind == "guarantee" else f"an estimate ({', '.join(estimate.reasons)})"
    how = f"at δ = {estimate.delta:g}, adjacency {estimate.adjacency}, composed by {estimate.accountant}"
    words = f"{per_unit(estimate.unit).removeprefix(' ')} {how}: {claim}".removeprefix(" ")
    released = f" Their released statistics alone cost ε = {at_most(found.release_epsilon)}."
    return [
        f"{whole} cost ε = {at_most(estimate.epsilon)} {words}."
        + (released if found.release_epsilon is not None else "")
        + "".join(map(_of_group, found.groups))
    ]


def _of_group(group: ComposedGroup) -> str:
    """Return what the trials together cost any k records, such as all records of a user who owns that many."""
    whose = f" Any {group.group_size} records together, such as all of a user who owns at most {group.group_size},"
    if group.estimate is None:
        return f"{whose} have no composed ε: {group.refusal}."
    claim = "a guarantee" if group.estimate.kind == "guarantee" else "an estimate"
    return f"{whose} pay ε = {at_most(group.epsilon)}: {claim}."


def _individuals(data: PublishedSweep, settings: Sequence[Setting]) -> list[str]:
    private = [setting for setting in settings if not setting.is_baseline]
    ratios = [(found.mean, setting) for setting in private if (found := setting.over_seeds(worst_over_median))]
    if not ratios:
        return _withheld(data) if private else []
    ratio, setting = max(ratios, key=lambda pair: pair[0])
    low = min(ratio for ratio, _ in ratios)
    kinds = sorted({in_one_word(each.individuals.kind) for each in setting.trials if each.individuals})
    paid = f"εᵢ = {number(setting.mean(median_epsilon))} ({', '.join(kinds)}) of {at_most(setting.mean(epsilon))}"
    median_paid = f"under {setting.name} the median example paid {paid}"
    if ratio < _OVERSTATED:
        return [f"The median example paid about as much as the worst case: {median_paid}.", *_correlations(private)]
    lowest, highest = f"{low:.1f}", f"{ratio:.1f}"
    over = f"{lowest} to {highest} times over" if lowest != highest else "as in"
    span = f" ({over} all settings)" if len(ratios) > 1 else ""
    where = " under some settings" if low < _OVERSTATED else ""
    sentence = f"The worst case overstates what most examples paid{where}: {median_paid}, {highest} times less{span}."
    return [sentence, *_correlations(private)]


_OVERSTATED = 1.1
"""Least ratio of the worst case to the median epsilon_i at which the worst case is said to overstate it."""


def _withheld(data: PublishedSweep) -> list[str]:
    """Return, under ``release: none``, what ``private`` would show of individual epsilons and cost; else nothing."""
    traces = [attempt.trace for trial in data.trials for attempt in trial.attempts if attempt.trace.is_private]
    is_computed = not (are_per_user(data.trials) or norms_are_off(data.trials) or any(t.selection for t in traces))
    if release_mode(data.disclosure).statistics is not None or not traces or not is_computed:
        return []
    release = ReleaseSpec()
    alone = Trace(traces[-1].dataset_size, releases=release.releases(), adjacency=traces[-1].adjacency)
    cost = account(alone, data.delta)
    return [
        "What single training examples paid is withheld (release: none); release: private would show a histogram of "
        f"their εᵢ, its median, their mean and that of each group, with noise: alone ε = {at_most(cost.epsilon)} at "
        f"δ = {data.delta:g} per trial, taken from its target, which training then meets with a little more noise."
    ]


def _correlations(private: Sequence[Setting]) -> list[str]:
    """Return a sentence on the strongest correlation over groups; it is a finding if all settings together rule out
    chance.
    """
    known = [(found, setting.name) for setting in private if (found := group_correlation(setting)) is not None]
    if not known:
        return []
    strongest, name = min(known, key=lambda pair: (pair[0].p_value, -abs(pair[0].r)))
    task = task_of(trial for setting in private for trial in setting.trials)
    word, r = spoken(group_metric(task_called(task).main)), correlation(strongest.r)
    groups = len(group_names(*private))
    small = f" of {groups} groups: the others are too small" if strongest.pairs < groups else " groups"
    over = f"over {strongest.pairs}{small}"
    if strongest.p_value * len(known) > _CHANCE:
        return [
            f"Whether groups that are served worse pay more cannot be told: the strongest correlation of {word} and "
            f"mean εᵢ is r = {r}, {over} ({name}). By ranks, which one group far off does not move, it may be chance."
        ]
    who = "worse" if strongest.r < 0 else "better"
    return [f"Groups served {who} paid more under {name}: their {word} and mean εᵢ correlate with r = {r}, {over}."]


_CHANCE = 0.05
"""Largest p-value, times the number of settings (Bonferroni), at which a correlation over groups is a finding."""


def group_correlation(setting: Setting) -> Correlation | None:
    """Return the correlation of accuracy, or main score, and mean epsilon_i over groups; None for fewer than three
    groups.

    Groups whose mean has a standard error above a tenth of the worst case are left out: they are so small that the
    noise of the release dominates.
    """
    tolerable = 0.1 * (setting.mean(epsilon) or 0.0)
    pairs = [
        (served, paid)
        for name in group_names(setting)
        if (served := setting.mean(group_value(name, lambda group: group.main))) is not None
        and (paid := setting.mean(group_epsilon(name))) is not None
        and setting.error_over_seeds(group_epsilon_error(name)) <= tolerable
    ]
    return correlated(*zip(*pairs, strict=True)) if len(pairs) >= 3 else None


def _failures(data: PublishedSweep, found: Findings) -> list[str]:
    failed = sum(trial.state is TrialState.FAILED for trial in data.trials)
    stopped = [setting_name(trial) for trial in data.trials if trial.state is TrialState.STOPPED]
    waiting = sum(not trial.state.has_ended for trial in data.trials)
    sentences = []
    if failed:
        subject = count_of(failed, "trial failed and is", "trials failed and are")
        sentences.append(f"{subject} in no average; the table of trials says why.")
    if stopped:
        subject = count_of(len(stopped), "trial, which is", "trials, which are")
        sentences.append(f"The scheduler stopped {subject} in no average; the table of trials says when.")
        if flattered := [setting.name for setting in found.settings if setting.name in stopped]:
            sentences.append(f"Averages of {first_few(flattered)} are too good: they keep only seeds that began well.")
    if waiting:
        sentences.append(f"{waiting} of {len(data.trials)} trials have not finished; the same dpsweep run continues.")
    return sentences
