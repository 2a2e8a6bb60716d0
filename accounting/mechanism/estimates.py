"""(epsilon, delta) together with what the pair claims: kind, unit, adjacency and accountant."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from dpsweep.accounting.mechanism.reasons import Claim, Kind, Reason
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.units import EXAMPLE, Unit

__all__ = ["Claim", "Kind", "PrivacyEstimate", "weakest", "why_too_large", "without_guarantee"]


def weakest(*claims: Claim) -> Claim:
    """Return the weakest of several claims, which is the claim of a number that rests on all of them."""
    found: Claim = max(claims, key=get_args(Claim).index)
    return found


def without_guarantee(claim: Claim) -> Claim:
    """Return ``claim``, but at most output-specific: a number measured in a run guarantees nothing before it."""
    return weakest(claim, "output_specific")


def why_too_large(delta: float, size: int) -> str:
    """Return a warning of a delta of 1/n or more, for n = ``size`` training examples; "" for a smaller one."""
    if not size or delta < 1.0 / size:
        return ""
    return (
        f"delta is {delta:g}, but with {size} training examples it should be well below 1/n = {1.0 / size:.2g}: "
        "a mechanism that publishes one random example meets it"
    )


@dataclass(frozen=True)
class PrivacyEstimate:
    """(epsilon, delta) and what the pair claims.

    `kind`: ``guarantee`` is a proven upper bound on the privacy loss of the run described by a trace, whatever the run
    does. ``output_specific`` is measured in the run exactly and conditional on the iterates that were released (paper
    A). It is neither a filter nor an odometer, and not the (epsilon, delta)-DP of a run that could have ended
    otherwise. ``estimate`` is weaker, for each of its ``reasons`` (`dpsweep.accounting.mechanism.reasons`).
    ``lower_bound`` is certainly not above the true value. ``none`` means no protection: epsilon is infinite and
    ``is_private`` false. `unit` names whose privacy it is ("example", "user", "group of 4", "example 17", ...).
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: str
    kind: Kind = "guarantee"
    unit: str = "example"
    group_size: int = 1
    lower_epsilon: float | None = None
    """A certified lower bound on the exact epsilon, if the accountant gives one; the gap is numerical."""
    reasons: tuple[Reason, ...] = ()
    """Why this is an estimate and no guarantee; empty for the other kinds."""

    @property
    def is_private(self) -> bool:
        """Return whether epsilon is finite."""
        return self.epsilon < float("inf")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite epsilon becomes None beside ``"private": false``."""
        finite = {name: None if value == float("inf") else value for name, value in asdict(self).items()}
        return {**finite, "private": self.is_private}


def of_group(estimate: PrivacyEstimate, group_size: int, unit: Unit = EXAMPLE) -> PrivacyEstimate:
    """Return the estimate as a claim about ``group_size`` examples, or other units, together."""
    return replace(estimate, unit=unit.of(group_size), group_size=group_size)
