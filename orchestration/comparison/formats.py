"""Number formats of the report, the terminal and messages. Pure; every result is plain text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.orchestration.comparison.statistics import Spread

MISSING = "–"
"""Shown in place of an unknown number."""

KINDS: Mapping[Kind, str] = {
    "guarantee": "guarantees",
    "output_specific": "output-specific",
    "estimate": "estimates",
    "lower_bound": "lower bounds",
}
"""Plural words for epsilons of each kind, as in "they are guarantees"."""


@dataclass(frozen=True)
class Format:
    """Format of one kind of number: ``one`` value, and the mean of ``several`` with their standard deviation."""

    one: Callable[[float | None], str]
    several: Callable[[Spread], str]

    def over_seeds(self, found: Spread) -> str:
        """Return the mean over seeds, with the standard deviation if the format has one and there are several seeds."""
        return self.one(found.mean) if found.count == 1 else self.several(found)


def per_unit(unit: str) -> str:
    """Return whose epsilon it is, where it is not that of a single example.

    >>> per_unit("example"), per_unit("user")
    ('', ' per user')
    """
    return "" if unit == EXAMPLE.name else f" per {unit}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits; ∞ for infinity, `MISSING` for None and NaN.

    >>> number(0.12345), number(12345.6), number(math.inf), number(None)
    ('0.123', '12,346', '∞', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def percent(value: float | None) -> str:
    """Return a fraction in percent, with one decimal.

    >>> percent(0.9876)
    '98.8%'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def at_most_share(value: float | None) -> str:
    """Return an upper bound on a share, in percent, rounded up to three significant digits."""
    return _share(value, math.ceil)


def at_least_share(value: float | None) -> str:
    """Return a lower bound on a share, in percent, rounded down to three significant digits."""
    return _share(value, math.floor)


def _share(value: float | None, towards: Callable[[float], int]) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    if value <= 0.0:
        return "0%"
    places = max(0, 2 - math.floor(math.log10(100 * value)))
    return f"{towards(100 * value * 10**places) / 10**places:.{places}f}%"


def points(value: float | None) -> str:
    """Return a signed difference of two fractions, in percentage points.

    >>> points(-0.0213)
    '−2.1'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:+z.1f}".replace("-", "−")


def gap(value: float | None) -> str:
    """Return an unsigned difference of two fractions, in percentage points.

    >>> gap(0.0213)
    '2.1'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def correlation(value: float | None) -> str:
    """Return a correlation coefficient, with two decimals.

    >>> correlation(-0.456)
    '−0.46'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.2f}".replace("-", "−")


def _fit(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3f}".replace("-", "−")


def signed(value: float | None) -> str:
    """Return a signed difference with three significant digits.

    >>> signed(-0.0213)
    '−0.0213'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:+.3g}".replace("-", "−")


def seconds(value: float | None) -> str:
    """Return a duration given in seconds, in its largest two units.

    >>> seconds(7500.0), seconds(75.0), seconds(7.5)
    ('2 h 5 min', '1 min 15 s', '7.5 s')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{value:.1f} s"


def clock(value: float) -> str:
    """Return a duration given in seconds, as h:mm:ss or m:ss.

    >>> clock(245.0), clock(3845.0)
    ('4:05', '1:04:05')
    """
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


NUMBER = Format(number, lambda found: number(found.mean))
PRECISE = Format(lambda value: number(value, 4), lambda found: number(found.mean, 4))
PERCENT = Format(percent, lambda found: f"{100 * found.mean:.1f} ± {100 * found.deviation:.1f}%")
AT_MOST = Format(at_most_share, lambda found: at_most_share(found.high))
POINTS = Format(points, lambda found: f"{points(found.mean)} ± {100 * found.deviation:.1f}")
CORRELATION = Format(correlation, lambda found: correlation(found.mean))
GAP = Format(gap, lambda found: gap(found.mean))
FIT = Format(_fit, lambda found: f"{_fit(found.mean)} ± {found.deviation:.3f}")
"""Format of goodness-of-fit scores such as r2: at most 1, and possibly negative."""
CHANGE = Format(signed, lambda found: signed(found.mean))
SECONDS = Format(seconds, lambda found: seconds(found.mean))
COUNT = Format(lambda value: MISSING if value is None else f"{value:,.0f}", lambda found: f"{found.mean:,.0f}")
_POSSIBLE: Mapping[int, tuple[float, float]] = {
    id(POINTS): (-1.0, 1.0),
    id(NUMBER): (0.0, math.inf),
    id(FIT): (-math.inf, 1.0),
    id(CHANGE): (-math.inf, math.inf),
}
SHARES = (PERCENT, POINTS, GAP)
"""Formats of shares, whose differences are percentage points."""


def difference(value: float | None, shown: Format) -> str:
    """Return a signed difference of two numbers of one format: of shares in percentage points.

    >>> difference(-0.0213, PERCENT), difference(0.0213, NUMBER)
    ('−2.1', '+0.0213')
    """
    return points(value) if shown in SHARES else signed(value)


def possible(shown: Format) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a number in this format."""
    return _POSSIBLE.get(id(shown), (0.0, 1.0))


def measured(accuracy: float | None, scores: Mapping[str, float]) -> str:
    """Return a trial's result on test data as text: its accuracy, or the scores of another task.

    >>> measured(0.9876, {}), measured(None, {"r2": 0.5321})
    ('accuracy 98.8%', 'r2 0.532')
    """
    if not scores:
        return f"accuracy {percent(accuracy)}"
    return ", ".join(f"{name.replace('_', ' ')} {_fit(value)}" for name, value in scores.items())


def first_few(names: Sequence[str]) -> str:
    """Return names as `listed`, the first three of more than five.

    >>> first_few(list("abcdefgh"))
    'a, b, c and 5 more'
    """
    return listed(names if len(names) <= 5 else [*names[:3], f"{len(names) - 3} more"])


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them; at least one.

    >>> listed(["flat", "naive", "dpsgd_f"])
    'flat, naive and dpsgd_f'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
