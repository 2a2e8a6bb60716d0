"""Upper limits on the privacy cost of a run, which calibration meets and which stop a run before it exceeds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.methods import total_rho
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.attacks import privacy_curve, rate_name
from dpsweep.accounting.errors import keep_finite
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.trace import Trace

_RESOLUTION = 5e-5  # certified bounds are 1e-4 apart or more: solving more finely gains nothing


@dataclass(frozen=True)
class Reached:
    """The cost of a run in the unit of a budget. accountant: who computed it. below: a proven lower bound by its name,
    None where there is none.
    """

    cost: float
    kind: Kind
    accountant: str
    below: Mapping[str, float | None] = field(default_factory=dict)


class Budget(Protocol):
    """An upper limit on the privacy cost of a run."""

    @property
    def limit(self) -> float:
        """The largest accepted cost."""

    @property
    def unit(self) -> str:
        """The name of the cost in messages, such as "epsilon"."""

    @property
    def accountant(self) -> str:
        """The name of the accountant that computes the cost."""

    @property
    def resolution(self) -> float:
        """Relative precision of the cost beyond which solving more finely gains nothing."""

    def cost(self, trace: Trace) -> float:
        """Return the cost of the run; infinite without noise."""

    def reached(self, trace: Trace) -> Reached:
        """Return the cost of the run with its claim."""

    def roughly(self) -> EpsilonBudget | None:
        """Return a budget whose cost is cheap, met by about as much noise, to start a search from; None for none."""


class _OneAccountant(ABC):
    """A budget whose cost one accountant computes, without a proven lower bound, and no cheaper one approximates."""

    accountant: ClassVar[str]

    @abstractmethod
    def cost(self, trace: Trace) -> float:
        """As in `Budget`."""

    def reached(self, trace: Trace) -> Reached:
        return Reached(self.cost(trace), trace.kind, self.accountant)

    def roughly(self) -> None:
        return None


@dataclass(frozen=True)
class RhoBudget(_OneAccountant):
    """A budget of rho in zero-concentrated DP, as in paper C: each shuffled epoch costs 1/(2 sigma^2)."""

    limit: float
    group_size: int = 1
    accountant: ClassVar[str] = "zcdp"
    unit: ClassVar[str] = "rho"
    resolution: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        keep_finite(self, "limit", "budget rho", above=0.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    def cost(self, trace: Trace) -> float:
        return total_rho(trace, self.group_size)


@dataclass(frozen=True)
class EpsilonBudget:
    """A budget of epsilon at ``delta``, computed by ``accountant``, for groups of ``group_size`` examples.

    trials: if given, the budget is for releasing only the best of this random number of runs (`account_selection`).
    """

    limit: float
    delta: float
    accountant: str = "auto"
    group_size: int = 1
    trials: RandomTrials | None = None
    unit: ClassVar[str] = "epsilon"

    def __post_init__(self) -> None:
        keep_finite(self, "limit", "target epsilon", above=0.0)
        keep_finite(self, "delta", "delta", above=0.0, below=1.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    @property
    def resolution(self) -> float:
        """5e-5 for pld, whose bounds are 1e-4 apart and costly to evaluate; 0 for the others."""
        return _RESOLUTION if self.accountant in ("pld", "auto") else 0.0

    def estimate(self, trace: Trace) -> PrivacyEstimate:
        """Return the epsilon of the run, and what it claims."""
        if self.trials is not None:
            return account_selection(trace, self.trials, self.delta, self.accountant, self.group_size)
        return account(trace, self.delta, self.accountant, self.group_size)

    def cost(self, trace: Trace) -> float:
        return self.estimate(trace).epsilon

    def reached(self, trace: Trace) -> Reached:
        found = self.estimate(trace)
        return Reached(found.epsilon, found.kind, found.accountant, {"lower_epsilon": found.lower_epsilon})

    def roughly(self) -> EpsilonBudget | None:
        """Return a budget of rdp, which typically needs 5 % more noise than the tightest accountant."""
        return None if self.accountant == "rdp" else EpsilonBudget(self.limit / self.group_size, self.delta, "rdp")


@dataclass(frozen=True)
class AdvantageBudget(_OneAccountant):
    """A budget of membership advantage, the largest true minus false positive rate of any attack (`PrivacyCurve`)."""

    limit: float
    group_size: int = 1
    accountant: ClassVar[str] = "pld"
    unit: ClassVar[str] = "advantage"
    resolution: ClassVar[float] = _RESOLUTION

    def __post_init__(self) -> None:
        keep_finite(self, "limit", "target advantage", above=0.0, below=1.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    def cost(self, trace: Trace) -> float:
        return privacy_curve(trace, self.group_size).advantage.upper


@dataclass(frozen=True)
class TruePositiveRateBudget(_OneAccountant):
    """A budget of the true positive rate of any attack at ``false_positive_rate``; it must exceed that rate.

    Guessing without looking at the run already has a true positive rate equal to the false positive rate.
    """

    limit: float
    false_positive_rate: float
    group_size: int = 1
    accountant: ClassVar[str] = "pld"
    resolution: ClassVar[float] = _RESOLUTION

    def __post_init__(self) -> None:
        keep_finite(self, "false_positive_rate", "false positive rate", above=0.0, below=1.0)
        keep_finite(self, "limit", "target true positive rate", above=self.false_positive_rate, below=1.0)
        object.__setattr__(self, "group_size", require_group_size(self.group_size))

    @property
    def unit(self) -> str:
        return rate_name(self.false_positive_rate)

    def cost(self, trace: Trace) -> float:
        return privacy_curve(trace, self.group_size).true_positive_rate(self.false_positive_rate).upper
