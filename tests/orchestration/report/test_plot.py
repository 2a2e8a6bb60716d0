"""Marks of settings: no two of a page look alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.report.html import marked_name
from dpsweep.orchestration.report.plot import CLIPPING_COLOURS, style_of
from tests.orchestration.sample_outcomes import outcomes, trial


def test_settings_of_one_method_and_schedule_have_marks_of_their_own() -> None:
    own = outcomes((0.9, 0.8))
    trials = [
        trial(own, clipping, 0, level, level=level) for clipping in ("flat", "naive") for level in (1.0, 2.0, 4.0, 8.0)
    ]
    settings = finished_settings([trial(own, "none"), *trials])
    style = style_of(settings)
    marks = [(style.colour(each), style.symbol(each)) for each in settings]
    assert len(set(marks)) == len(settings) == 9
    assert (
        len(
            {
                marked_name(replace(each, name="x"), replace(style, places={"x": style.places[each.name]}))
                for each in settings
            }
        )
        == 9
    )
    assert style.colour(settings[1]) == "#0072B2", "the first keeps the colour by which reports are compared"


VISIONS = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Linear sRGB as seen without a kind of cone (Machado, Oliveira and Fernandes 2009, table 1, severity 1)."""
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))


def lab(colour: str, vision: str) -> npt.NDArray[np.float64]:
    """CIE 1976 L*a*b* of a colour ``#rrggbb``, white D65."""
    stored = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)
    xyz = np.array(TO_XYZ) @ np.clip(np.array(VISIONS[vision]) @ linear, 0.0, 1.0) / (0.95047, 1.0, 1.08883)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_of_clipping_methods_are_told_apart_by_every_vision(vision: str) -> None:
    seen = {name: lab(colour, vision) for name, colour in CLIPPING_COLOURS.items()}
    distances = {(a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2)}
    closest = min(distances, key=lambda pair: distances[pair])
    assert distances[closest] > 15.0, closest
