"""Intervals in words, for every place that shows one. Pure; every result is plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dpsweep.orchestration.comparison.formats import Format, difference
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
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
    return shown.is_share and _spans(interval, *shown.possible)


def difference_says_nothing(interval: ConfidenceInterval, shown: Format) -> bool:
    """Return whether the interval of a difference of shares spans every possible difference as shown."""
    if not shown.is_share:
        return False
    least, most = shown.possible
    return _spans(interval, min(least, -most), most)


def _spans(interval: ConfidenceInterval, least: float, most: float) -> bool:
    return interval.low <= least + _SHOWN and interval.high >= most - _SHOWN


def between(interval: ConfidenceInterval, shown: Format) -> str:
    """Return the ends of the interval of a number, such as "93.1 to 94.6%", or words if it spans every value.

    >>> from dpsweep.orchestration.comparison.formats import PERCENT
    >>> between(ConfidenceInterval(0.9, 0.85, 0.95, 3, "seeds and test examples"), PERCENT)
    '85.0 to 95.0%'
    >>> between(ConfidenceInterval(0.9, 0.0, 1.0, 2, "seeds and test examples"), PERCENT)
    'two seeds cannot tell'
    """
    if says_nothing(interval, shown):
        return f"{of_seeds(interval.runs)} cannot tell"
    return _ends(interval, shown.one)


def difference_between(interval: ConfidenceInterval, shown: Format) -> str:
    """Return the ends of the interval of a difference, in points if of shares, or words if any difference is possible.

    >>> from dpsweep.orchestration.comparison.formats import PERCENT
    >>> difference_between(ConfidenceInterval(-0.01, -0.02, 0.0, 3, "seeds and test examples"), PERCENT)
    '−2.0 to +0.0'
    """
    if difference_says_nothing(interval, shown):
        return f"{of_seeds(interval.runs)} cannot tell"
    return _ends(interval, lambda value: difference(value, shown))


def _ends(interval: ConfidenceInterval, one: Callable[[float | None], str]) -> str:
    low, high = one(interval.low), one(interval.high)
    return f"{low.removesuffix('%')} to {high}"
