"""The tables of the report, as HTML."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from html import escape

from dpsweep.orchestration.comparison.entries import GroupMetric, Metric, MetricTable, by_selection
from dpsweep.orchestration.comparison.findings import Difference, Findings
from dpsweep.orchestration.comparison.formats import (
    CORRELATION,
    MISSING,
    PERCENT,
    Format,
    at_most_share,
    number,
    per_unit,
)
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.metrics import columns, metric
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS
from dpsweep.orchestration.comparison.settings import (
    Setting,
    best_trade_offs,
    class_names,
    group_names,
    group_value,
    setting_name,
    shown_over_seeds,
    whose,
)
from dpsweep.orchestration.comparison.spoken import between, difference_between
from dpsweep.orchestration.report.figures import meta_of
from dpsweep.orchestration.report.html import named, table
from dpsweep.orchestration.report.plot import Style
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial
from dpsweep.workers.evaluation.rates import recalls

_MOST_CLASSES = 20
"""Most classes of a confusion matrix in the report; larger ones are only in results.json."""


def settings_table(found: Findings, style: Style) -> str:
    """Return one row per setting: every metric of `MetricTable.SETTINGS`, averaged over its seeds, with known
    intervals.
    """
    settings, front = found.settings, best_trade_offs(found.settings, found.worst_group, found.useless)
    shown = columns(MetricTable.SETTINGS, found.worst_group.name, found.trials)
    rows = []
    for setting in settings:
        beyond = ", beyond noise" if setting in found.front else ""
        mark = f'<span class="front">Pareto front{beyond}</span>' if setting in front else ""
        mark += f"<br><small>{escape(found.useless[setting.name])}</small>" if setting.name in found.useless else ""
        numbers = (_over_seeds(metric, setting) + _interval(found, setting, metric) for metric in shown)
        rows.append((named(setting, style) + mark, str(len(setting.trials)), _composed(setting), *numbers))
    heads = ("Seeds", "Composed ε", *(metric.heading for metric in shown))
    marks = [meta_of(setting) for setting in settings]
    return "<h3>Settings, averaged over seeds</h3>" + table(("Setting",), heads, rows, marks=marks)


def _interval(found: Findings, setting: Setting, metric: Metric) -> str:
    """Return the 95% interval to show below a number; "" if none is known."""
    is_known = metric.measure is not None and setting.over_seeds(metric.value) is not None
    interval = found.evidence.interval(setting, metric.name) if is_known else None
    words = by_selection(metric, setting.mean(metric.value), interval)
    return (f"<br><small>{words}</small>" if words else "") + _range(interval, metric.format)


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
            rows.append((named(one, style), named(other, style), *map(_verdict, differences)))
    heads = (
        f"{of.heading.removesuffix(', points')}{', points' * of.format.is_share}" for of in map(metric, found.headline)
    )
    return "<h3>What can be told apart</h3>" + table(("Setting", "against"), heads, rows) if rows else ""


def _verdict(found: Difference) -> str:
    shown = metric(found.metric).format
    if found.interval is None:
        return MISSING
    return f"{found.verdict}<br><small>{difference_between(found.interval, shown)}</small>"


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
        (named(setting, style), *(_over_seeds(metric, setting) + _interval(found, setting, metric) for metric in shown))
        for setting in found.settings
    ]
    marks = [meta_of(setting) for setting in found.settings]
    heads = (metric.heading for metric in shown)
    return "<h3>Rates and gaps between groups, on test data</h3>" + table(("Setting",), heads, rows, marks=marks)


def by_group_table(found: Findings, style: Style) -> str:
    """Return one row per setting and group: every metric of `GROUP_METRICS` that any of them has; "" without groups."""
    names = group_names([trial for setting in found.settings for trial in setting.trials])
    shown = [
        each
        for each in GROUP_METRICS
        if any(setting.over_seeds(group_value(name, each.value)) for setting in found.settings for name in names)
    ]
    if not names:
        return ""
    pairs = list(itertools.product(names, found.settings))
    rows = [
        (escape(name), named(setting, style), *(_of_group(found, setting, name, each) for each in shown))
        for name, setting in pairs
    ]
    marks, heads = [meta_of(setting) for _, setting in pairs], (each.heading for each in shown)
    return "<h3>Every group under every setting</h3>" + table(("Group", "Setting"), heads, rows, marks=marks)


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
                rows.append((name, named(setting, style), *cells))
                marks.append(meta_of(setting))
    if not rows:
        return ""
    heads = ("Recall", *(f"as {name}" for name in names[max(names)]))
    return "<h3>What each class is taken for, on test data</h3>" + table(("Class", "Setting"), heads, rows, marks=marks)


def parts_table(settings: Sequence[Setting], style: Style) -> str:
    """Return scores of every label, target or class, by setting, averaged over its seeds.

    Returns "" if there are none, and for more than `_MOST_CLASSES` of them.
    """
    trials = [trial for setting in settings for trial in setting.trials if trial.quality]
    every = [(name, each) for trial in trials if trial.quality for name, each in trial.quality.parts.items()]
    names, heads = dict.fromkeys(name for name, _ in every), dict.fromkeys(head for _, each in every for head in each)
    if not names or len(names) > _MOST_CLASSES:
        return ""

    def number_of(name: str, head: str) -> Callable[[PublishedTrial], float | None]:
        return lambda trial: trial.quality.parts.get(name, {}).get(head) if trial.quality else None

    rows, marks = [], []
    for name, setting in itertools.product(names, settings):
        found = [setting.over_seeds(number_of(name, head)) for head in heads]
        cells = (CORRELATION.over_seeds(each) if each else MISSING for each in found)
        rows.append((escape(name), named(setting, style), *cells))
        marks.append(meta_of(setting))
    words, numbers = ("Label, target or class", "Setting"), (head.replace("_", " ") for head in heads)
    return "<h3>Every label, target or class, on test data</h3>" + table(words, numbers, rows, marks=marks)


def _composed(setting: Setting) -> str:
    """Composed epsilon of all seeds that the row averages over."""
    cost, _, kind = setting.composed_cost.partition(" ")
    return f"{cost}<br><small class='claim'>{kind}</small>" if kind else cost


def _over_seeds(metric: Metric, setting: Setting) -> str:
    """Return the metric over the seeds of the setting, after the groups that it belongs to in small print."""
    groups, text = ", ".join(whose(metric, setting)), shown_over_seeds(metric, setting)
    return f'<small class="whose">{escape(groups)}</small>{text.removeprefix(f"{groups}:")}' if groups else text


def group_sizes_table(settings: Sequence[Setting], style: Style) -> str:
    """Return the epsilon of any k records together, by setting; "" if no trial has it for k > 1."""
    sizes = sorted({k for setting in settings for trial in setting.trials if trial.privacy
                    for k in trial.privacy.group_epsilons})  # fmt: skip
    if not any(k > 1 for k in sizes):
        return ""

    def cost(k: int) -> Callable[[PublishedTrial], float | None]:
        return lambda trial: trial.privacy.group_epsilons.get(k) if trial.privacy else None

    rows = []
    for setting in (setting for setting in settings if not setting.is_baseline):
        found = [[cost(k)(trial) for trial in setting.trials] for k in sizes]
        worst = [max((value for value in values if value is not None), default=None) for values in found]
        cells = (_with_risk(number(value), setting, k) for value, k in zip(worst, sizes, strict=True))
        rows.append((named(setting, style), *cells))
    heads = (f"k = {k}" for k in sizes)
    return "<h3>Groups of records</h3>" + table(("Worst-case ε for any k records together",), heads, rows)


def _with_risk(shown: str, setting: Setting, size: int) -> str:
    """Return an epsilon; below it, the bound on the advantage of attacks on a group of ``size``, the largest over
    seeds.
    """
    found = [trial.privacy.risks[size] for trial in setting.trials if trial.privacy and size in trial.privacy.risks]
    worst = max((risk.advantage.upper for risk in found), default=None)
    return shown if worst is None else f"{shown}<br><small>advantage {at_most_share(worst)}</small>"


def trials_table(trials: Sequence[PublishedTrial], worst_group: str) -> str:
    """Return one row per trial: status, claim, every metric of `metrics.MetricTable.TRIALS`, error and notes.

    worst_group: as in `metrics.columns`.
    """
    shown = columns(MetricTable.TRIALS, worst_group, trials)
    if not trials:
        return "<p>None.</p>"
    words, numbers = ("Trial", "Status", "Accountant"), (metric.heading for metric in shown)
    rows, looks = [_trial_row(trial, shown) for trial in trials], [trial.state.word for trial in trials]
    return table(words, numbers, rows, remarks=("Remarks",), looks=looks)


def _trial_row(trial: PublishedTrial, shown: Sequence[Metric]) -> list[str]:
    privacy = trial.privacy
    seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
    remarks = [*([trial.error] if trial.error else []), *trial.notes]
    return [
        f"{escape(setting_name(trial) + seed)}<br><small>{escape(trial.key)}</small>",
        trial.state.word,
        _claim(privacy) if privacy and privacy.is_private else MISSING,
        *(metric.format.one(metric.value(trial)) for metric in shown),
        escape("; ".join(remarks)),
    ]


def _claim(privacy: PublishedPrivacy) -> str:
    kind = privacy.kind.replace("_", " ")
    why = f": {', '.join(privacy.reasons)}" if privacy.reasons else ""
    claim = f"{kind}{per_unit(privacy.unit)}, {escape(privacy.holds_for)}{why}"
    return f"{escape(privacy.accountant)}<br><small class='claim'>{claim}</small>"
