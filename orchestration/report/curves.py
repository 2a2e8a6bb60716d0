"""Curves of a metric against a hyperparameter that the sweep varies, by method: method or tuning? Pure."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from orchestration.comparison.settings import Setting
from orchestration.comparison.values import accuracy, worst_group_accuracy
from orchestration.records.published import PublishedTrial
from orchestration.report.figures import Scene, blank, meta_of, plain_text

_MEASURES: dict[str, Callable[[PublishedTrial], float | None]] = {
    "accuracy": accuracy,
    "accuracy of the worst-served group": worst_group_accuracy,
}
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


def tuning_curves(scene: Scene) -> dict[str, go.Figure]:
    """Accuracy, and that of the worst group, against each hyperparameter that has two values under one method."""
    drawn: dict[str, go.Figure] = {}
    for name in _varied(scene):
        for what, value in _MEASURES.items():
            figure = _curve(scene, name, value, what)
            if figure.data:
                drawn[f"{what} against {_spoken(name)}"] = figure
    return drawn


def _numbers(setting: Setting) -> dict[str, float]:
    """The hyperparameters of a setting that are numbers."""
    trial = setting.trials[0]
    found = {name.removeprefix("spec."): value for name, value in {**trial.params, **trial.labels}.items()}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_TUNED
    }


def _varied(scene: Scene) -> list[str]:
    values: dict[tuple[str, tuple[str, str]], set[float]] = {}
    for setting in scene.settings:
        if not setting.is_baseline:
            for name, value in _numbers(setting).items():
                values.setdefault((name, setting.method), set()).add(value)
    return list(dict.fromkeys(name for (name, _), found in values.items() if len(found) > 1))


def _curve(scene: Scene, name: str, value: Callable[[PublishedTrial], float | None], what: str) -> go.Figure:
    figure = blank(height=320)
    methods: dict[tuple[str, str], list[tuple[float, Setting]]] = {}
    for setting in scene.settings:
        numbers = _numbers(setting)
        if not setting.is_baseline and name in numbers:
            methods.setdefault(setting.method, []).append((numbers[name], setting))
    for (clipping, schedule), members in methods.items():
        points = [
            (at, found, setting)
            for at, setting in sorted(members, key=lambda pair: pair[0])
            if (found := setting.over_seeds(value))
        ]
        if not points:
            continue
        first = points[0][2]
        colour, symbol = scene.style.colour(first), scene.style.symbol(first)
        figure.add_scatter(
            x=[at for at, *_ in points],
            y=[found.mean for _, found, _ in points],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [found.high - found.mean for _, found, _ in points],
                "arrayminus": [found.mean - found.low for _, found, _ in points],
                "thickness": 1.2,
                "width": 0,
            },
            mode="lines+markers",
            line={"color": colour, "dash": scene.style.dash(first), "width": 2},
            marker={"color": colour, "symbol": symbol, "size": 9},
            text=[plain_text(setting.name) for *_, setting in points],
            hovertemplate=f"<b>%{{text}}</b><br>{plain_text(_spoken(name))} %{{x}}: %{{y:.1%}}<extra></extra>",
            name=f"{clipping} · {schedule}",
            meta=meta_of(first),
        )
    positive = all(at > 0 for members in methods.values() for at, _ in members)
    figure.update_xaxes(title_text=plain_text(_spoken(name)), type="log" if positive else "linear", tickformat=".3~g")
    figure.update_yaxes(title_text=what, tickformat=".2~%", rangemode="nonnegative")
    return figure


def _spoken(name: str) -> str:
    return name.replace(".params.", " ").replace(".", " ").replace("_", " ")
