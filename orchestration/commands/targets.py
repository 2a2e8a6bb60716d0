"""The privacy target that `dpsweep calibrate` meets."""

from __future__ import annotations

from dataclasses import dataclass

from dpsweep.accounting.calibration.budgets import (
    AdvantageBudget,
    Budget,
    EpsilonBudget,
    RhoBudget,
    TruePositiveRateBudget,
)
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import RandomTrials


@dataclass(frozen=True)
class Target:
    """The flags of the privacy target; `budget` requires exactly one of the first four."""

    epsilon: float | None
    rho: float | None
    advantage: float | None
    true_positive_rate: float | None
    delta: float | None
    false_positive_rate: float | None

    def budget(self, accountant: str, group_size: int, trials: RandomTrials | None = None) -> Budget:
        """Return the budget to meet. trials: for a private selection.

        Raises: InvalidInput for missing or contradictory flags.
        """
        targets = (self.epsilon, self.rho, self.advantage, self.true_positive_rate)
        if sum(target is not None for target in targets) != 1:
            raise InvalidInput(
                "give the target as exactly one of --target-epsilon, --budget-rho, --target-advantage and --target-tpr"
            )
        if (self.true_positive_rate is None) != (self.false_positive_rate is None):
            raise InvalidInput("--target-tpr and --at-fpr belong together: give both, or neither")
        if self.epsilon is not None:
            if self.delta is None:
                raise InvalidInput("--target-epsilon needs --delta, the failure probability, well below 1/n")
            return EpsilonBudget(self.epsilon, self.delta, accountant, group_size, trials)
        if trials is not None:
            raise InvalidInput("--selection-trials needs --target-epsilon: a selection has no other target")
        if self.rho is not None:
            return RhoBudget(self.rho, group_size)
        if self.advantage is not None:
            return AdvantageBudget(self.advantage, group_size)
        return TruePositiveRateBudget(self.true_positive_rate or 0.0, self.false_positive_rate or 0.0, group_size)

    @property
    def accountant(self) -> str | None:
        """The accountant that the target requires; None for an epsilon, whose accountant a flag names."""
        return None if self.epsilon is not None else "zcdp" if self.rho is not None else "pld"
