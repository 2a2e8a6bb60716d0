"""A figure of plotly.js as plain data for a page, and the colours and symbols of settings in all figures.

The classes of plotly validate every value, which would take most of the time of a report. Here nothing is validated;
tests pass the figures to those classes instead.

Colours and symbols are the same in every figure and table of a report. Colour shows the clipping method,
symbol and dash the noise schedule, shade what else differs; grey is the non-private baseline. The palette is that of
Okabe and Ito (2008), with a grey and a brown that keep their distance from it for any colour vision.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any, Final, TypeVar

from plotly.offline import get_plotlyjs

from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.store.published import NON_PRIVATE

_PAGE: Final = Template("""<!DOCTYPE html>
<html><head><meta charset="utf-8"></head><body><div id="plot"></div>
$plotly
<script id="figure" type="application/json">$figure</script>
<script>
"use strict";
const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text().then(text => {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  const figure = JSON.parse(document.getElementById("figure").textContent);
  Plotly.newPlot("plot", figure.data, figure.layout, { responsive: true });
});
</script></body></html>
""")


@dataclass
class Plot:
    """Traces and layout with the keys of plotly.js. Its methods are called as in `plotly.graph_objects.Figure`."""

    layout: dict[str, Any]
    data: list[dict[str, Any]] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return int(self.layout["height"])

    @property
    def shapes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.layout.setdefault("shapes", [])
        return found

    @property
    def annotations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.layout.setdefault("annotations", [])
        return found

    def add_scatter(self, **trace: Any) -> None:
        self.data.append({"type": "scatter", **trace})

    def add_heatmap(self, **trace: Any) -> None:
        self.data.append({"type": "heatmap", **trace})

    def add_vline(self, x: float, **look: Any) -> None:
        """Draw a vertical line over the whole height."""
        self._add_line({"xref": "x", "yref": "y domain", "x0": x, "x1": x, "y0": 0, "y1": 1, **look})

    def add_hline(self, y: float, **look: Any) -> None:
        """Draw a horizontal line over the whole width."""
        self._add_line({"xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "y0": y, "y1": y, **look})

    def _add_line(self, shape: dict[str, Any]) -> None:
        self.shapes.append({"type": "line", **shape})

    def add_annotation(self, **annotation: Any) -> None:
        self.annotations.append({"showarrow": False, **annotation})

    def update_xaxes(self, **changes: Any) -> None:
        self._update("xaxis", changes)

    def update_yaxes(self, **changes: Any) -> None:
        self._update("yaxis", changes)

    def _update(self, axis: str, changes: dict[str, Any]) -> None:
        known = self.layout.get(axis, {})
        new = {name: value for name, value in changes.items() if name != "title_text" and value is not None}
        if "title_text" in changes:
            new["title"] = {**known.get("title", {}), "text": changes["title_text"]}
        self.layout[axis] = {**known, **new}

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON, rounded to seven digits; figures show at most four."""
        return {"data": _rounded(self.data), "layout": _rounded(self.layout)}

    def page(self) -> str:
        """Return the figure alone as a complete HTML page that needs no network."""
        return _PAGE.substitute(plotly=packed_plotly(), figure=script_safe(self.plain()))


def _rounded(value: Any) -> Any:
    """Return the value with floats rounded to seven digits; infinities and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(found) for name, found in value.items()}
    return [_rounded(found) for found in value] if isinstance(value, list | tuple) else value


@functools.cache
def packed_plotly() -> str:
    """Return the element that holds plotly.js, packed; a script of the page unpacks it."""
    return compressed("plotly", get_plotlyjs())


def compressed(name: str, text: str) -> str:
    """Return an element that holds the text compressed by gzip, in base64: about a third of a script's size."""
    content = base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
    return f'<script id="{name}" type="text/plain">{content}</script>'


