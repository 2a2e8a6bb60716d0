"""Draw accuracy, loss, epsilon, noise and clipping over epochs, and epsilon over group sizes. Pure.

Also a metric against a hyperparameter that the sweep varies or tunes, one line per method.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.methods import total_rho
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.comparison.findings import COMPARED
from dpsweep.orchestration.comparison.formats import NUMBER, Format
from dpsweep.orchestration.comparison.group_references import VADHAN, compare_groups, linear_heading
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.parameters import parameter_in_words
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS, group_metric, spoken, spoken_worst
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.comparison.statistics import spread
from dpsweep.orchestration.report.figures import (
    FigureAxis,
    Scene,
    add_dots,
    add_trace,
    apart,
    blank,
    is_number,
    label_end,
    line,
    look_of,
    meta_of,
    numeric_parameters,
    total_axis,
    whiskers,
    without_markup,
    worst_axis,
)
from dpsweep.orchestration.report.plot import PALETTE, Plot
from dpsweep.orchestration.store.published import PublishedTrial, PublishedTuning

_OVERLAID: Final = ("pld", "gdp", "rdp", "rdp-classic", "zcdp", "zcdp-sampled", "strong")
"""Accountants that are compared over epochs; those of the package dp-accounting are too slow for a page."""


def accuracy_over_epochs(scene: Scene) -> Plot:
    """Return accuracy, or the main score, on test data after each epoch."""
    title = f"{spoken(scene.main)} on test data"
    return metric_over_epochs(f"test_{scene.main.name}", title, scene.main.format)(scene)


def metric_over_epochs(name: str, title: str, shown: Format = NUMBER) -> Callable[[Scene], Plot]:
    """Return a function that draws a metric after each epoch, of settings for which any is finite."""

    def values(trial: PublishedTrial) -> list[float | None]:
        found = [epoch.metrics.get(name) for epoch in trial.history]
        return found if any(value is not None and math.isfinite(value) for value in found) else []

    return lambda scene: _over_epochs(scene, title, values, shown)


def epsilon_over_epochs(scene: Scene) -> Plot:
    """Return the worst-case epsilon of the steps so far, without epochs that only have the bound of a later one.

    They would look like epochs that cost nothing (`dpsweep.accounting.calibration.so_far`).
    """
    figure = metric_over_epochs("epsilon", "worst-case ε so far")(scene)
    for trace in figure.data:
        kept = [at for at, (cost, later) in enumerate(itertools.pairwise([*trace["y"], None])) if cost != later]
        if len(kept) > 1:
            trace |= {axis: [trace[axis][at] for at in kept] for axis in "xy"}
    return figure


def accountants_over_epochs(scene: Scene) -> dict[str, Plot | None]:
    """Return the epsilon over epochs by every accountant that covers the run (paper C, Figure 2); estimates are dotted.

    One figure for each schedule, from the first seed of its first setting.
    """
    drawn: dict[str, Plot | None] = {}
    for setting in scene.settings:
        found = None if setting.is_baseline or setting.schedule in drawn else _last_trace(setting.first_seed)
        history = setting.first_seed.history
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
    """Return zCDP rho of the steps so far (paper C), for runs without sampling."""

    def rhos(trial: PublishedTrial) -> list[float]:
        found = None if trial.is_baseline else _last_trace(trial)
        with contextlib.suppress(UnsupportedMechanism):
            if found is not None:
                return [total_rho(found[0].until(min(epoch.step, found[0].steps))) for epoch in trial.history]
        return []

    return _over_epochs(scene, "ρ so far", rhos)


def noise(scene: Scene) -> Plot:
    """Return the noise multiplier per epoch."""

    def multipliers(trial: PublishedTrial) -> list[float]:
        return [] if trial.is_baseline else [epoch.noise_multiplier for epoch in trial.history]

    return _over_epochs(scene, "noise multiplier σ", multipliers)


def clipping_bounds(scene: Scene) -> Plot:
    """Return clipping bounds per epoch: one line per setting, or per group if the method has a bound per group.

    Bounds per group follow noisy counts and fluctuate; the largest and the smallest are drawn bold and labelled.
    """
    settings, style = scene.settings, scene.style
    figure = blank(height=360)
    for setting in settings:
        history = setting.first_seed.history
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
        trial = setting.first_seed
        ends = [group.left[-1] / group.examples for group in trial.departures if group.left]
        for group in trial.departures:
            values, whose = [left / group.examples for left in group.left], f"{setting.name}: {group.name}"
            line(figure, setting, scene.style, trial.history, values, whose)
            if values and values[-1] in (min(ends), max(ends)):
                label_end(figure, group.name, trial.history[-1].epoch, values[-1], scene.style.colour(setting))
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text="share that has left", tickformat=".0%", rangemode="tozero")
    return figure


def _over_epochs(
    scene: Scene, title: str, values: Callable[[PublishedTrial], Sequence[float | None]], shown: Format = NUMBER
) -> Plot:
    """Return one line for each setting whose first seed has ``values``, one after each epoch."""
    figure = blank(height=360)
    for setting in scene.settings:
        trial = setting.first_seed
        if found := values(trial):
            line(figure, setting, scene.style, trial.history, found, setting.name)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text=title, rangemode="tozero", **look_of(shown))
    return figure


def epsilon_over_group_size(scene: Scene) -> Plot | None:
    """Return the epsilon of any k records together (paper B, Figure 1); None if fewer than two sizes were accounted.

    Solid: tight. Dotted: Vadhan's conversion. Dashed: k times the epsilon of one record.
    """
    figure = blank(height=430)
    for setting in scene.settings:
        trial = setting.first_seed
        found = dict(sorted(trial.privacy.group_epsilons.items())) if trial.privacy else {}
        if setting.is_baseline or len(found) < 2:
            continue
        _add(figure, scene, setting, found, "solid", "tight")
        known = _last_trace(trial)
        compared = _of_trace(*known, tuple(found)) if known else {}
        is_bound = all(each.linear_is_bound for each in compared.values())
        _add(figure, scene, setting, {k: each.vadhan for k, each in compared.items()}, "dot", VADHAN)
        _add(figure, scene, setting, {k: each.linear for k, each in compared.items()}, "dash", linear_heading(is_bound))
    ticks = sorted({size for trace in figure.data for size in trace["x"]})
    figure.update_xaxes(title_text="records together, k", type="log", tickvals=ticks, ticktext=list(map(str, ticks)))
    figure.update_yaxes(title_text="worst-case ε (log scale)", type="log", tickformat=".3~g", dtick="D2")
    return figure if figure.data else None


def _last_trace(trial: PublishedTrial) -> tuple[Trace, float] | None:
    """Return the trace of the trial's last start, and its delta; None if unknown, and for a private selection."""
    traces = [each.trace for each in trial.attempts if each.trace.segments and each.trace.selection is None]
    return (traces[-1], trial.privacy.delta) if traces and trial.privacy else None


