"""The lines that `dpsweep best` prints about the chosen setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dpsweep.orchestration.comparison.best import Best
    from dpsweep.orchestration.comparison.findings import Difference
    from dpsweep.orchestration.comparison.formats import Format
    from dpsweep.orchestration.comparison.intervals import ConfidenceInterval

_NEAREST: Final = 3
"""Number of settings shown of those that cannot be told from the best."""


def best_lines(found: Best, model: str, show_all: bool = False) -> Iterator[str]:
    """Yield the lines on the setting, its value and interval, settings not distinguishable from it or of unknown
    order, its model, and warnings.

    show_all: show every such setting, not only the nearest.
    """
    from dpsweep.orchestration.comparison.entries import by_selection
    from dpsweep.orchestration.comparison.formats import number, per_unit
    from dpsweep.orchestration.comparison.metrics import metric
    from dpsweep.orchestration.comparison.spoken import between, says_nothing
    from dpsweep.orchestration.comparison.values import epsilon

    shown, cost = metric(found.by).format, found.setting.over_seeds(epsilon)
    interval = found.interval
    within = ""
    if interval is not None and says_nothing(interval, shown):
        within = f" ({between(interval, shown)}: the 95% interval spans the whole range)"
    elif interval is not None:
        within = f" (95% interval {between(interval, shown)})"
    if found.unknown_cost:
        yield found.unknown_cost
    words = by_selection(metric(found.by), found.value, interval)
    within = f", {words}{within}" if words else within
    claim = f"epsilon{per_unit(found.unit)} {number(cost.high if cost else None)} ({found.kind})"
    yield f"{found.name}: {found.by} {shown.one(found.value)}{within}, {claim}"
    if interval is None:
        yield "no interval is known: what its models predict of single test examples is not stored"
    elif interval.is_of_one_seed:
        yield "the interval is of the choice of test examples alone; whether it is the best is unknown (one seed)"
    yield from _nearest("cannot be told from it", found.alike, shown, show_all)
    yield from _nearest("order unknown (one common seed)", found.unordered, shown, show_all)
    if interval is not None:
        unknown = [each.other for each in found.unordered if each.interval is None]
        named = unknown if show_all else unknown[:_NEAREST]
        more = f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
        if unknown:
            why = "without common test examples, or with a run that has no finite score"
            yield f"cannot be compared with it, {why}: {', '.join(named)}{more}"
    yield f"model: {model}"
    yield from found.warnings


def _nearest(words: str, differences: Sequence[Difference], shown: Format, show_all: bool) -> Iterator[str]:
    """Yield the settings of these differences, which ``words`` are about: how many, and the nearest as measured."""
    known = [(each, each.interval) for each in differences if each.interval is not None]
    nearest = sorted(known, key=lambda pair: abs(pair[1].value))
    listed = nearest if show_all else nearest[:_NEAREST]
    if len(known) > len(listed):
        yield f"{words}: {len(known)} settings; the nearest {len(listed)} (--all shows the rest):"
    for each, interval in listed:
        yield f"{words}: {_difference(each, interval, shown)}"


def _difference(each: Difference, interval: ConfidenceInterval, shown: Format) -> str:
    from dpsweep.orchestration.comparison.formats import SHARES, difference
    from dpsweep.orchestration.comparison.spoken import difference_between, difference_says_nothing, of_seeds

    points = " points" * (shown in SHARES)
    of_other = replace(interval, value=-interval.value, low=-interval.high, high=-interval.low)
    if difference_says_nothing(of_other, shown):
        measured = f"{difference(of_other.value, shown)}{points}"
        return (
            f"{each.other} (measured {measured}, but {of_seeds(interval.runs)} cannot tell: any difference is possible)"
        )
    alone = ", by test examples alone" * interval.is_of_one_seed
    return f"{each.other} (differs by {difference_between(of_other, shown)}{points}{alone})"
