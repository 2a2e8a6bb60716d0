"""Colours and symbols of settings, the same in every figure and table of a report.

Colour shows the clipping method, symbol and dash the noise schedule; grey is the non-private baseline. The palette, of
Okabe and Ito (2008), is distinguishable with any colour vision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestration.comparison.settings import Setting
from orchestration.records.published import NON_PRIVATE

INK, MUTED, RULE, BAND = "#1d1f23", "#6b7078", "#e6e6e1", "#f6f5f1"
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, sans-serif"

CLIPPING_COLOURS = {
    NON_PRIVATE: "#7a7d85",
    "flat": "#0072B2",
    "dpsgd_f": "#D55E00",
    "individual": "#009E73",
    "per_layer": "#CC79A7",
    "automatic": "#E69F00",
    "quantile": "#56B4E9",
    "filter": "#44AA99",
}
SPARE_COLOURS = ("#882255", "#332288", "#999933", "#117733", "#AA4499", "#661100")

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
    """Colours by clipping method, and (symbol, dash) by noise schedule, for the settings of one sweep."""

    colours: Mapping[str, str]
    looks: Mapping[str, tuple[str, str]]

    def colour(self, setting: Setting) -> str:
        """Hexadecimal colour of the setting's clipping method."""
        return self.colours[setting.clipping]

    def symbol(self, setting: Setting) -> str:
        """Plotly's name of the marker for the setting's schedule."""
        return self.looks[setting.schedule][0]

    def dash(self, setting: Setting) -> str:
        """Plotly's name of the line dash for the setting's schedule."""
        return self.looks[setting.schedule][1]


def style_of(settings: Sequence[Setting]) -> Style:
    """Fixed colours and symbols for known names, so that reports can be compared; spare ones, in order, for others."""

    def assign(names: Sequence[str], known: Mapping[str, Look], spare: Sequence[Look]) -> dict[str, Look]:
        unknown = [name for name in dict.fromkeys(names) if name not in known]
        return {**known, **{name: spare[i % len(spare)] for i, name in enumerate(unknown)}}

    return Style(
        assign([setting.clipping for setting in settings], CLIPPING_COLOURS, SPARE_COLOURS),
        assign([setting.schedule for setting in settings], SCHEDULE_LOOKS, SPARE_LOOKS),
    )
