"""The tables of the report, as HTML, and the sections around tables of exact results.

Exact results on training examples only appear where the release mode shows them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final

from dpsweep.accounting.attacks import area_limit, exposure_limit
from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.accounting.errors import count_of
from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.comparison.findings import Difference, Findings
from dpsweep.orchestration.comparison.formats import (
    CHANGE,
    CORRELATION,
    MISSING,
    PERCENT,
    POINTS,
    Format,
    at_least,
    at_most,
    at_most_share,
    in_one_word,
    number,
    per_unit,
    sentence_start,
    without_unit,
)
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.metric_types import GroupMetric, Metric, MetricTable
from dpsweep.orchestration.comparison.metrics import columns, main_metric, meanings_of, metric
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS
from dpsweep.orchestration.comparison.record import shared_notes
from dpsweep.orchestration.comparison.settings import (
    Setting,
    best_trade_offs,
    class_names,
    group_attack,
    group_epsilon,
    group_names,
    group_paid,
    group_value,
    setting_name,
    shown_over_seeds,
    whose,
)
from dpsweep.orchestration.comparison.statistics import spread
from dpsweep.orchestration.comparison.values import Value, loss_correlation, on_training
from dpsweep.orchestration.comparison.wording import between, by_selection
from dpsweep.orchestration.report.figures import meta_of
from dpsweep.orchestration.report.html import html_table, marked_name, section
from dpsweep.orchestration.report.plot import Style
from dpsweep.orchestration.store.published import PublishedAccount, PublishedPrivacy, PublishedTrial, task_of
from dpsweep.workers.evaluation.attack_results import ExposureAttack, MembershipAttack
from dpsweep.workers.evaluation.rates import recalls

_MOST_CLASSES = 20
"""Most classes of a confusion matrix in the report; larger ones are only in results.json."""


def settings_table(found: Findings, style: Style) -> str:
    """Return one row per setting: every metric of `MetricTable.SETTINGS`, averaged over its seeds, with known
    intervals.
    """
    front = best_trade_offs(found.settings, found.worst_group, found.useless)
    shown = columns(MetricTable.SETTINGS, found.worst_group.name, found.trials)
    rows = []
    for setting in found.settings:
        beyond = ", beyond noise" if setting in found.front else ""
        mark = f'<span class="front">Pareto front{beyond}</span>' if setting in front else ""
        mark += f"<br><small>{escape(found.useless[setting.name])}</small>" if setting.name in found.useless else ""
        numbers = (_with_interval(found, setting, metric) for metric in shown)
        rows.append((marked_name(setting, style) + mark, str(len(setting.trials)), _composed(setting), *numbers))
    heads = ("Seeds", "Composed ε", *(metric.heading for metric in shown))
    marks = [meta_of(setting) for setting in found.settings]
    return _titled("Settings, averaged over seeds", ("Setting",), heads, rows, marks, found.task)


def _titled(
    title: str,
    words: Iterable[str],
    numbers: Iterable[str],
    rows: Sequence[Sequence[str]],
    marks: Sequence[Mapping[str, str]] = (),
    task: str | None = None,
) -> str:
    """Return a table of `html_table` under its title; "" without a row. task: whose metrics some columns have."""
    if not rows:
        return ""
    return f"<h3>{title}</h3>{html_table(words, numbers, rows, marks=marks, meanings=meanings_of(task))}"


def _with_interval(found: Findings, setting: Setting, metric: Metric) -> str:
    """Return the metric over the seeds of a setting; below it, its 95% interval if one is known."""
    is_known = metric.measure is not None and setting.over_seeds(metric.value) is not None
    interval = found.evidence.interval(setting, metric.name) if is_known else None
    words = by_selection(metric, setting.mean(metric.value), interval)
    corrected = f"<br><small>{words}</small>" if words else ""
    return _over_seeds(metric, setting) + corrected + _range(interval, metric.format)


def _range(interval: ConfidenceInterval | None, shown: Format) -> str:
    return f"<br><small>{between(interval, shown)}</small>" if interval else ""


def comparison_table(found: Findings, style: Style) -> str:
    """Return pairwise differences of the methods, each at its most accurate; "" for fewer than two or without
    intervals.
    """
    rows = []
    for one, other in itertools.combinations(found.methods, 2):
        differences = [found.difference(one, other, name) for name in found.headline]
        if any(each.interval for each in differences):
            rows.append((marked_name(one, style), marked_name(other, style), *map(_verdict, differences)))
    heads = (f"{without_unit(of.heading)}{', points' * of.format.is_share}" for of in map(metric, found.headline))
    return _titled("What can be told apart", ("Setting", "against"), heads, rows)


def _verdict(found: Difference) -> str:
    shown = metric(found.metric).format
    if found.interval is None:
        return MISSING
    return f"{found.verdict}<br><small>{between(found.interval, shown.of_differences)}</small>"


def fairness_table(found: Findings, style: Style) -> str:
    """Return one row per setting: every metric of `MetricTable.FAIRNESS` that any setting has; "" without any."""
    shown = [
        metric
        for metric in columns(MetricTable.FAIRNESS, found.worst_group.name, found.trials)
        if any(setting.over_seeds(metric.value) is not None for setting in found.settings)
    ]
    if not shown:
        return ""
    rows = [
        (marked_name(setting, style), *(_with_interval(found, setting, metric) for metric in shown))
        for setting in found.settings
    ]
    marks = [meta_of(setting) for setting in found.settings]
    heads = (metric.heading for metric in shown)
    return _titled("Metrics and gaps between groups, on test data", ("Setting",), heads, rows, marks, found.task)


def by_group_table(found: Findings, style: Style) -> str:
    """Return one row per setting and group: every metric of `GROUP_METRICS` that any of them has; "" without groups."""
    names = group_names(*found.settings)
    shown = [
        each
        for each in GROUP_METRICS
        if each.task in (None, found.task)
        and any(setting.over_seeds(group_value(name, each.value)) for setting in found.settings for name in names)
    ]
    pairs = list(itertools.product(names, found.settings))
    rows = [
        (escape(name), marked_name(setting, style), *(_of_group(found, setting, name, each) for each in shown))
        for name, setting in pairs
    ]
    marks, heads = [meta_of(setting) for _, setting in pairs], (each.heading for each in shown)
    return _titled("Every group under every setting", ("Group", "Setting"), heads, rows, marks, found.task)


def _of_group(found: Findings, setting: Setting, name: str, metric: GroupMetric) -> str:
    mean = setting.over_seeds(group_value(name, metric.value))
    interval = found.evidence.interval(setting, metric.name, name) if metric.measure and mean else None
    return (metric.format.over_seeds(mean) if mean else MISSING) + _range(interval, metric.format)


def classes_table(settings: Sequence[Setting], style: Style) -> str:
    """Return the recall and confusion matrix row of every class, by setting, from counts summed over its trials.

    Returns "" if no trial has counts, and for more than `_MOST_CLASSES` classes.
    """
    rows, marks = [], []
    names = dict[int, tuple[str, ...]]()
    for setting in settings:
        counts = [trial.quality.counts.matrix for trial in setting.trials if trial.quality and trial.quality.counts]
        if counts and len(counts[0]) <= _MOST_CLASSES:
            matrix = sum(counts[1:], counts[0])
            names[len(matrix)] = class_names((trial for each in settings for trial in each.trials), len(matrix))
            for label, (recall, row) in enumerate(zip(recalls(matrix), matrix, strict=True)):
                cells = [PERCENT.one(None if math.isnan(recall) else float(recall)), *(f"{each:.0f}" for each in row)]
                name = escape(names[len(matrix)][label])
                rows.append((name, marked_name(setting, style), *cells))
                marks.append(meta_of(setting))
    heads = ("Recall", *(f"as {name}" for name in names[max(names)])) if names else ()
    return _titled("What each class is taken for, on test data", ("Class", "Setting"), heads, rows, marks)


def parts_table(settings: Sequence[Setting], style: Style) -> str:
    """Return scores of every label, target or class, by setting, averaged over its seeds.

    Returns "" if there are none, and for more than `_MOST_CLASSES` of them.
    """
    trials = [trial for setting in settings for trial in setting.trials if trial.quality]
    every = [(name, each) for trial in trials if trial.quality for name, each in trial.quality.parts.items()]
    names, heads = dict.fromkeys(name for name, _ in every), dict.fromkeys(head for _, each in every for head in each)
    if len(names) > _MOST_CLASSES:
        return ""

    def number_of(name: str, head: str) -> Callable[[PublishedTrial], float | None]:
        return lambda trial: trial.quality.parts.get(name, {}).get(head) if trial.quality else None

    rows, marks = [], []
    for name, setting in itertools.product(names, settings):
        found = [setting.over_seeds(number_of(name, head)) for head in heads]
        cells = (CORRELATION.over_seeds(each) if each else MISSING for each in found)
        rows.append((escape(name), marked_name(setting, style), *cells))
        marks.append(meta_of(setting))
    words, numbers = ("Label, target or class", "Setting"), (head.replace("_", " ") for head in heads)
    return _titled("Every label, target or class, on test data", words, numbers, rows, marks)


def _composed(setting: Setting) -> str:
    """Return the composed epsilon of all seeds that the row averages over."""
    cost, _, kind = setting.composed_cost.partition(" ")
    return f"{cost}<br><small class='claim'>{kind}</small>" if kind else cost


def _over_seeds(metric: Metric, setting: Setting) -> str:
    """Return the metric over the seeds of the setting, after the groups that it belongs to in small print."""
    groups, text = ", ".join(whose(metric, setting)), shown_over_seeds(metric, setting)
    return f'<small class="whose">{escape(groups)}</small>{text.removeprefix(f"{groups}:")}' if groups else text


def group_sizes_table(settings: Sequence[Setting], style: Style) -> str:
    """Return the epsilon of any k records together, by setting; "" if no trial has it for k > 1."""
    private = [setting for setting in settings if not setting.is_baseline]
    costs = [[trial.privacy for trial in setting.trials if trial.privacy] for setting in private]
    sizes = sorted({size for found in costs for each in found for size in each.group_epsilons})
    if not any(size > 1 for size in sizes):
        return ""
    rows = [
        (marked_name(setting, style), *(_cost_of_group(found, size) for size in sizes))
        for setting, found in zip(private, costs, strict=True)
    ]
    heads = (f"k = {size}" for size in sizes)
    return _titled("Groups of records", ("Worst-case ε for any k records together",), heads, rows)


def _cost_of_group(found: Sequence[PublishedPrivacy], size: int) -> str:
    """Return the largest epsilon of any ``size`` records of any seed; below it, that bound on advantages, and the kind
    where it is weaker than that of one record.
    """
    epsilons = [each.group_epsilons[size] for each in found if size in each.group_epsilons]
    advantages = [each.risks[size].advantage.upper for each in found if size in each.risks]
    below = f"<br><small>advantage {at_most_share(max(advantages))}</small>" if advantages else ""
    weaker = {kind for each in found if (kind := each.group_kinds.get(size, each.kind)) != each.kind}
    below += "".join(f"<br><small class='claim'>{in_one_word(kind)}</small>" for kind in sorted(weaker))
    return at_most(max(epsilons, default=None)) + below


def trials_table(trials: Sequence[PublishedTrial], worst_group: str) -> str:
    """Return one row per trial: status, claim, every metric of `metrics.MetricTable.TRIALS`, error, and the notes that
    not all trials share.

    worst_group: as in `metrics.columns`.
    """
    shown = columns(MetricTable.TRIALS, worst_group, trials)
    if not trials:
        return "<p>None.</p>"
    words, numbers = ("Trial", "Status", "Accountant"), (metric.heading for metric in shown)
    above = shared_notes(trials)  # among the cautions
    rows = [_trial_row(trial, shown, above) for trial in trials]
    looks = [trial.state.word for trial in trials]
    meanings = meanings_of(task_of(trials))
    return html_table(words, numbers, rows, remarks=("Remarks",), looks=looks, meanings=meanings)


def _trial_row(trial: PublishedTrial, shown: Sequence[Metric], above: Sequence[str]) -> list[str]:
    privacy = trial.privacy
    seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
    said_above = (*above, *in_words(privacy.reasons if privacy else ()))  # the claim has the names of these
    remarks = [*([trial.error] if trial.error else []), *(note for note in trial.notes if note not in said_above)]
    return [
        f"{escape(setting_name(trial) + seed)}<br><small>{escape(trial.key)}</small>",
        trial.state.word,
        _claim(privacy) if privacy and privacy.is_private else MISSING,
        *(metric.format.one(metric.value(trial)) for metric in shown),
        escape("; ".join(remarks)),
    ]


def _claim(privacy: PublishedPrivacy) -> str:
    kind = in_one_word(privacy.kind)
    why = f": {', '.join(privacy.reasons)}" if privacy.reasons else ""
    claim = f"{kind}{per_unit(privacy.unit)}, {escape(privacy.holds_for)}{why}"
    return f"{escape(privacy.accountant)}<br><small class='claim'>{claim}</small>"


def estimates_table(settings: Sequence[Setting], style: Style) -> str:
    """Return errors of estimated epsilon_i against exactly tracked ones, by setting; "" if no trial tracked any."""
    rows = []
    for setting in settings:
        statistics = [trial.individuals for trial in setting.trials if trial.individuals]
        found = [each.estimates for each in statistics if each.estimates]
        if not found:
            continue
        r, mean = spread(each.correlation for each in found), spread(each.mean_error for each in found)
        largest = spread(each.largest_error for each in found)
        rows.append(
            (
                marked_name(setting, style),
                str(sum(each.examples for each in found)),
                f"{r.mean:.4f}" if r else MISSING,
                number(mean.mean if mean else None),
                number(largest.high if largest else None),
            )
        )
    words = ("εᵢ as estimated against εᵢ from norms of every step",)
    numbers = ("Examples tracked", "Pearson’s r", "Mean error", "Largest error")
    return _titled("How good the estimates are", words, numbers, rows)


def losses_table(settings: Sequence[Setting], style: Style) -> str:
    """Return the correlation of epsilon_i and log loss, overall and by group; "" if no trial has any."""
    names = group_names(*settings)
    values = (loss_correlation, *(group_paid(name, lambda group: group.loss_correlation) for name in names))
    rows = []
    for setting in settings:
        found = [setting.over_seeds(value) for value in values]
        if any(found):
            cells = (CORRELATION.over_seeds(spread) if spread else MISSING for spread in found)
            rows.append((marked_name(setting, style), *cells))
    return _titled("εᵢ and loss", ("Pearson’s r of εᵢ and log loss",), ("All", *names), rows)


def _section(
    heading: str, text: str, words: Iterable[str], numbers: Iterable[str], html: Sequence[Sequence[str]]
) -> str:
    """Return the section around a table; "" without a row."""
    return section(heading, text, html_table(words, numbers, html)) if html else ""


def training_scores_section(settings: Sequence[Setting], style: Style, task: str) -> str:
    """Return the section on training examples; "" if no trial was scored on them or the results are withheld."""
    main = main_metric(task)
    scored = [setting for setting in settings if setting.over_seeds(on_training)]
    names = group_names(*scored)
    of_groups = (
        (group_value(name, lambda group: group.on_training), group_value(name, lambda group: group.main))
        for name in names
    )
    pairs = [(on_training, main.value), *of_groups]
    rows = [
        (marked_name(setting, style), *(_beside_test(setting, main, *pair) for pair in pairs)) for setting in scored
    ]
    return _section(
        "How well the models know their training examples",
        "<p>The final models on their own training examples, and below, how much better or worse that is than on test "
        "data. Where it is better, guessing that an example was trained on if it is predicted right succeeds more "
        "often than chance (Yeom et al. 2018).</p>",
        (f"{sentence_start(main.heading.removeprefix('Test '))} on training examples",),
        ("All", *names),
        rows,
    )


def _beside_test(setting: Setting, main: Metric, training: Value, test: Value) -> str:
    """Return the score on training examples over the seeds; below it, its difference to the score on test examples."""
    one, other = setting.over_seeds(training), setting.over_seeds(test)
    if one is None or other is None:
        return MISSING
    distance = one.mean - other.mean
    beside = f"{POINTS.one(distance)} points" if main.format is PERCENT else CHANGE.one(distance)
    return f"{main.format.over_seeds(one)}<br><small>{beside} to test</small>"


def attacks_section(settings: Sequence[Setting], style: Style) -> str:
    """Return the section on membership attacks; "" if no trial was attacked or the results are withheld."""
    attacked = [setting for setting in settings if any(trial.attacks for trial in setting.trials)]
    names = group_names(*attacked)
    rows = [(marked_name(setting, style), *(_attack_cell(setting, name) for name in names)) for setting in attacked]
    return _section(
        "Who can be found in the model",
        "<p>A membership attack on each group: an example whose loss is below a threshold is called a training "
        "example. Guessing is right for 50%. Below each share, the examples it was measured on and the mean εᵢ of the "
        "group.</p>",
        ("Right guesses of membership",),
        names,
        rows,
    )


def _attack_cell(setting: Setting, name: str) -> str:
    """Return the success rate with its standard error; below it, the number of examples and the mean epsilon_i."""
    rate = setting.over_seeds(group_attack(name, lambda group: group.success_rate))
    measured = setting.over_seeds(group_attack(name, lambda group: group.examples))
    if rate is None or measured is None:
        return MISSING
    error = setting.error_over_seeds(group_attack(name, lambda group: group.standard_error))
    paid = setting.over_seeds(group_epsilon(name))
    below = [f"of {measured.mean * measured.count:.0f}", *([f"mean εᵢ {number(paid.mean)}"] if paid else [])]
    return f"{100 * rate.mean:.1f} ± {100 * error:.1f}%<br><small>{', '.join(below)}</small>"


def memberships_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on likelihood-ratio attacks; "" if no trial was attacked so or the results are withheld."""
    attacked = [trial for trial in trials if trial.memberships]
    names = dict.fromkeys(group.name for trial in attacked for group in trial.memberships)
    rows = []
    for trial in attacked:
        found = {group.name: group for group in trial.memberships}
        rows.append((escape(trial.key), *(_area(found.get(name), _allowed(trial, name)) for name in names)))
    return _section(
        "Who can be found with reference models",
        "<p>A membership attack on each group (RMIA): an example is scored by its probability under the trained model "
        "over its mean probability under models trained with and without it. The area is the probability that a "
        "training example scores above another one, with a 95% interval; guessing gives 0.5.</p>",
        ("Area under the ROC curve",),
        names,
        rows,
    )


