"""Draw accuracy, loss, epsilon, noise and clipping over epochs, and epsilon over group sizes. Pure."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.one_run import total_rho
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.comparison.group_sizes import VADHAN, GroupComparison, compare_groups, linear_heading
from dpsweep.orchestration.comparison.rate_metrics import spoken
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.comparison.statistics import spread
from dpsweep.orchestration.records.published import PublishedTrial
from dpsweep.orchestration.report.figures import Scene, apart, blank, label_end, line, meta_of, plain_text
from dpsweep.orchestration.report.plot import Plot
from dpsweep.orchestration.report.style import PALETTE

_OVERLAID: Final = ("pld", "gdp", "rdp", "rdp-classic", "zcdp", "zcdp-sampled", "strong")
"""Accountants that are compared over epochs; those of the package dp-accounting are too slow for a page."""


def accuracy_over_epochs(scene: Scene) -> Plot:
    """Return Accuracy, or the main score, on test data after each epoch: one line per setting, for its first seed."""
    return _over_epochs(scene, f"test_{scene.main.name}", f"{spoken(scene.main)} on test data", scene.main_ticks)


def loss_over_epochs(scene: Scene) -> Plot:
    """Return the mean loss on test data after each epoch: one line per setting, for its first seed."""
    return _over_epochs(scene, "test_loss", "loss on test data", ".3~g")


def epsilon_over_epochs(scene: Scene) -> Plot:
    """Return worst-case epsilon of the steps so far (paper C, Figure 2): one line per setting, for its first seed."""
    return _over_epochs(scene, "epsilon", "worst-case ε so far", ".3~g")


def accountants_over_epochs(scene: Scene) -> dict[str, Plot | None]:
    """Return the epsilon over epochs by every accountant that covers the run (paper C, Figure 2); estimates are dotted.

    One figure for each schedule, from the first seed of its first setting.
    """
    drawn: dict[str, Plot | None] = {}
    for setting in scene.settings:
        found = None if setting.is_baseline or setting.schedule in drawn else _last_trace(setting.trials[0])
        history = setting.trials[0].history
        if found is not None and history:
            trace, delta = found
            places = sorted({round(share * (len(history) - 1)) for share in (0.0, 0.15, 0.4, 0.7, 1.0)})
            steps = tuple(min(history[place].step, trace.steps) for place in places)
            epochs = [history[place].epoch for place in places]
            drawn[setting.schedule] = _accountants(_by_accountant(trace, delta, steps), epochs, delta)
    return drawn


_PLOTTED: Final = 240.0
"""Approximate pixels between the lowest and the highest point of a figure."""


def _accountants(costs: Mapping[str, tuple[PrivacyEstimate, ...]], epochs: list[int], delta: float) -> Plot | None:
    figure = blank(height=360)
    finite = {name: found for name, found in costs.items() if all(0.0 < each.epsilon < math.inf for each in found)}
    ends = [math.log10(estimates[-1].epsilon) for estimates in finite.values()]
    span = max(ends, default=0.0) - min((math.log10(each[0].epsilon) for each in finite.values()), default=0.0)
    raised = apart([end * _PLOTTED / max(span, 1e-9) for end in ends])
    for place, (name, estimates) in enumerate(finite.items()):
        is_estimate = any(each.kind == "estimate" for each in estimates)
        said, colour = f"{name}{' (estimate)' if is_estimate else ''}", PALETTE[place % len(PALETTE)]
        figure.add_scatter(
            x=epochs,
            y=[each.epsilon for each in estimates],
            mode="lines+markers",
            line={"dash": "dot" if is_estimate else "solid", "width": 2, "color": colour},
            name=said,
            hovertemplate=f"<b>{said}</b><br>epoch %{{x}}: ε = %{{y:.4~g}}<extra></extra>",
        )
        label_end(figure, name, epochs[-1], ends[place], colour, raised[place])
    figure.update_xaxes(title_text="epoch", range=[-0.5, epochs[-1] * 1.3 + 0.5])
    figure.update_yaxes(title_text=f"ε at δ = {delta:g} (log scale)", type="log", tickformat=".3~g", dtick="D2")
    return figure if figure.data else None


@functools.lru_cache(maxsize=64)
def _by_accountant(trace: Trace, delta: float, steps: tuple[int, ...]) -> dict[str, tuple[PrivacyEstimate, ...]]:
    """Worst-case costs of the first ``steps``, by each accountant that covers them."""
    found = {}
    for name in _OVERLAID:
        with contextlib.suppress(UnsupportedMechanism):
            found[name] = tuple(account(trace.until(step), delta, name) for step in steps)
    return found


def rho_over_epochs(scene: Scene) -> Plot:
    """Return zCDP rho of the steps so far (paper C), for runs without sampling: one line per setting, for its first
    seed.
    """
    figure = blank(height=360)
    for setting in scene.settings:
        found, history = _last_trace(setting.trials[0]), setting.trials[0].history
        if found is None or setting.is_baseline:
            continue
        with contextlib.suppress(UnsupportedMechanism):
            rhos = [total_rho(found[0].until(min(epoch.step, found[0].steps))) for epoch in history]
            line(figure, setting, scene.style, history, rhos, setting.name)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="ρ so far", tickformat=".3~g", rangemode="tozero")
    return figure


def noise(scene: Scene) -> Plot:
    """Return the noise multiplier per epoch: one line per setting, for its first seed."""
    figure = blank(height=360)
    for setting in scene.settings:
        history = setting.trials[0].history
        if setting.is_baseline or not history:
            continue
        line(figure, setting, scene.style, history, [epoch.noise_multiplier for epoch in history], setting.name)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="noise multiplier σ", rangemode="tozero")
    return figure


def clipping_bounds(scene: Scene) -> Plot:
    """Return clipping bounds per epoch: one line per setting, or per group if the method has a bound per group.

    Bounds per group follow noisy counts and fluctuate; the largest and the smallest are drawn bold and labelled.
    """
    settings, style = scene.settings, scene.style
    figure = blank(height=360)
    for setting in settings:
        history = setting.trials[0].history
        bounds = {
            name: [epoch.clipping_bounds.get(name) for epoch in history]
            for name in dict.fromkeys(name for epoch in history for name in epoch.clipping_bounds)
        }
        means = {name: found.mean for name, values in bounds.items() if (found := spread(values))}
        extremes = {max(means, key=means.__getitem__), min(means, key=means.__getitem__)} if means else set()
        for name, values in bounds.items():
            whose = setting.name if len(bounds) == 1 else f"{setting.name}: {name}"
            bold = name in extremes
            line(
                figure,
                setting,
                style,
                history,
                values,
                whose,
                width=2.0 if bold else 1.0,
                opacity=1.0 if bold else 0.25,
            )
            if bold and len(bounds) > 1:
                last = next(value for value in reversed(values) if value is not None)
                label_end(figure, name, history[-1].epoch, last, style.colour(setting))
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="clipping bound C", rangemode="tozero")
    return figure


def departures(scene: Scene) -> Plot:
    """Return the share of each group that has spent its privacy budget under a filter, per epoch, for the first
    seed.
    """
    figure = blank(height=360)
    for setting in scene.settings:
        trial = setting.trials[0]
        ends = [group.left[-1] / group.examples for group in trial.departures if group.left]
        for group in trial.departures:
            values, whose = [left / group.examples for left in group.left], f"{setting.name}: {group.name}"
            line(figure, setting, scene.style, trial.history, values, whose)
            if values and values[-1] in (min(ends), max(ends)):
                label_end(figure, group.name, trial.history[-1].epoch, values[-1], scene.style.colour(setting))
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="share that has left", tickformat=".0%", rangemode="tozero")
    return figure


def _over_epochs(scene: Scene, name: str, title: str, ticks: str) -> Plot:
    figure = blank(height=360)
    for setting in scene.settings:
        history = setting.trials[0].history
        values = [epoch.metrics.get(name) for epoch in history]
        if any(value is not None and math.isfinite(value) for value in values):
            line(figure, setting, scene.style, history, values, setting.name)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text=title, tickformat=ticks, rangemode="tozero")
    return figure


def epsilon_over_group_size(scene: Scene) -> Plot | None:
    """Return the epsilon of any k records together (paper B, Figure 1); None if fewer than two sizes were accounted.

    Solid: tight. Dotted: Vadhan's conversion. Dashed: k times the epsilon of one record.
    """
    figure = blank(height=430)
    for setting in scene.settings:
        trial = setting.trials[0]
        found = dict(sorted(trial.privacy.group_epsilons.items())) if trial.privacy else {}
        if setting.is_baseline or len(found) < 2:
            continue
        _add(figure, scene, setting, found, "solid", "tight")
        compared = _compared(trial, tuple(found))
        is_bound = all(each.linear_is_bound for each in compared.values())
        _add(figure, scene, setting, {k: each.vadhan for k, each in compared.items()}, "dot", VADHAN)
        _add(figure, scene, setting, {k: each.linear for k, each in compared.items()}, "dash", linear_heading(is_bound))
    ticks = sorted({size for trace in figure.data for size in trace["x"]})
    figure.update_xaxes(title_text="records together, k", type="log", tickvals=ticks, ticktext=list(map(str, ticks)))
    figure.update_yaxes(title_text="worst-case ε (log scale)", type="log", tickformat=".3~g", dtick="D2")
    return figure if figure.data else None


def _compared(trial: PublishedTrial, sizes: tuple[int, ...]) -> dict[int, GroupComparison]:
    """Comparisons by group size; empty if the trace is unknown."""
    found = _last_trace(trial)
    return _of_trace(*found, sizes) if found else {}


def _last_trace(trial: PublishedTrial) -> tuple[Trace, float] | None:
    """Trace of the trial's last start, and its delta; None if it is unknown or the trial is a private selection."""
    traces = [each.trace for each in trial.attempts if each.trace.segments and each.trace.selection is None]
    return (traces[-1], trial.privacy.delta) if traces and trial.privacy else None


@functools.lru_cache(maxsize=256)
def _of_trace(trace: Trace, delta: float, sizes: tuple[int, ...]) -> dict[int, GroupComparison]:
    return compare_groups(trace, delta, sizes)


def _add(
    figure: Plot,
    scene: Scene,
    setting: Setting,
    epsilons: Mapping[int, float],
    dash: str,
    what: str,
) -> None:
    finite = [epsilon if math.isfinite(epsilon) else None for epsilon in epsilons.values()]
    if not any(epsilon is not None for epsilon in finite):
        return
    figure.add_scatter(
        x=list(epsilons),
        y=finite,
        mode="lines+markers" if dash == "solid" else "lines",
        line={"color": scene.style.colour(setting), "dash": dash, "width": 2 if dash == "solid" else 1},
        marker={"color": scene.style.colour(setting), "symbol": scene.style.symbol(setting), "size": 8},
        text=[plain_text(f"{setting.name}, {what}")] * len(epsilons),
        hovertemplate="<b>%{text}</b><br>k = %{x}: ε = %{y:.4~g}<extra></extra>",
        name=f"{setting.name}, {what}",
        meta=meta_of(setting),
    )
