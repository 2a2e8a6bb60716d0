"""Draw what happens over epochs and over the size of a group: accuracy, loss and epsilon. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import plotly.graph_objects as go

from accounting.mechanism import Trace
from accounting.pld import vadhan_epsilon
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
    """Epsilon of any k records together (paper B): tight, by Vadhan's conversion (dotted), and k times that of one
    record, below which it cannot be (dashed); None where fewer than two sizes were accounted."""
    figure = blank(height=430)
    for setting in scene.settings:
        trial = setting.trials[0]
        found = dict(sorted(trial.privacy.group_epsilons.items())) if trial.privacy else {}
        if setting.is_baseline or len(found) < 2:
            continue
        sizes = list(found)
        _add(figure, scene, setting, sizes, list(found.values()), "solid", "tight")
        _add(figure, scene, setting, sizes, _by_vadhan(trial, sizes), "dot", "by Vadhan’s conversion")
        if 1 in found:
            _add(figure, scene, setting, sizes, [size * found[1] for size in sizes], "dash", "at least")
    ticks = sorted({size for trace in figure.data for size in trace.x})
    figure.update_xaxes(title_text="records together, k", type="log", tickvals=ticks, ticktext=list(map(str, ticks)))
    figure.update_yaxes(title_text="worst-case ε (log scale)", type="log", tickformat=".3~g", dtick="D2")
    return figure if figure.data else None


def _by_vadhan(trial: PublishedTrial, sizes: Sequence[int]) -> list[float | None]:
    """By the generic conversion from one record, where the trace is known; None where it gives no finite epsilon."""
    traces = [attempt.trace for attempt in trial.attempts if attempt.trace.segments]
    if not traces or trial.privacy is None:
        return []
    values = [_vadhan(traces[-1], trial.privacy.delta, size) for size in sizes]
    return [value if math.isfinite(value) else None for value in values]


@functools.lru_cache(maxsize=1024)
def _vadhan(trace: Trace, delta: float, size: int) -> float:
    return vadhan_epsilon(trace, delta, size)


def _add(
    figure: go.Figure,
    scene: Scene,
    setting: Setting,
    sizes: Sequence[int],
    values: Sequence[float | None],
    dash: str,
    what: str,
) -> None:
    if not any(value is not None for value in values):
        return
    figure.add_scatter(
        x=list(sizes),
        y=list(values),
        mode="lines+markers" if dash == "solid" else "lines",
        line={"color": scene.style.colour(setting), "dash": dash, "width": 2 if dash == "solid" else 1},
        marker={"color": scene.style.colour(setting), "symbol": scene.style.symbol(setting), "size": 8},
        text=[plain_text(f"{setting.name}, {what}")] * len(sizes),
        hovertemplate="<b>%{text}</b><br>k = %{x}: ε = %{y:.4~g}<extra></extra>",
        name=f"{setting.name}, {what}",
        meta=meta_of(setting),
    )
