"""Small charts of means with intervals as SVG text. The same numbers give the same bytes, as the files are checked in.

Colours and font are the report's (`dpsweep.orchestration.report.plot`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

from dpsweep.orchestration.report.plot import FONT, INK, MUTED, RULE

WIDTH: Final = 760
_TOP, _BOTTOM, _RIGHT, _GAP = 34, 46, 14, 26
_LEGEND = 24


@dataclass(frozen=True)
class Point:
    """A mean, with the ends of its interval on either axis if they are known."""

    x: float
    y: float
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one colour. joined: connected by a line, in the order given. hollow: drawn as rings."""

    name: str
    colour: str
    points: Sequence[Point]
    joined: bool = False
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis. `names`: categories by position, in place of numbers. `logarithmic`: all numbers must be above 0.

    `title`: below the x axis; a y axis shows none, since the panel's title names it.
    """

    title: str = ""
    names: Mapping[float, str] = field(default_factory=dict)
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of ``value`` on a linear scale."""
        return math.log10(value) if self.logarithmic else value


@dataclass(frozen=True)
class Panel:
    """One plot beside others. marks: vertical lines with their names. levels: horizontal ones."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def chart(panels: Sequence[Panel], height: int = 300, left: int = 64) -> str:
    """Return the panels side by side in one SVG, with a legend of the series. height: in pixels. left: room for y
    labels.
    """
    legend = {series.name: series for panel in panels for series in panel.series}
    width = (WIDTH - left - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{escape(FONT, {chr(34): "&quot;"})}" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_legend(list(legend.values()), left),
    ]
    ends = _ends([panel.y.place(value) for panel in panels for value in _values(panel, 1)], _has_names(panels, 1))
    for place, panel in enumerate(panels):
        box = (left + place * (width + _GAP), _LEGEND + _TOP, width, height - _LEGEND - _TOP - _BOTTOM)
        parts += _panel(panel, box, ends, labelled=place == 0)
    return "\n".join([*parts, "</svg>", ""])


def _legend(series: Sequence[Series], left: int) -> list[str]:
    parts, x = [], float(left)
    for each in series:
        parts += [_dot(x + 5, 16, each), _text(x + 15, 20, each.name)]
        x += 15 + 7.2 * len(each.name) + 18
    return parts


def _has_names(panels: Sequence[Panel], axis: int) -> bool:
    return any((panel.x, panel.y)[axis].names for panel in panels)


def _values(panel: Panel, axis: int) -> list[float]:
    """Return all numbers of an axis, 0 for x and 1 for y."""
    points = [point for series in panel.series for point in series.points]
    means = [(point.x, point.y)[axis] for point in points]
    ends = [(point.x_ends, point.y_ends)[axis] for point in points]
    lines = (panel.marks, panel.levels)[axis].values()
    return [*means, *(end for pair in ends if pair for end in pair), *lines, *(panel.x, panel.y)[axis].names]


def _ends(values: Sequence[float], has_names: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.5 if has_names else 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def _panel(
    panel: Panel, box: tuple[float, float, float, float], y_ends: tuple[float, float], labelled: bool
) -> list[str]:
    left, top, width, height = box
    x_ends = _ends([panel.x.place(value) for value in _values(panel, 0)], bool(panel.x.names))

    def across(value: float) -> float:
        return left + width * (panel.x.place(value) - x_ends[0]) / (x_ends[1] - x_ends[0])

    def down(value: float) -> float:
        return top + height * (1.0 - (panel.y.place(value) - y_ends[0]) / (y_ends[1] - y_ends[0]))

    parts = [_text(left, top - 12, panel.title, weight="600")]
    for value, name in _ticks(panel.x, x_ends):
        parts.append(_line(across(value), top, across(value), top + height, RULE))
        parts.append(_text(across(value), top + height + 16, name, anchor="middle", colour=MUTED))
    for value, name in _ticks(panel.y, y_ends):
        parts.append(_line(left, down(value), left + width, down(value), RULE))
        if labelled:
            parts.append(_text(left - 8, down(value) + 4, name, anchor="end", colour=MUTED))
    for name, value in panel.marks.items():
        parts.append(_line(across(value), top, across(value), top + height, INK, dash="4 3"))
        parts.append(_text(across(value) - 4, top + 12, name, anchor="end", colour=MUTED))
    for name, value in panel.levels.items():
        parts.append(_line(left, down(value), left + width, down(value), INK, dash="4 3"))
        parts.append(_text(left + width, down(value) - 4, name, anchor="end", colour=MUTED))
    for series in panel.series:
        if series.joined:
            path = " ".join(f"{across(point.x):.1f},{down(point.y):.1f}" for point in series.points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="1.5"/>')
        for point in series.points:
            x, y = across(point.x), down(point.y)
            if point.x_ends:
                parts.append(_line(across(point.x_ends[0]), y, across(point.x_ends[1]), y, series.colour))
            if point.y_ends:
                parts.append(_line(x, down(point.y_ends[0]), x, down(point.y_ends[1]), series.colour))
            parts.append(_dot(x, y, series))
    title = _text(left + width / 2, top + height + 36, panel.x.title, anchor="middle", colour=MUTED)
    return [*parts, title]


_MANY_POWERS: Final = 6


def _ticks(axis: Axis, ends: tuple[float, float]) -> list[tuple[float, str]]:
    """Return the values of the ticks with their labels.

    On a logarithmic axis they are powers of ten, and over few of them 2 and 5 times each, too.
    """
    if axis.names:
        return [(value, name) for value, name in axis.names.items()]
    if axis.logarithmic:
        powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
        values = [
            factor * 10.0**power for power in powers for factor in ((1, 2, 5) if len(powers) < _MANY_POWERS else (1,))
        ]
        return [(value, f"{value:g}") for value in values if ends[0] <= math.log10(value) <= ends[1]]
    rough = (ends[1] - ends[0]) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(ends[0] / step), math.floor(ends[1] / step)
    return [(count * step, f"{round(count * step, 10):g}") for count in range(first, last + 1)]


def _dot(x: float, y: float, series: Series) -> str:
    fill, stroke = ("#ffffff", series.colour) if series.hollow else (series.colour, series.colour)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    place = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="1.2"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = INK, weight: str = "400") -> str:
    look = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
