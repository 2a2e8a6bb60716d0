"""Compare the epsilon of a group of records with Vadhan's generic conversion and linear growth (paper B, Figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import grows_at_least_linearly, linear_growth, vadhan_epsilon

VADHAN = "Vadhan (upper bound)"
COMPARISON = (
    "Vadhan's conversion is an upper bound; linear, k times the epsilon of one example, is a lower bound where nothing "
    "is sampled or shuffled, else a reference only (a group may cost less)"
)


@dataclass(frozen=True)
class GroupComparison:
    """Reference values for the epsilon of a group of k examples.

    `vadhan`: Vadhan's upper bound. `linear`: k times the epsilon of one example. `linear_is_bound`: whether ``linear``
    is a proven lower bound; otherwise it is only a reference, and a group may cost less.
    """

    vadhan: float
    linear: float
    linear_is_bound: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite epsilon is None."""
        return {
            "vadhan_upper_bound": self.vadhan if math.isfinite(self.vadhan) else None,
            "linear_growth": self.linear if math.isfinite(self.linear) else None,
            "linear_growth_is": "lower bound" if self.linear_is_bound else "reference, no bound",
        }


def compare_groups(trace: Trace, delta: float, sizes: Sequence[int]) -> dict[int, GroupComparison]:
    """Return the reference values by group size, computed from certified privacy loss distributions."""
    is_bound, of_one = grows_at_least_linearly(trace), linear_growth(trace, delta, 1)
    return {size: GroupComparison(vadhan_epsilon(trace, delta, size), size * of_one, is_bound) for size in sizes}


def linear_heading(is_bound: bool) -> str:
    """Return the heading of the table column, and name of the plot line, of linear growth."""
    return f"linear ({'lower bound' if is_bound else 'no bound'})"
