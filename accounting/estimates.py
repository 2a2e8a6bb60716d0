"""(epsilon, delta) together with what it claims: kind, unit, adjacency and accountant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from accounting.samplings import Adjacency

Claim = Literal["guarantee", "output_specific", "estimate"]
"""What an upper bound is worth, from the strongest claim to the weakest; see `PrivacyEstimate`."""
Kind = Claim | Literal["lower_bound", "none"]


def weakest(*claims: Claim) -> Claim:
    """The claim of a number that rests on several: no stronger than any of them."""
    found: Claim = max(claims, key=get_args(Claim).index)
    return found


def without_guarantee(claim: Claim) -> Claim:
    """``claim``, with output-specific in place of guarantee: what is read off a run guarantees nothing in advance."""
    return weakest(claim, "output_specific")


@dataclass(frozen=True)
class PrivacyEstimate:
    """(epsilon, delta) and what the pair claims.

    kind: ``guarantee`` is a proven upper bound on the privacy loss of the run described by a trace, whatever the run
    does; ``output_specific`` is read off the run exactly and conditional on the iterates that were released (paper A):
    neither a filter nor an odometer, and no (epsilon, delta)-DP of a run that could have ended otherwise;
    ``estimate`` rests on norms refreshed less often than every step or on an empirical bound;
    ``lower_bound`` is certainly not above the true value; ``none``, with an infinite epsilon, protects nobody. unit
    names whose privacy it is ("example", "group of 4", "example 17", ...). An infinite epsilon is explicit:
    ``is_private`` is then false.
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

    @property
    def is_private(self) -> bool:
        """Whether epsilon is finite."""
        return self.epsilon < float("inf")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite epsilon becomes None beside ``"private": false``."""
        finite = {name: None if value == float("inf") else value for name, value in asdict(self).items()}
        return {**finite, "private": self.is_private}
