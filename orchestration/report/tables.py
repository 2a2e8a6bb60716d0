"""The tables of the report, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from orchestration.comparison.settings import (
    Setting,
    accuracy,
    accuracy_change,
    best_trade_offs,
    epsilon,
    median_epsilon,
    setting_name,
    unequal_cost,
    worst_group,
    worst_group_accuracy,
)
from orchestration.records.published import EstimateQuality, ReportPrivacy, ReportTrial
from orchestration.report.html import Cell, named, table
from orchestration.report.prose import MISSING, number, percent, percent_spread, points_spread, seconds
from orchestration.report.style import Style


def settings_table(settings: Sequence[Setting], style: Style) -> str:
    """One row per setting: what it costs, what it reaches, whom it serves worst."""
    front = best_trade_offs(settings)
    heads = (
        ("Setting", ""), ("Seeds", "n"), ("Worst-case ε", "n"), ("Median εᵢ", "n"), ("Test accuracy", "n"),
        ("Change, points", "n"), ("Worst-served group", "n"), ("Unequal cost, points", "n"),
    )  # fmt: skip
    rows = []
    for setting in settings:
        mark = '<span class="front">Pareto front</span>' if setting in front else ""
        cost, median, gap = map(setting.over_seeds, (epsilon, median_epsilon, unequal_cost))
        rows.append(
            [
                (named(setting, style) + mark, ""),
                (str(len(setting.trials)), "n"),
                (number(cost.mean) if cost else "∞" if setting.is_baseline else MISSING, "n"),
                (number(median.mean if median else None), "n"),
                (percent_spread(setting.over_seeds(accuracy)), "n"),
                (points_spread(setting.over_seeds(accuracy_change)), "n"),
                (_worst_served(setting), "n"),
                (MISSING if gap is None else f"{100 * gap.mean:.1f}", "n"),
            ]
        )
    return "<h3>Settings, averaged over seeds</h3>" + table(heads, rows)


def _worst_served(setting: Setting) -> str:
    names = dict.fromkeys(group.name for trial in setting.trials if (group := worst_group(trial)))
    who = f"<small>{escape(', '.join(names))}</small> " if names else ""
    return who + percent_spread(setting.over_seeds(worst_group_accuracy))


def group_sizes_table(settings: Sequence[Setting], style: Style) -> str:
    """Epsilon of any k records together, by setting; nothing when no trial has it for more than one record."""
    sizes = sorted({k for setting in settings for trial in setting.trials if trial.privacy
                    for k in trial.privacy.group_epsilons})  # fmt: skip
    if not any(k > 1 for k in sizes):
        return ""

    def cost(k: int) -> Callable[[ReportTrial], float | None]:
        return lambda trial: trial.privacy.group_epsilons.get(k) if trial.privacy else None

    rows = []
    for setting in (setting for setting in settings if not setting.is_baseline):
        found = [[cost(k)(trial) for trial in setting.trials] for k in sizes]
        worst = [max((value for value in values if value is not None), default=None) for values in found]
        rows.append([(named(setting, style), ""), *((number(value), "n") for value in worst)])
    heads = [("Worst-case ε for any k records together", ""), *((f"k = {k}", "n") for k in sizes)]
    return "<h3>Groups of records</h3>" + table(heads, rows)


def estimates_table(settings: Sequence[Setting], style: Style) -> str:
    """How well estimated epsilon_i agree with exact ones, by setting; nothing where no trial tracked examples."""

    def quality(value: Callable[[EstimateQuality], float | None]) -> Callable[[ReportTrial], float | None]:
        return lambda trial: (
            value(trial.individuals.estimates) if trial.individuals and trial.individuals.estimates else None
        )

    rows = []
    for setting in settings:
        examples = setting.over_seeds(quality(lambda found: found.examples))
        if examples is None:
            continue
        r = setting.over_seeds(quality(lambda found: found.correlation))
        mean = setting.over_seeds(quality(lambda found: found.mean_error))
        largest = setting.over_seeds(quality(lambda found: found.largest_error))
        rows.append(
            [
                (named(setting, style), ""),
                (f"{examples.mean * examples.count:.0f}", "n"),
                (f"{r.mean:.4f}" if r else MISSING, "n"),
                (number(mean.mean if mean else None), "n"),
                (number(largest.high if largest else None), "n"),
            ]
        )
    heads = (
        ("εᵢ as estimated against εᵢ from norms of every step", ""), ("Examples tracked", "n"), ("Pearson’s r", "n"),
        ("Mean error", "n"), ("Largest error", "n"),
    )  # fmt: skip
    return "<h3>How good the estimates are</h3>" + table(heads, rows) if rows else ""


def trials_table(trials: Sequence[ReportTrial]) -> str:
    """Every trial, with its status and whatever it has to say."""
    heads = (
        ("Trial", ""), ("Status", ""), ("Worst-case ε", "n"), ("Accountant", ""), ("Initial σ", "n"),
        ("Accuracy", "n"), ("Loss", "n"), ("Worst group", "n"), ("Time", "n"), ("Remarks", ""),
    )  # fmt: skip
    rows = [_trial_row(trial) for trial in trials]
    return table(heads, rows, [trial.status for trial in trials]) if rows else "<p>None.</p>"


def _trial_row(trial: ReportTrial) -> list[Cell]:
    privacy, quality = trial.privacy, trial.quality
    seed = f" · seed {trial.labels['seed']}" if "seed" in trial.labels else ""
    remarks = [*([trial.error] if trial.error else []), *trial.notes]
    return [
        (f"{escape(setting_name(trial) + seed)}<br><small>{escape(trial.key)}</small>", ""),
        (trial.status, ""),
        (number(privacy.epsilon if privacy else None), "n"),
        (_claim(privacy) if privacy and privacy.is_private else MISSING, ""),
        (number(_initial_noise(trial), 4), "n"),
        (percent(quality.accuracy if quality else None), "n"),
        (number(quality.loss if quality else None), "n"),
        (percent(worst_group_accuracy(trial)), "n"),
        (seconds(trial.wall_seconds), "n"),
        (escape("; ".join(remarks)), ""),
    ]


def _initial_noise(trial: ReportTrial) -> float | None:
    return trial.history[0].noise_multiplier if trial.history and not trial.is_baseline else None


def _claim(privacy: ReportPrivacy) -> str:
    kind = privacy.kind.replace("_", " ")
    return f"{escape(privacy.accountant)}<br><small class='claim'>{kind}, {escape(privacy.adjacency)}</small>"
