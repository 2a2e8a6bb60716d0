"""Colours and symbols of settings, the same in every figure and table of a report.

Colour shows the clipping method, symbol and dash the noise schedule, shade what else differs; grey is the non-private
baseline. The palette is that of Okabe and Ito (2008), with a grey and a brown that keep their distance from it for any
colour vision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.records.published import NON_PRIVATE

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