def _allowed(trial: PublishedTrial, name: str) -> str:
    """Return the largest area that the mean epsilon_i of a group allows, with the kind of these; "" if not known."""
    mean = group_epsilon(name)(trial)
    if mean is None or trial.privacy is None or trial.individuals is None:
        return ""
    limit = area_limit(max(mean, 0.0), trial.privacy.delta)
    return f"; mean εᵢ ({in_one_word(trial.individuals.kind)}) allows {at_most(limit)}"


def _area(found: MembershipAttack | None, allowed: str) -> str:
    if found is None:
        return MISSING
    interval = f"{found.lower:.3f} to {found.upper:.3f}"
    alone = f"loss alone {found.loss_auc:.3f}, gradient alone {found.gradient_auc:.3f}"
    return f"{found.auc:.3f}<br><small>{interval}, of {found.examples}; {alone}{allowed}</small>"


def exposures_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on secrets; "" if no trial was trained on any or the results are withheld."""
    rows = []
    for trial in trials:
        if (found := trial.exposure) is not None:
            mean = f"{found.mean:.2f}<br><small>{found.lower:.2f} to {found.upper:.2f}</small>"
            paid = _epsilon_of_secret(trial, found)
            allowed = MISSING if paid is None else at_most(exposure_limit(*paid, found.candidates))
            counts = f"{found.canaries} × {found.repeats}"
            extracted = f"{found.extracted} of {found.canaries}"
            rows.append((escape(trial.key), mean, allowed, extracted, counts, f"{found.candidates:,}"))
    return _section(
        "Which secrets can be extracted",
        "<p>Random sequences of tokens were written over training examples. The exposure of one is log<sub>2</sub> R − "
        "log<sub>2</sub> r bits, where r is the rank of its loss among R sequences that the model has not seen; "
        "guessing gives 1.4. It has rank 1 where it can be extracted. The limit is what ε allows.</p>",
        ("Trial",),
        ("Exposure in bits", "ε allows", "Extracted", "Secrets × examples", "Candidates"),
        rows,
    )


def _epsilon_of_secret(trial: PublishedTrial, found: ExposureAttack) -> tuple[float, float] | None:
    """Return epsilon and delta of the examples of a secret together; None where they are not known."""
    privacy = trial.privacy
    if privacy is None or not privacy.is_private:
        return None
    epsilon = privacy.epsilon if found.repeats == 1 else privacy.group_epsilons.get(found.repeats)
    return None if epsilon is None else (epsilon, privacy.delta)


_CANARIES: Final = {"rows": "Examples", "gradient": "Gradients"}
_TRANSCRIPTS: Final = {"last_model": "seen in the last model", "iterates": "seen in every noisy sum"}


def audits_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on audits; "" if no trial was audited or the results are withheld."""
    assumed = "; ".join(f"{name} assumes {assumption}" for name, assumption in ASSUMPTIONS.items())
    audited = [(trial, trial.audit, "") for trial in trials if trial.audit is not None]
    for trial in trials:
        count = len(trial.audits)
        audited += [(trial, each, f", in copy {place} of {count}") for place, each in enumerate(trial.audits, 1)]
    names = dict.fromkeys(name for _, audit, _ in audited for name in audit.groups)
    rows = []
    for trial, audit, copy in audited:
        claimed = trial.privacy.epsilon if trial.privacy else None
        best = _audited(audit.lower_bound, claimed if audit.of_canary is None else audit.of_canary)
        bounds = [best, *(_audited(audit.groups.get(name), claimed) for name in names)]
        guessed = f"{audit.correct} of {audit.guesses}" if audit.guesses else f"ranks of {audit.canaries}"
        facts = [at_most(claimed), at_most(audit.of_canary), f"{100 * audit.confidence:g}%", guessed]
        tests = [f"{name} {at_least(bound)}" for name, bound in audit.lower_bounds.items()]
        whom = f"{_CANARIES[audit.kind]}, {_TRANSCRIPTS[audit.transcript]}{copy}<br><small>{', '.join(tests)}</small>"
        rows.append((escape(trial.key), whom, *facts, *bounds))
    return _section(
        "What an audit proves",
        "<p>A fair coin for each canary, a random training example or a made-up gradient, decided whether it was "
        "trained on. Guesses from the fall of its loss, or from its direction in the model or in every noisy sum, "
        "prove that ε is at least so much: over all canaries, and over examples of each group that has enough. "
        f"Of the tests, {assumed}. All bounds of an audit hold together with its confidence: at 95%, one audit of a "
        "right trial in twenty may accuse it, and all audits are kept. A low bound does not show that little leaks. "
        "One above the claim contradicts it, and so does one above what a made-up gradient pays. That is less where a "
        "filter or further releases are part of the claim.</p>",
        ("Trial", "Canaries"),
        ("Claimed ε", "ε of a gradient", "Confidence", "Right guesses", "ε at least", *names),
        rows,
    )


