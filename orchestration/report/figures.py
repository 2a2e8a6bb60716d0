"""Draw the figures of the report. Pure; `dpsweep.orchestration.report.catalogue` lists them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

from dpsweep.orchestration.comparison.formats import Format
from dpsweep.orchestration.comparison.metric_types import GroupMetric, Metric
from dpsweep.orchestration.comparison.parameters import parameter_in_words
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS, group_metric, spoken, spoken_worst
from dpsweep.orchestration.comparison.settings import (
    Setting,
    best_trade_offs,
    group_epsilon,
    group_epsilon_error,
    group_value,
    levels,
)
from dpsweep.orchestration.comparison.values import Value, epsilon, main
from dpsweep.orchestration.report.plot import BAND, FONT, INK, MUTED, RULE, Plot, Style
from dpsweep.orchestration.store.published import PublishedEpoch, PublishedGroup
from dpsweep.workers.tasks import task_called

LEAST_DRAWN: Final = -1.0
"""Smallest score that figures show. R² has no lower end, and a model that diverged would hide all other differences."""


def drawable(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Return the settings that figures show: those without a run below `LEAST_DRAWN`."""
    return tuple(each for each in settings if not any((main(trial) or 0.0) < LEAST_DRAWN for trial in each.trials))


_MARKER: Final = 15
"""Size in pixels of the marker of a setting."""


def look_of(shown: Format) -> dict[str, Any]:
    """Return the look of an axis of numbers in this format. It ends where they do: around numbers that are all equal,
    plotly shows one more in both directions, which for shares is 100 points.
    """
    least, most = shown.possible
    ends = {"clipmin": least if shown.is_share else None, "clipmax": most}  # a loss of one's own may be below 0
    return {"tickformat": ".2~%" if shown.is_share else ".3~g", "autorangeoptions": ends}


@dataclass(frozen=True)
class FigureAxis:
    """A number of a trial as an axis of a figure. look: keys of plotly."""

    title: str
    value: Value
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Scene:
    """The data of every figure: finished settings, their style, and the groups in increasing order of accuracy.

    `worst_group`: the metric of the worst group that settings are compared by. `task`: task of the sweep; for tasks
    other than classification, the main score replaces accuracy. `useless`: names of settings that wear no ring.
    """

    settings: Sequence[Setting]
    style: Style
    groups: Sequence[str]
    worst_group: Metric = WORST_GROUP_METRICS["accuracy"]
    task: str = "classification"
    useless: Container[str] = ()

    @property
    def main(self) -> GroupMetric:
        """Return the main metric of a group: accuracy, or the main score of the task. Figures use its heading."""
        return group_metric(task_called(self.task).main)


_EPSILON_AXIS = FigureAxis("worst-case ε (log scale)", epsilon, {"type": "log", "tickformat": ".3~g", "dtick": "D2"})


def utility_fairness(scene: Scene) -> Plot | None:
    """Return the metric of the worst-served group against accuracy on all test data; None for one group."""
    return _scatter(scene, total_axis(scene), worst_axis(scene)) if len(scene.groups) > 1 else None


def privacy_utility(scene: Scene) -> Plot | None:
    """Return the accuracy against worst-case epsilon; None if all private settings have the same epsilon."""
    return _privacy(scene, total_axis(scene))


def privacy_fairness(scene: Scene) -> Plot | None:
    """Return the metric of the worst-served group against worst-case epsilon; None if all private settings cost the
    same, or if there is one group.
    """
    return _privacy(scene, worst_axis(scene)) if len(scene.groups) > 1 else None


def hyperparameters(settings: Sequence[Setting]) -> dict[str, str]:
    """Return the hover text of each setting, by name: the hyperparameters that differ between settings, one per
    line.
    """
    found = {setting.name: numeric_parameters(setting) for setting in settings}
    values: dict[str, set[float]] = {}
    for own in found.values():
        for name, value in own.items():
            values.setdefault(name, set()).add(value)
    varied = [name for name, several in values.items() if len(several) > 1]
    return {
        setting: "".join(
            f"<br>{without_markup(parameter_in_words(name))}: {own[name]:g}" for name in varied if name in own
        )
        for setting, own in found.items()
    }