_of_trace = functools.lru_cache(maxsize=256)(compare_groups)


def _add(figure: Plot, scene: Scene, setting: Setting, epsilons: Mapping[int, float], dash: str, what: str) -> None:
    finite = [epsilon if math.isfinite(epsilon) else None for epsilon in epsilons.values()]
    if not any(epsilon is not None for epsilon in finite):
        return
    add_trace(
        figure,
        setting,
        "k = %{x}: ε = %{y:.4~g}",
        f"{setting.name}, {what}",
        x=list(epsilons),
        y=finite,
        mode="lines+markers" if dash == "solid" else "lines",
        line={"color": scene.style.colour(setting), "dash": dash, "width": 2 if dash == "solid" else 1},
        marker=scene.style.marker(setting, 8),
    )


_LABEL_WIDTH: Final = 0.08
"""Share of an axis that a tick label takes."""


def tuning_curves(scene: Scene) -> dict[str, Plot]:
    """Return the accuracy and worst-group metric against each hyperparameter that has at least two values under one
    method.
    """
    drawn: dict[str, Plot] = {}
    for name in _varied(scene):
        for up in (total_axis(scene, ""), worst_axis(scene)):
            figure = _curve(scene, name, up)
            if figure.data:
                drawn[f"{up.title} against {parameter_in_words(name)}"] = figure
    return drawn


def _varied(scene: Scene) -> list[str]:
    values: dict[tuple[object, ...], set[float]] = {}
    for setting in scene.settings:
        if not setting.is_baseline:
            for name, value in numeric_parameters(setting).items():
                values.setdefault((name, *_line_of(setting, name)), set()).add(value)
    return list(dict.fromkeys(str(name) for (name, *_), found in values.items() if len(found) > 1))


def _line_of(setting: Setting, name: str) -> tuple[object, ...]:
    """Return what the settings of one line have in common: all that is compared, besides the parameter ``name``."""
    return (*setting.method, *(setting.labels.get(each) for each in COMPARED if each != name.partition(".")[0]))


