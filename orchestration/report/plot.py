"""A figure of plotly.js as plain data for a page.

plotly's own classes validate every value, which would take most of the time of a report. Here nothing is validated;
tests pass the figures to those classes instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any, Final

from dpsweep.orchestration.report.packing import packed_plotly, script_safe

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
    """Traces and layout with the keys of plotly.js. Methods mirror those of `plotly.graph_objects.Figure`."""

    layout: dict[str, Any]
    data: list[dict[str, Any]] = field(default_factory=list)

    @property
    def height(self) -> int:
        """Height in pixels."""
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