def total_axis(scene: Scene, where: str = " on test data") -> FigureAxis:
    """Return the axis of the accuracy on all test examples, or of the main score of the task."""
    return FigureAxis(f"{spoken(scene.main)}{where}", main, look_of(scene.main.format))


def worst_axis(scene: Scene) -> FigureAxis:
    """Return the axis of the worst-group metric that the sweep compares settings by."""
    of = scene.worst_group
    return FigureAxis(f"{spoken_worst(of)} of the worst-served group", of.value, look_of(of.format))


def _privacy(scene: Scene, y: FigureAxis) -> Plot | None:
    """Return ``y`` against worst-case epsilon; None if all private settings have the same epsilon to two digits."""
    private = [setting for setting in scene.settings if not setting.is_baseline]
    if len(levels(private)) < 2:
        return None
    figure = _scatter(replace(scene, settings=private), _EPSILON_AXIS, y)
    baselines = [setting for setting in scene.settings if setting.is_baseline]
    lines = sorted((mean, each.name) for each in baselines if (mean := each.mean(y.value)) is not None)
    for mean, _ in lines:
        figure.add_hline(mean, line={"color": MUTED, "width": 1, "dash": "dot"})
    # the highest above its line and the lowest below: names of lines close together would cover each other
    for (mean, name), anchor in {lines[0]: "top", lines[-1]: "bottom"}.items() if lines else ():
        figure.add_annotation(x=0, xref="paper", xanchor="left", y=mean, yanchor=anchor, text=without_markup(name))
    return figure


def _scatter(scene: Scene, x: FigureAxis, y: FigureAxis) -> Plot:
    """Return one marker per setting at its mean over seeds, whiskers over their range, a faint dot per seed."""
    figure = blank(height=430)
    style, front = scene.style, best_trade_offs(scene.settings, scene.worst_group, scene.useless)
    adapted = hyperparameters(scene.settings)
    for setting in scene.settings:
        across, up = setting.over_seeds(x.value), setting.over_seeds(y.value)
        if across is None or up is None:
            continue
        seeds = [(x.value(trial), y.value(trial)) for trial in setting.trials] if len(setting.trials) > 1 else []
        add_dots(figure, setting, style, seeds)
        ring = {"color": INK, "width": 2.5} if setting in front else {"color": "white", "width": 1}
        add_trace(
            figure,
            setting,
            f"{x.title}: %{{x}}<br>{y.title}: %{{y}}%{{text}}",
            x=[across.mean],
            y=[up.mean],
            error_x=whiskers([across.high - across.mean], [across.mean - across.low], color=style.colour(setting)),
            error_y=whiskers([up.high - up.mean], [up.mean - up.low], color=style.colour(setting)),
            mode="markers",
            cliponaxis=False,
            marker={**style.marker(setting, _MARKER), "line": ring if not setting.is_baseline else {"width": 2.5}},
            text=[adapted.get(setting.name, "")],
        )
    apart = {"ticks": "outside", "ticklen": _MARKER // 2 + 1, "tickcolor": "rgba(0,0,0,0)"}  # a marker at 0 hides none
    figure.update_xaxes(title_text=x.title, **apart, **x.look)
    figure.update_yaxes(title_text=y.title, **apart, **y.look)
    return figure


def add_trace(figure: Plot, setting: Setting, hover: str, name: str = "", **trace: Any) -> None:
    """Add a trace of a setting, which the legend of the page shows and hides.

    name: by default that of the setting. hover: text below it, as plotly's template.
    """
    named = name or setting.name
    template = f"<b>{without_markup(named)}</b><br>{hover}<extra></extra>"
    figure.add_scatter(name=named, hovertemplate=template, meta=meta_of(setting), **trace)


def add_dots(figure: Plot, setting: Setting, style: Style, points: Sequence[tuple[float | None, float | None]]) -> None:
    """Add a faint dot for each single result of a setting, such as of a seed."""
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="markers",
        marker={**style.marker(setting, 6), "opacity": 0.35},
        hoverinfo="skip",
        meta=meta_of(setting),
    )


