"""Intervals in words, for every place that shows one. Pure; every result is plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dpsweep.orchestration.comparison.formats import Format
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.settings import Setting

_SHOWN: Final = 0.0005
"""Half a unit of the last digit of a share as it is shown."""
_COUNTS: Final = {1: "one seed", 2: "two seeds", 3: "three seeds", 4: "four seeds"}


def of_seeds(runs: int) -> str:
    """Return a number of seeds in words.

    >>> of_seeds(2), of_seeds(12)
    ('two seeds', '12 seeds')
    """
    return _COUNTS.get(runs, f"{runs} seeds")


def unknown_of_one_seed(best: Setting, private: Sequence[Setting]) -> list[str]:
    """Return a sentence if the best of the private settings has one run; nothing otherwise."""
    if len(best.trials) > 1:
        return []
    alone = "intervals are of the choice of test examples alone"
    if len(private) < 2:
        return [f"One seed: {alone}, and another seed may turn any difference around."]
    return [
        f"Whether one setting is better than another is unknown (one seed): {alone}, and another seed may turn any "
        "difference around."
    ]


def says_nothing(interval: ConfidenceInterval, shown: Format) -> bool:
    """Return whether the interval of a share spans every possible value as shown; never for other numbers."""
    least, most = shown.possible
    return shown.is_share and interval.low <= least + _SHOWN and interval.high >= most - _SHOWN


def between(interval: ConfidenceInterval, shown: Format) -> str:
    """Return the ends of the interval of a number, such as "93.1 to 94.6%", or words if it spans every value.

    >>> from dpsweep.orchestration.comparison.formats import PERCENT
    >>> between(ConfidenceInterval(0.9, 0.85, 0.95, 3, "seeds and test examples"), PERCENT)
    '85.0 to 95.0%'
    >>> between(ConfidenceInterval(0.9, 0.0, 1.0, 2, "seeds and test examples"), PERCENT)
    'two seeds cannot tell'
    >>> between(ConfidenceInterval(-0.01, -0.02, 0.0, 3, "seeds and test examples"), PERCENT.of_differences)
    '−2.0 to +0.0'
    """
    if says_nothing(interval, shown):
        return f"{of_seeds(interval.runs)} cannot tell"
    return f"{shown.one(interval.low).removesuffix('%')} to {shown.one(interval.high)}"


def by_selection(of: Metric, value: float | None, interval: ConfidenceInterval | None) -> str:
    """Return words on an extreme over groups: the direction of the bias of choosing it, and its corrected value.

    `value`: the extreme as measured. `interval`: of the extreme, with the corrected value. "" where nothing is
    corrected, or too little to show.
    """
    if interval is None or interval.corrected is None:
        return ""
    corrected = of.format.one(interval.corrected)
    if corrected == of.format.one(value):
        return ""
    is_low = of.extreme is not None and of.extreme.is_too_low
    return f"{'low' if is_low else 'high'} by selection, corrected {corrected}"
