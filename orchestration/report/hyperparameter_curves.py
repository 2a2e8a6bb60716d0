"""Curves of a metric against a hyperparameter that the sweep varies or tunes, one line per method. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.records.published import PublishedTuning
from dpsweep.orchestration.report.figures import (
    Axis,
    Scene,
    blank,
    is_number,
    meta_of,
    numbers,
    plain_text,
    spoken_place,
)
from dpsweep.orchestration.report.plot import Plot
from dpsweep.orchestration.report.trade_offs import total_axis, worst_axis

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
                drawn[f"{up.title} against {spoken_place(name)}"] = figure
    return drawn


def _varied(scene: Scene) -> list[str]:
    values: dict[tuple[str, tuple[str, str]], set[float]] = {}
    for setting in scene.settings:
        if not setting.is_baseline:
            for name, value in numbers(setting).items():
                values.setdefault((name, setting.method), set()).add(value)
    return list(dict.fromkeys(name for (name, _), found in values.items() if len(found) > 1))


def _curve(scene: Scene, name: str, up: Axis) -> Plot:
    figure = blank(height=320)
    methods: dict[tuple[str, str], list[tuple[float, Setting]]] = {}
    for setting in scene.settings:
        known = numbers(setting)
        if not setting.is_baseline and name in known:
            methods.setdefault(setting.method, []).append((known[name], setting))
    for (clipping, schedule), members in methods.items():
        points = [
            (at, found, setting)
            for at, setting in sorted(members, key=lambda pair: pair[0])
            if (found := setting.over_seeds(up.value))
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
            hovertemplate=f"<b>%{{text}}</b><br>{plain_text(spoken_place(name))} %{{x}}: %{{y}}<extra></extra>",
            name=f"{clipping} · {schedule}",
            meta=meta_of(first),
        )
    _label_values(figure, name)
    figure.update_yaxes(title_text=up.title, tickformat=up.ticks, rangemode="nonnegative")
    return figure


def searched_curves(scene: Scene) -> dict[str, Plot]:
    """Return the score that tuning maximises (a loss: minimises) against each tuned number: every setting's best per
    value.
    """
    tuned = [(setting, tuning) for setting in scene.settings if (tuning := setting.trials[0].tuning) is not None]
    places = dict.fromkeys(place for _, found in tuned for values, _ in found.tried for place in values)
    drawn = {}
    for place in places:
        figure = blank(height=320)
        for setting, found in tuned:
            _add_search(figure, scene, setting, found, place)
        if figure.data:
            by = tuned[0][1].by.replace("_", " ")
            _label_values(figure, place)
            figure.update_yaxes(title_text=f"{by}, as tuned", tickformat=".3~g" if by == "loss" else ".2~%")
            drawn[f"{by}, as tuned, against {spoken_place(place)}"] = figure
    return drawn


def _add_search(figure: Plot, scene: Scene, setting: Setting, found: PublishedTuning, place: str) -> None:
    """Draw a faint dot per candidate, a line through the best at each value, and a large marker at the chosen value."""
    known = [
        (float(at), score) for values, score in found.tried if score is not None and is_number(at := values.get(place))
    ]
    best = min if found.by == "loss" else max
    line = {at: best(score for other, score in known if other == at) for at, _ in sorted(known)}
    if len(line) < 2:
        return
    colour, chosen = scene.style.colour(setting), found.chosen.get(place)
    figure.add_scatter(
        x=[at for at, _ in known],
        y=[score for _, score in known],
        mode="markers",
        marker={"color": colour, "symbol": scene.style.symbol(setting), "size": 6, "opacity": 0.35},
        hoverinfo="skip",
        meta=meta_of(setting),
    )
    figure.add_scatter(
        x=list(line),
        y=list(line.values()),
        mode="lines+markers",
        line={"color": colour, "dash": scene.style.dash(setting), "width": 2},
        marker={
            "color": colour,
            "symbol": scene.style.symbol(setting),
            "size": [14 if at == chosen else 8 for at in line],
        },
        text=[plain_text(setting.name)] * len(line),
        hovertemplate=f"<b>%{{text}}</b><br>{plain_text(spoken_place(place))} %{{x}}: %{{y}}<extra></extra>",
        name=setting.name,
        meta=meta_of(setting),
    )


def _label_values(figure: Plot, place: str) -> None:
    """Set up the x axis of a swept number: logarithmic if all values are positive, ticks at the values if they fit."""
    values = sorted({float(at) for trace in figure.data for at in trace["x"]})
    scale = "log" if all(at > 0 for at in values) else "linear"
    figure.update_xaxes(title_text=plain_text(spoken_place(place)), type=scale, tickformat=".3~g")
    if _are_apart([math.log(at) for at in values] if scale == "log" else values):
        figure.update_xaxes(tickvals=values, ticktext=[f"{at:.3g}" for at in values])
    elif scale == "log":
        figure.update_xaxes(dtick="D2")


def _are_apart(places: Sequence[float]) -> bool:
    """Return whether tick labels at these increasing places do not overlap."""
    return all(b - a >= _LABEL_WIDTH * (places[-1] - places[0]) for a, b in itertools.pairwise(places))