def _curve(scene: Scene, name: str, up: FigureAxis) -> Plot:
    figure = blank(height=320)
    methods: dict[tuple[object, ...], list[tuple[float, Setting]]] = {}
    for setting in scene.settings:
        known = numeric_parameters(setting)
        if not setting.is_baseline and name in known:
            methods.setdefault(_line_of(setting, name), []).append((known[name], setting))
    for members in methods.values():
        points = [
            (at, found, setting)
            for at, setting in sorted(members, key=lambda pair: pair[0])
            if (found := setting.over_seeds(up.value))
        ]
        if not points:
            continue
        first = points[0][2]
        figure.add_scatter(
            x=[at for at, *_ in points],
            y=[found.mean for _, found, _ in points],
            error_y=whiskers(
                [found.high - found.mean for _, found, _ in points],
                [found.mean - found.low for _, found, _ in points],
            ),
            mode="lines+markers",
            line={"color": scene.style.colour(first), "dash": scene.style.dash(first), "width": 2},
            marker=scene.style.marker(first, 9),
            text=[without_markup(setting.name) for *_, setting in points],
            hovertemplate=(
                f"<b>%{{text}}</b><br>{without_markup(parameter_in_words(name))} %{{x}}: %{{y}}<extra></extra>"
            ),
            name=" · ".join(first.method),
            meta=meta_of(first),
        )
    _label_values(figure, name)
    figure.update_yaxes(title_text=up.title, **up.look)
    return figure


def searched_curves(scene: Scene) -> dict[str, Plot]:
    """Return the score by which tuning selects against each tuned number: every setting's best per value."""
    tuned = [(setting, tuning) for setting in scene.settings if (tuning := setting.first_seed.tuning) is not None]
    places = dict.fromkeys(place for _, found in tuned for values, _ in found.tried for place in values)
    drawn = {}
    for place in places:
        figure = blank(height=320)
        for setting, found in tuned:
            _add_search(figure, scene, setting, found, place)
        if figure.data:
            score = tuned[0][1].by
            by = _score_in_words(score)
            _label_values(figure, place)
            figure.update_yaxes(title_text=f"{by}, as tuned", **look_of(metric(score).format))
            drawn[f"{by}, as tuned, against {parameter_in_words(place)}"] = figure
    return drawn


def _score_in_words(score: str) -> str:
    worst = metric(score)
    if worst in WORST_GROUP_METRICS.values():
        return f"{spoken_worst(worst)} of the worst-served group"
    return spoken(group_metric(score))


def _add_search(figure: Plot, scene: Scene, setting: Setting, found: PublishedTuning, place: str) -> None:
    """Draw a faint dot per candidate, a line through the best at each value, and a large marker at the chosen value."""
    known = [
        (float(at), score) for values, score in found.tried if score is not None and is_number(at := values.get(place))
    ]
    best = min if metric(found.by).better == "lower" else max
    line = {at: best(score for other, score in known if other == at) for at, _ in sorted(known)}
    if len(line) < 2:
        return
    chosen, style = found.chosen.get(place), scene.style
    add_dots(figure, setting, style, known)
    add_trace(
        figure,
        setting,
        f"{without_markup(parameter_in_words(place))} %{{x}}: %{{y}}",
        x=list(line),
        y=list(line.values()),
        mode="lines+markers",
        line={"color": style.colour(setting), "dash": style.dash(setting), "width": 2},
        marker={**style.marker(setting, 8), "size": [14 if at == chosen else 8 for at in line]},
    )


def _label_values(figure: Plot, place: str) -> None:
    """Set up the x axis of a swept number: logarithmic if all values are positive, ticks at the values if they fit."""
    values = sorted({float(at) for trace in figure.data for at in trace["x"]})
    scale = "log" if all(at > 0 for at in values) else "linear"
    figure.update_xaxes(title_text=without_markup(parameter_in_words(place)), type=scale, tickformat=".3~g")
    if _are_apart([math.log(at) for at in values] if scale == "log" else values):
        figure.update_xaxes(tickvals=values, ticktext=[f"{at:.3g}" for at in values])
    elif scale == "log":
        figure.update_xaxes(dtick="D2")


def _are_apart(places: Sequence[float]) -> bool:
    """Return whether tick labels at these increasing places do not overlap."""
    return all(b - a >= _LABEL_WIDTH * (places[-1] - places[0]) for a, b in itertools.pairwise(places))
