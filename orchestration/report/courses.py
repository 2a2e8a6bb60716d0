"""Draw what happens over epochs and over the size of a group: accuracy, loss and epsilon. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import plotly.graph_objects as go

from accounting.mechanism import Trace
from orchestration.comparison.group_sizes import VADHAN, GroupComparison, compare_groups, linear_heading
from orchestration.comparison.settings import Setting
from orchestration.records.published import PublishedTrial
from orchestration.report.figures import Scene, blank, line, meta_of, plain_text


def accuracy_over_epochs(scene: Scene) -> go.Figure:
    """Accuracy on test data after each epoch: one line per setting, for its first seed."""
    return _over_epochs(scene, "test_accuracy", "accuracy on test data", ".2~%")


def loss_over_epochs(scene: Scene) -> go.Figure:
    """Mean loss on test data after each epoch: one line per setting, for its first seed."""
    return _over_epochs(scene, "test_loss", "loss on test data", ".3~g")


def epsilon_over_epochs(scene: Scene) -> go.Figure:
    """What the steps so far cost (paper C, Figure 2): one line per setting, for its first seed."""
    return _over_epochs(scene, "epsilon", "worst-case ε so far", ".3~g")


def _over_epochs(scene: Scene, name: str, title: str, ticks: str) -> go.Figure:
    figure = blank(height=360)
    for setting in scene.settings:
        history = setting.trials[0].history
        values = [epoch.metrics.get(name) for epoch in history]
        if any(value is not None and math.isfinite(value) for value in values):
            line(figure, setting, scene.style, history, values, setting.name)
    figure.update_xaxes(title_text="epoch")
    figure.update_yaxes(title_text=title, tickformat=ticks, rangemode="tozero")
    return figure


def epsilon_over_group_size(scene: Scene) -> go.Figure | None:
    """Epsilon of any k records together (paper B, Figure 1): tight, by Vadhan's conversion (dotted), and k times that
    of one record (dashed); None where fewer than two sizes were accounted."""
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
    ticks = sorted({size for trace in figure.data for size in trace.x})
    figure.update_xaxes(title_text="records together, k", type="log", tickvals=ticks, ticktext=list(map(str, ticks)))
    figure.update_yaxes(title_text="worst-case ε (log scale)", type="log", tickformat=".3~g", dtick="D2")
    return figure if figure.data else None


def _compared(trial: PublishedTrial, sizes: tuple[int, ...]) -> dict[int, GroupComparison]:
    """By group size, where the trace is known."""
    traces = [attempt.trace for attempt in trial.attempts if attempt.trace.segments]
    return _of_trace(traces[-1], trial.privacy.delta, sizes) if traces and trial.privacy else {}


@functools.lru_cache(maxsize=256)
def _of_trace(trace: Trace, delta: float, sizes: tuple[int, ...]) -> dict[int, GroupComparison]:
    return compare_groups(trace, delta, sizes)


def _add(
    figure: go.Figure,
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
