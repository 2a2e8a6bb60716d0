"""The assumption of each test of an audit, in one wording for commands, reports and docs/accounting.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_GAUSSIAN: Final = "that a run shows no more of a canary than a Gaussian mechanism with the same epsilon at delta would"
_INDEPENDENT: Final = "and that scores of canaries are independent"
ASSUMPTIONS: Final[Mapping[str, str]] = {
    "ranks": f"that the run is the stated one but for the scale of its noise, {_INDEPENDENT}",
    "gdp": f"{_GAUSSIAN}, {_INDEPENDENT}",
    "f_dp": _GAUSSIAN,
    "steinke": "nothing",
}
"""By test: its assumption besides fair and secret coins, as the object of "assumes"."""


def assumed_by_best(bounds: Mapping[str, float]) -> str:
    """Return which test has the largest of the lower ``bounds``, by name, and its assumption.

    >>> assumed_by_best({"ranks": 0.5, "steinke": 0.7})
    'steinke assumes nothing'
    """
    best = max(bounds, key=lambda name: bounds[name], default="no known test")
    return f"{best} assumes {ASSUMPTIONS.get(best, 'what this version does not know')}"
