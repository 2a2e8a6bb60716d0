"""The mechanism of a trial, and how far its budget reaches: the trainer's side of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from accounting.accountants import account, total_rho
from accounting.errors import InvalidInput, require_finite
from accounting.mechanism import Release, Sampling, SideQuery, Trace
from accounting.schedules import NoiseSchedule, make_schedule, planned_trace
from workers import clipping
from workers.sampling import planned_sampling
from workers.spec import BudgetSpec, TrialSpec


@dataclass(frozen=True)
class TrialMechanism:
    """All that the cost of a trial depends on. `trace` is the planner's `planned_trace`, so both state the same."""

    schedule: NoiseSchedule
    sampling: Sampling
    steps_per_epoch: int
    dataset_size: int
    side_queries: tuple[SideQuery, ...]
    releases: tuple[Release, ...]
    contributions: Literal["guarantee", "estimate"]

    @staticmethod
    def of(spec: TrialSpec, dataset_size: int, releases: tuple[Release, ...] = ()) -> TrialMechanism:
        """The mechanism of ``spec`` on ``dataset_size`` examples; ``releases`` are made besides training.

        Contributions are guarantees when norms are taken at every step of the very examples that are trained on
        (augmentation changes them), or when clipping keeps to what was recorded.
        """
        sampling, steps_per_epoch = planned_sampling(spec.sampling, dataset_size)
        schedule, method = spec.noise.schedule, clipping.make_clipping(spec.clipping)
        exact = spec.norms.refreshes_per_epoch == "every_step" and spec.augmentation is None
        return TrialMechanism(
            schedule=make_schedule(schedule.name, spec.noise.initial_noise_multiplier, **schedule.params),
            sampling=sampling,
            steps_per_epoch=steps_per_epoch,
            dataset_size=dataset_size,
            side_queries=clipping.side_queries(spec.clipping),
            releases=(*clipping.releases(spec.clipping), *releases),
            contributions="guarantee" if exact or method.keeps_to_contributions else "estimate",
        )

    def trace(self, epochs: int, public_accuracies: Sequence[float] = ()) -> Trace:
        """The first ``epochs`` epochs, given the public accuracies after the epochs completed so far."""
        planned = planned_trace(
            self.schedule,
            self.sampling,
            epochs,
            self.steps_per_epoch,
            self.dataset_size,
            self.side_queries,
            self.releases,
            public_accuracies,
        )
        return replace(planned, contributions=self.contributions)


@dataclass(frozen=True)
class Budget:
    """A limit on the cost of a run: rho in concentrated DP, or epsilon at the trial's delta."""

    limit: float
    cost: Callable[[Trace], float]

    def affordable_epochs(self, trace_of: Callable[[int], Trace], at_most: int, at_least: int = 0) -> int:
        """The largest number of epochs in [at_least, at_most] within the limit; ``at_least`` is known to be.

        An epoch whose cost would pass the limit is not started (paper C, Sec. IV-A). Costs add up, so this bisects.
        """
        low, high = at_least, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(trace_of(middle)) <= self.limit else (low, middle - 1)
        return low


def _unlimited(spec: BudgetSpec, delta: float) -> Budget:
    return Budget(math.inf, lambda trace: 0.0)


def _rho(spec: BudgetSpec, delta: float) -> Budget:
    return Budget(require_finite("budget rho", spec.rho or 0.0, above=0.0), total_rho)


def _epsilon(spec: BudgetSpec, delta: float) -> Budget:
    limit = require_finite("budget epsilon", spec.epsilon or 0.0, above=0.0)
    return Budget(limit, lambda trace: account(trace, delta).epsilon)


_BUDGETS: Final[Mapping[tuple[bool, bool], Callable[[BudgetSpec, float], Budget]]] = {
    (False, False): _unlimited,
    (True, False): _rho,
    (False, True): _epsilon,
}


def make_budget(spec: BudgetSpec | None, delta: float) -> Budget:
    """The budget of a trial; no spec is no limit. Raises: InvalidInput when both rho and epsilon are given."""
    spec = spec or BudgetSpec()
    given = (spec.rho is not None, spec.epsilon is not None)
    if given not in _BUDGETS:
        raise InvalidInput(f"a budget has rho {spec.rho} and epsilon {spec.epsilon}; give exactly one of them")
    return _BUDGETS[given](spec, delta)