def _audited(bound: float | None, paid: float | None) -> str:
    """Return a lower bound, marked where it is above what the canaries have ``paid`` by the claim."""
    contradicts = bound is not None and paid is not None and bound > paid
    return at_least(bound) + ("<br><small>contradicts the claim</small>" if contradicts else "")


def accounts_section(trials: Sequence[PublishedTrial]) -> str:
    """Return the section on what `dpsweep account` found; "" if it found nothing, or the results are withheld."""
    rows = [_account_row(trial, account) for trial in trials for account in trial.accounts]
    return _section(
        "Accounted again",
        "<p>Finished trials at another δ, by another method or by other groups, from their stored norms. ε is that of "
        "the worst case; statistics of εᵢ are exact.</p>",
        ("Trial", "Method", "Groups"),
        ("δ", "ε", "Median εᵢ", "Mean εᵢ"),
        rows,
    )


def _account_row(trial: PublishedTrial, account: PublishedAccount) -> list[str]:
    sizes = [f"any {size} records: ε {at_most(epsilon)}" for size, epsilon in account.group_epsilons.items()]
    means = [f"{name}: mean εᵢ {number(mean)}" for name, mean in account.group_means.items()]
    if (found := account.of_users) is not None:
        records = f"{count_of(found.users, 'user')} of up to {count_of(found.most_records, 'record')}"
        sizes.append(f"{records}: median ε {number(found.median)}, largest ε {at_most(found.largest)}")
    kinds = f"ε: {in_one_word(account.kind)}; εᵢ: {in_one_word(account.individual_kind)}"
    claim = f"{escape(account.method)}<br><small class='claim'>{kinds}</small>"
    values = at_most(account.epsilon), number(account.median), number(account.mean)
    return [escape(trial.key), claim, escape("; ".join([*sizes, *means])), f"{account.delta:g}", *values]
