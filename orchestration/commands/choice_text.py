"""The lines that `dpsweep best` prints about the chosen setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestration.comparison.best import Best


def best_lines(found: Best, model: str) -> Iterator[str]:
    """Lines on the setting, its value and interval, settings not distinguishable from it, its model, and warnings."""
    from orchestration.comparison.formats import SHARES, difference, number
    from orchestration.comparison.metrics import metric
    from orchestration.comparison.values import epsilon

    shown, cost = metric(found.by).format, found.setting.over_seeds(epsilon)
    interval = found.interval
    within = f" (95% interval {shown.one(interval.low)} to {shown.one(interval.high)})" if interval else ""
    claim = f"epsilon {number(cost.high if cost else None)} ({found.kind})"
    yield f"{found.name}: {found.by} {shown.one(found.value)}{within}, {claim}"
    if interval is None:
        yield "no interval is known: what its models predict of single test examples is not stored"
    elif interval.covers == "test examples":
        yield "the interval is of the choice of test examples alone: there is one seed"
    for each in found.alike:
        if each.interval is not None:
            low, high = -each.interval.high, -each.interval.low
            between = f"{difference(low, shown)} to {difference(high, shown)}{' points' * (shown in SHARES)}"
            yield f"cannot be told from it: {each.other} (differs by {between})"
        elif interval is not None:
            yield f"cannot be compared with it: {each.other}, which has no common seeds or test examples"
    yield f"model: {model}"
    yield from found.warnings