def group_accuracy(scene: Scene) -> Plot:
    """Return Accuracy, or the main score, of each group on test data."""
    return by_group(scene, lambda name: group_value(name, scene.main.value), look_of(scene.main.format))


def group_change(scene: Scene) -> Plot:
    """Return the change of each group's main score against the baseline; for shares in percentage points."""
    change = group_metric(f"{scene.main.name}_change")
    factor = 100.0 if change.format.is_share else 1.0

    def of_group(group: PublishedGroup) -> float | None:
        found = change.value(group)
        return None if found is None else factor * found

    return by_group(scene, lambda name: group_value(name, of_group), {"tickformat": "~g", "zeroline": True})


def of_groups(name: str) -> Callable[[Scene], Plot]:
    """Return a function that draws a metric of each group, such as its loss or what clipping took off its gradients
    (paper D).
    """
    of = group_metric(name)
    return lambda scene: by_group(scene, lambda group: group_value(group, of.value), look_of(of.format))


def mean_group_epsilon(scene: Scene) -> Plot:
    """Return the mean epsilon_i of each group's training examples; whiskers are at least the standard error."""
    look = {"tickformat": ".3~g", "range": _cost_range(scene.settings)}
    return by_group(scene, group_epsilon, look, group_epsilon_error)


def by_group(
    scene: Scene,
    value: Callable[[str], Value],
    look: Mapping[str, Any],
    error: Callable[[str], Value] = lambda name: lambda trial: None,
) -> Plot:
    """Return one row per group, one marker per setting: the mean over seeds, with whiskers over their range.

    `look`: of the axis. `error`: standard error of a value; whiskers are at least as long as that of the mean over
    seeds. Groups and settings have the same positions in every figure, so that figures can be compared side by side.
    """
    settings, style, names = scene.settings, scene.style, scene.groups
    figure = blank(height=60 + len(names) * max(26, 7 * len(settings)))
    figure.shapes.extend(_band(row) for row in range(0, len(names), 2))
    for place, setting in enumerate(settings):
        offset = 0.8 * ((place + 0.5) / len(settings) - 0.5)
        known = [
            (row, name, found, setting.error_over_seeds(error(name)))
            for row, name in enumerate(names)
            if (found := setting.over_seeds(value(name)))
        ]
        if not known:
            continue
        add_trace(
            figure,
            setting,
            "%{text}: %{x}",
            x=[found.mean for _, _, found, _ in known],
            y=[row + offset for row, *_ in known],
            error_x=whiskers(
                [max(found.high - found.mean, least) for _, _, found, least in known],
                [max(found.mean - found.low, least) for _, _, found, least in known],
                color=style.colour(setting),
            ),
            mode="markers",
            marker=style.marker(setting, 7.5),
            cliponaxis=False,
            text=[without_markup(name) for _, name, *_ in known],
        )
    figure.update_xaxes(side="top", **look)
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[without_markup(name) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
    )
    return figure


def who_pays(scene: Scene) -> Plot:
    """Return the mean epsilon_i of a group against its accuracy or main score: one marker per group and setting."""
    settings, style, names = scene.settings, scene.style, scene.groups
    word = spoken(scene.main)
    figure = blank(height=430)
    named: set[str] = set()
    for setting in settings:
        points = [
            (name, served.mean, paid.mean, setting.error_over_seeds(group_epsilon_error(name)))
            for name in names
            if (served := setting.over_seeds(group_value(name, scene.main.value)))
            and (paid := setting.over_seeds(group_epsilon(name)))
        ]
        dearest = max(points, key=lambda point: point[2], default=None)
        labelled = {dearest[0]} if dearest and setting.clipping not in named else set()
        named.add(setting.clipping)
        add_trace(
            figure,
            setting,
            f"%{{customdata}}: {word} %{{x}}, mean ε %{{y:.3~g}}",
            x=[served for _, served, *_ in points],
            y=[paid for _, _, paid, _ in points],
            error_y={"array": [error for *_, error in points], "thickness": 0.8, "width": 0},
            mode="markers+text",
            marker={**style.marker(setting, 9), "opacity": 0.85},
            text=[without_markup(name) if name in labelled else "" for name, *_ in points],
            textposition="middle right",
            textfont={"size": 11, "color": style.colour(setting)},
            customdata=[without_markup(name) for name, *_ in points],
        )
    figure.update_xaxes(title_text=f"{word} of the group on test data", **look_of(scene.main.format))
    figure.update_yaxes(title_text="mean ε<sub>i</sub> of the group's training examples", range=_cost_range(settings))
    figure.data = [trace for trace in figure.data if trace["x"]]
    return figure


