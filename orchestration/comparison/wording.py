"""Intervals and neighbouring data sets in words, for every place that shows them. Pure; every result is plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.orchestration.comparison.formats import Format
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.settings import Setting

_SHOWN: Final = 0.0005
"""Half a unit of the last digit of a share as it is shown."""
_LEAST_CORRECTION: Final = 0.05
"""Least correction that is shown, in half widths of its interval: twice the error with which it is simulated, as the
mean of `extremes._DRAWS` draws whose deviation is about half of that half width."""
_COUNTS: Final = {1: "one seed", 2: "two seeds", 3: "three seeds", 4: "four seeds"}


class Repeated(Protocol):
    """Has ``runs``: seeds, or with several splits of the data seeds on each."""

    @property
    def runs(self) -> int:
        """Return their number."""

    @property
    def is_of_splits(self) -> bool:
        """Return whether they are on several splits."""


def of_runs(found: Repeated) -> str:
    """Return in words how many seeds there are, or how many runs on several splits.

    >>> [of_runs(ConfidenceInterval(0.5, 0.4, 0.6, runs, "seeds and test examples")) for runs in (2, 12)]
    ['two seeds', '12 seeds']
    >>> of_runs(ConfidenceInterval(0.5, 0.4, 0.6, 6, "splits, seeds and test examples"))
    '6 runs on several splits'
    """
    if found.is_of_splits:
        return f"{found.runs} runs on several splits"
    return _COUNTS.get(found.runs, f"{found.runs} seeds")


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


@dataclass(frozen=True)
class Neighbours:
    """An adjacency in words.

    `meaning`: in what neighbouring data sets differ.
    `changed`: what happens to a record, as in "one record added or removed".
    `unused`: what happened in place of its use in training.
    """

    meaning: str
    changed: str
    unused: str


NEIGHBOURS: Final[Mapping[Adjacency, Neighbours]] = {
    "add_remove": Neighbours(
        "one data set is the other plus one record, or plus one user with all their rows",
        "added or removed",
        "left out of the training data",
    ),
    "zero_out": Neighbours(
        "one record is replaced by a blank one; used for reshuffled epochs",
        "blanked",
        "replaced by a blank one in the training data",
    ),
    "fixed_graph": Neighbours(
        "all rows that one user owns or shares are replaced by blank ones, and who owns which row is taken as known",
        "blanked, own and shared, while who owns which is taken as known",
        "replaced by a blank one in the training data, with all others of its owner",
    ),
    "replace_one": Neighbours(
        "one record is replaced by any other", "replaced", "replaced by any other in the training data"
    ),
}


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
        return f"{of_runs(interval)} cannot tell"
    return ends(interval.low, interval.high, shown)


def ends(low: float, high: float, shown: Format) -> str:
    """Return two ends of an interval as text, such as "93.1 to 94.6%"."""
    return f"{shown.one(low).removesuffix('%')} to {shown.one(high)}"


def in_brackets(interval: ConfidenceInterval | None, shown: Format, *remarks: str) -> str:
    """Return remarks on a number and its 95% interval in brackets, to stand behind it; "" where there are none.

    >>> from dpsweep.orchestration.comparison.formats import PERCENT
    >>> in_brackets(ConfidenceInterval(0.9, 0.85, 0.95, 1, "test examples"), PERCENT, "", "low by selection")
    ' (low by selection; 95% interval over test examples alone 85.0 to 95.0%)'
    >>> in_brackets(None, PERCENT, "")
    ''
    """
    said = [remark for remark in remarks if remark]
    if interval is not None and says_nothing(interval, shown):
        said.append(f"{between(interval, shown)}: the 95% interval spans the whole range")
    elif interval is not None:
        over = " over test examples alone" if interval.is_of_one_seed else ""
        said.append(f"95% interval{over} {between(interval, shown)}")
    return f" ({'; '.join(said)})" if said else ""


def by_selection(of: Metric, value: float | None, interval: ConfidenceInterval | None) -> str:
    """Return words on an extreme over groups: the direction of the bias of choosing it, and its corrected value.

    `value`: the extreme as measured. `interval`: of the extreme, with the corrected value. "" where nothing is
    corrected, or by less than the correction is known to.
    """
    if value is None or interval is None or interval.corrected is None:
        return ""
    corrected, least = of.format.one(interval.corrected), _LEAST_CORRECTION * (interval.high - interval.low) / 2.0
    if corrected == of.format.one(value) or abs(interval.corrected - value) < least:
        return ""
    is_low = of.extreme is not None and of.extreme.is_too_low
    return f"{'low' if is_low else 'high'} by selection, corrected {corrected}"