def script_safe(value: Any) -> str:
    """Return JSON with <, > and & escaped, so that no text can end the script element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


INK, MUTED, RULE, BAND, PAPER = "#1d1f23", "#6b7078", "#e6e6e1", "#f6f5f1", "#fdfdfb"
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"

CLIPPING_COLOURS = {
    NON_PRIVATE: "#55585f",
    "flat": "#0072B2",
    "dpsgd_f": "#D55E00",
    "individual": "#009E73",
    "per_layer": "#CC79A7",
    "automatic": "#E69F00",
    "quantile": "#56B4E9",
    "filter": "#6b2020",
}
SPARE_COLOURS = ("#882255", "#332288", "#999933", "#117733", "#AA4499")

PALETTE = (*tuple(CLIPPING_COLOURS.values())[1:], *SPARE_COLOURS)
"""Colours of lines that do not stand for a clipping method."""

SCHEDULE_LOOKS = {
    "": ("circle-open", "solid"),
    "constant": ("circle", "solid"),
    "exponential": ("diamond", "dash"),
    "time": ("square", "dot"),
    "step": ("triangle-up", "dashdot"),
    "polynomial": ("cross", "longdash"),
    "validation": ("star", "longdashdot"),
}
SPARE_LOOKS = (("hexagon", "dash"), ("triangle-down", "dot"), ("pentagon", "dashdot"), ("x", "longdash"))

Look = TypeVar("Look")


@dataclass(frozen=True)
class Style:
    """Colours by clipping method, and (symbol, dash) by noise schedule, for the settings of one sweep.

    `places`: by name, the place of a setting among others with the same method and schedule, such as several epsilons
    or bounds. They differ in shade, and every other one has an open marker.
    """

    colours: Mapping[str, str]
    looks: Mapping[str, tuple[str, str]]
    places: Mapping[str, int] = field(default_factory=dict)

    def colour(self, setting: Setting) -> str:
        """Return the hexadecimal colour of the setting's clipping method, in the setting's shade."""
        return _shade(self.colours[setting.clipping], _SHADES[self.places.get(setting.name, 0) // 2 % len(_SHADES)])

    def symbol(self, setting: Setting) -> str:
        """Return Plotly's name of the marker for the setting's schedule, open at every other place."""
        name = self.looks[setting.schedule][0]
        return f"{name}-open" if self.places.get(setting.name, 0) % 2 and not name.endswith("-open") else name

    def marker(self, setting: Setting, size: float) -> dict[str, Any]:
        """Return the marker of the setting, as plotly takes it."""
        return {"color": self.colour(setting), "symbol": self.symbol(setting), "size": size}

    def dash(self, setting: Setting) -> str:
        """Return Plotly's name of the line dash for the setting's schedule."""
        return self.looks[setting.schedule][1]


def style_of(settings: Sequence[Setting]) -> Style:
    """Return fixed colours and symbols for known names, so that reports can be compared; spare ones, in order, for
    others.
    """

    def assign(names: Sequence[str], known: Mapping[str, Look], spare: Sequence[Look]) -> dict[str, Look]:
        unknown = [name for name in dict.fromkeys(names) if name not in known]
        return {**known, **{name: spare[i % len(spare)] for i, name in enumerate(unknown)}}

    places: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for setting in settings:
        look = (setting.clipping, setting.schedule)
        places[setting.name] = counts.get(look, 0)
        counts[look] = places[setting.name] + 1
    return Style(
        assign([setting.clipping for setting in settings], CLIPPING_COLOURS, SPARE_COLOURS),
        assign([setting.schedule for setting in settings], SCHEDULE_LOOKS, SPARE_LOOKS),
        places,
    )


_SHADES = (0.0, -0.45, 0.4, -0.7)
"""Shares by which colours of settings of one method and schedule are mixed with white, or with black below 0."""


def _shade(colour: str, share: float) -> str:
    """Mix a colour ``#rrggbb`` with white by ``share``, or with black by its negative.

    >>> _shade("#0072B2", 0.0), _shade("#000000", 0.5), _shade("#ffffff", -0.5)
    ('#0072B2', '#808080', '#808080')
    """
    if not share:
        return colour
    target = 255 if share > 0.0 else 0
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(share) * (target - part)):02x}" for part in parts)