def histograms(scene: Scene) -> dict[str, Plot]:
    """Return histograms of epsilon_i over the training examples, with the worst case.

    Settings that differ only in the schedule share a figure; keys are their names without the schedule.
    """
    settings, style = scene.settings, scene.style
    drawn: dict[str, Plot] = {}
    for setting in settings:
        for edges, shares in _pooled_histograms(setting):
            figure = drawn.setdefault(setting.name_without_schedule, blank(height=250))
            add_trace(
                figure,
                setting,
                "ε from %{x:.3~g}: %{y:.1%}",
                x=edges,
                y=[*shares, shares[-1]],
                mode="lines",
                line={"color": style.colour(setting), "width": 2, "dash": style.dash(setting), "shape": "hv"},
                fill="tozeroy",
                fillcolor=faded(style.colour(setting), 0.12),
            )
            if (worst := setting.highest_epsilon) is not None:
                _mark_worst_case(figure, worst)
    for figure in drawn.values():
        figure.update_xaxes(title_text="ε<sub>i</sub>", rangemode="tozero")
        figure.update_yaxes(title_text="share of examples", tickformat=".0%", rangemode="tozero")
    return drawn


def _pooled_histograms(setting: Setting) -> list[tuple[list[float], list[float]]]:
    """Return bin edges and shares of examples, averaged over the seeds whose last edges agree to 1%."""
    pools: list[tuple[list[float], list[list[float]]]] = []
    for trial in setting.trials:
        histogram = trial.individuals.histogram if trial.individuals else None
        counts = [max(count, 0.0) for count in histogram.counts] if histogram else []
        if histogram is None or sum(counts) <= 0.0:
            continue
        shares = [count / sum(counts) for count in counts]
        for edges, members in pools:
            if len(edges) == len(histogram.edges) and math.isclose(edges[-1], histogram.edges[-1], rel_tol=0.01):
                members.append(shares)
                break
        else:
            pools.append((list(histogram.edges), [shares]))
    return [(edges, [statistics.fmean(column) for column in zip(*members, strict=True)]) for edges, members in pools]


def _mark_worst_case(figure: Plot, worst: float) -> None:
    if any(math.isclose(shape["x0"], worst, rel_tol=0.01) for shape in figure.shapes):
        return
    figure.add_vline(worst, line={"color": INK, "width": 1.5})
    figure.add_annotation(
        x=worst,
        y=1,
        yref="paper",
        xanchor="right",
        yanchor="bottom",
        text=f"worst case {worst:#.3g}",
        font={"size": 12, "color": INK},
    )


_LINE_HEIGHT: Final = 13.0
"""Smallest distance in pixels at which two labels do not overlap."""


def apart(heights: Sequence[float]) -> list[float]:
    """Return pixels by which to raise labels at these ``heights``, in pixels, so that none overlap.

    >>> apart([100.0, 20.0, 24.0])
    [0.0, 0.0, 9.0]
    """
    raised, below = [0.0] * len(heights), -math.inf
    for place in sorted(range(len(heights)), key=heights.__getitem__):
        below = max(heights[place], below + _LINE_HEIGHT)
        raised[place] = below - heights[place]
    return raised


_MOST_LABELS: Final = 40
"""Most labels of a figure; more would overlap."""


