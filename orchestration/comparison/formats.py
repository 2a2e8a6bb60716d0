"""How numbers are written, for the report, the terminal and messages alike. Pure; every string is plain text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from orchestration.comparison.statistics import Spread

MISSING = "–"
"""Shown where a number is not known."""


@dataclass(frozen=True)
class Format:
    """How one kind of number is written: a single value, and the mean of several with their deviation."""

    one: Callable[[float | None], str]
    several: Callable[[Spread], str]

    def over_seeds(self, found: Spread) -> str:
        """The mean over seeds; with its deviation where this kind of number shows one and there are several seeds."""
        return self.one(found.mean) if found.count == 1 else self.several(found)


def number(value: float | None, digits: int = 3) -> str:
    """So many significant digits; ∞ for infinity."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def percent(value: float | None) -> str:
    """A share in percent, with one decimal."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def points(value: float | None) -> str:
    """A signed difference of two shares, in percentage points."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:+.1f}".replace("-", "−")


def gap(value: float | None) -> str:
    """A distance between two shares, in percentage points."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.1f}"


def correlation(value: float | None) -> str:
    """A correlation coefficient, with two decimals."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.2f}".replace("-", "−")


def seconds(value: float | None) -> str:
    """A duration in its largest two units."""
    if value is None or not math.isfinite(value):
        return MISSING
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{value:.1f} s"


def clock(value: float) -> str:
    """A running time as a clock shows it: 4:05 or 1:04:05."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


NUMBER = Format(number, lambda found: number(found.mean))
PRECISE = Format(lambda value: number(value, 4), lambda found: number(found.mean, 4))
PERCENT = Format(percent, lambda found: f"{100 * found.mean:.1f} ± {100 * found.deviation:.1f}%")
POINTS = Format(points, lambda found: f"{points(found.mean)} ± {100 * found.deviation:.1f}")
CORRELATION = Format(correlation, lambda found: correlation(found.mean))
GAP = Format(gap, lambda found: gap(found.mean))
SECONDS = Format(seconds, lambda found: seconds(found.mean))
