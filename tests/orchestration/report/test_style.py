"""Marks of settings: no two of a page look alike."""

from __future__ import annotations

from dataclasses import replace

from orchestration.comparison.settings import finished_settings
from orchestration.report.html import named
from orchestration.report.style import style_of
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
            {named(replace(each, name="x"), replace(style, places={"x": style.places[each.name]})) for each in settings}
        )
        == 9
    )
    assert style.colour(settings[1]) == "#0072B2", "the first keeps the colour by which reports are compared"
