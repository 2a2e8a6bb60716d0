"""(epsilon, delta) together with what it claims: kind, unit, adjacency and accountant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from accounting.samplings import Adjacency

Kind = Literal["guarantee", "estimate", "lower_bound"]


@dataclass(frozen=True)
class PrivacyEstimate:
    """(epsilon, delta) and what the pair claims.

    kind: ``guarantee`` is a proven upper bound on the privacy loss of the run described by a trace;
    ``estimate`` rests on norms refreshed less often than every step or on an empirical bound;
    ``lower_bound`` is certainly not above the true value. unit names whose privacy it is ("example",
    "group of 4", "example 17", ...). An infinite epsilon is explicit: ``is_private`` is then false.
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