def label_end(figure: Plot, text: str, x: float, y: float, colour: str, raised: float = 0.0) -> None:
    """Write ``text`` to the right of a point, ``raised`` pixels above it, unless the figure has `_MOST_LABELS`."""
    if len(figure.annotations) >= _MOST_LABELS:
        return
    figure.add_annotation(
        x=x,
        y=y,
        text=without_markup(text),
        xanchor="left",
        xshift=4,
        yshift=raised,
        font={"size": 12, "color": colour},
    )


def line(
    figure: Plot,
    setting: Setting,
    style: Style,
    history: Sequence[PublishedEpoch],
    values: Sequence[float | None],
    name: str,
    width: float = 2.0,
    opacity: float = 1.0,
) -> None:
    """Add one value per epoch of a trial, in the colour and dash of its setting; a single epoch is a marker."""
    add_trace(
        figure,
        setting,
        "epoch %{x}: %{y:.4~g}",
        name,
        x=[epoch.epoch for epoch in history],
        y=list(values),
        mode="lines" if len(history) > 1 else "markers",
        line={"color": style.colour(setting), "dash": style.dash(setting), "width": width},
        opacity=opacity,
    )


def _band(row: int) -> dict[str, Any]:
    """Return a background behind a row over the whole width, as a shape of plotly."""
    place = {"type": "rect", "xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "y0": row - 0.5, "y1": row + 0.5}
    return {**place, "fillcolor": BAND, "line": {"width": 0}, "layer": "below"}


def blank(height: int) -> Plot:
    """Return an empty figure in the look of the report; height in pixels."""
    return Plot({**_LOOK, "height": height})


_AXIS: Final = {
    "gridcolor": RULE,
    "linecolor": RULE,
    "zeroline": False,
    "automargin": True,
    "ticks": "",
    "title": {"font": {"size": 13, "color": MUTED}, "standoff": 10},
    "tickfont": {"color": MUTED},
}
_LOOK: Final = {
    "showlegend": False,
    "autosize": True,
    "margin": {"l": 12, "r": 20, "t": 18, "b": 12},  # plotly hides a label, such as 100%, that would leave the figure
    "font": {"family": FONT, "size": 13, "color": INK},
    "hoverlabel": {"font": {"family": FONT, "size": 13}},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "xaxis": {**_AXIS, "zerolinecolor": INK, "zerolinewidth": 1},
    "yaxis": _AXIS,
}


def whiskers(above: Sequence[float], below: Sequence[float], **look: Any) -> dict[str, Any]:
    """Return error bars that reach so far above and below each value, as plotly takes them."""
    bars = {"type": "data", "symmetric": False, "array": [*above], "arrayminus": [*below]}
    return {**bars, "thickness": 1.2, "width": 0, **look}


def _cost_range(settings: Sequence[Setting]) -> tuple[float, float] | None:
    """Return the axis range for a mean epsilon_i: 0 to above the largest worst case. Released means may lie outside."""
    costs = [cost for setting in settings if (cost := setting.highest_epsilon) is not None]
    return (0.0, 1.04 * max(costs)) if costs else None


def meta_of(setting: Setting) -> dict[str, str]:
    """Return attributes by which the legend of the page shows and hides traces and rows."""
    level = "" if math.isinf(setting.level) else f"{setting.level:.2g}"
    return {"clipping": setting.clipping, "schedule": setting.schedule, "epsilon": level}


def without_markup(text: str) -> str:
    """Escape a label: plotly interprets some HTML tags and %{...} templates."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def faded(colour: str, opacity: float) -> str:
    """Return a colour ``#rrggbb`` with an opacity, as CSS writes it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


_NOT_TUNED = (
    "seed",
    "split_seed",
    "epsilon",
    "target_epsilon",
    "sigma",
    "noise.initial_noise_multiplier",
    "delta",
    "train_size",
    "test_size",
)


def numeric_parameters(setting: Setting) -> dict[str, float]:
    """Return the hyperparameters of a setting that are numbers, and the same for all seeds."""
    first, *others = ({**trial.params, **trial.labels} for trial in setting.trials)
    common = {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
    found = {name.removeprefix("spec."): value for name, value in common.items()}
    return {name: float(value) for name, value in found.items() if is_number(value) and name not in _NOT_TUNED}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a hyperparameter is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
