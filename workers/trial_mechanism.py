"""The mechanism that a trial runs, and how many epochs its budget covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from accounting.accountants import optimal_order
from accounting.budgets import Budget, EpsilonBudget, RhoBudget
from accounting.calibration import calibrate_filter, count_within_budget
from accounting.mechanism import Release, Trace
from accounting.planning import TrialMechanism
from accounting.schedules import make_schedule
from workers import clipping
from workers.imports import NO_CODE, UserCode
from workers.preprocessing import planned_releases
from workers.sampling import planned_sampling
from workers.spec import BudgetSpec, TrialSpec

LEAST_ORDER: Final = 4.0
"""Least `moment_order`: mean contributions are made for tails, which low orders neglect."""


def mechanism_of(
    spec: TrialSpec, dataset_size: int, releases: tuple[Release, ...] = (), code: UserCode = NO_CODE
) -> TrialMechanism:
    """The mechanism of ``spec`` on ``dataset_size`` training examples.

    releases: made from the same data in addition to training. code: the user's modules that may be imported, for their
    own clipping method.

    Contributions are output-specific if norms are computed at every step for exactly the gradients that are summed,
    or if clipping enforces the recorded contributions. With augmentation the summed gradients are those of other
    inputs, and with autocast their rounding depends on the batch size, so norms at every step are then estimates. A
    filter is calibrated here, from all epochs of the spec, so that planner and trainer use the same one.
    """
    schedule, method = spec.noise.schedule, clipping.make_clipping(spec.clipping, code)
    budget = method.example_budget
    repeatable = spec.augmentation is None and not spec.execution.autocast
    exact = spec.norms.refreshes_per_epoch == "every_step" and repeatable
    unfiltered = TrialMechanism(
        schedule=make_schedule(schedule.name, spec.noise.initial_noise_multiplier, **schedule.params),
        sampling=planned_sampling(spec.sampling, dataset_size),
        dataset_size=dataset_size,
        side_queries=clipping.side_queries(spec.clipping, code),
        releases=(*planned_releases(spec.preprocessing), *clipping.releases(spec.clipping, code), *releases),
        contributions="output_specific" if exact or method.keeps_to_contributions else "estimate",
        adjacency=spec.adjacency,
        selection=spec.selection,
    )
    if budget is None or budget.epsilon is None:
        return unfiltered
    limit = calibrate_filter(unfiltered.trace(spec.epochs), budget.epsilon, spec.delta)
    return replace(unfiltered, filter=limit)


def moment_order(spec: TrialSpec, mechanism: TrialMechanism) -> float:
    """The order of moments by which the contributions of several steps are averaged, at least 4.

    It is the order that gives the epsilon of the planned run by Renyi DP: a mean of a higher order would over-estimate
    the epsilons of single examples more than needed, and one of a lower order under-estimate them. The cost of a
    private selection does not matter: it needs no epsilons of single examples.
    """
    planned = replace(mechanism, selection=None).trace(spec.epochs)
    return max(optimal_order(planned, spec.delta), LEAST_ORDER) if planned.is_private else LEAST_ORDER


def affordable_epochs(spec: TrialSpec, mechanism: TrialMechanism, public_accuracies: Sequence[float]) -> int:
    """Number of planned epochs that fit in the trial's budget, given the public accuracies so far.

    An epoch whose cost would exceed the budget is not started (paper C, Sec. IV-A).
    """
    if spec.budget is None:
        return spec.epochs
    budget = make_budget(spec.budget, spec.delta)

    def paid(epochs: int) -> Trace:
        return paid_by(spec.budget, mechanism.trace(epochs, public_accuracies))

    return count_within_budget(paid, budget, spec.epochs)


def paid_by(spec: BudgetSpec | None, trace: Trace) -> Trace:
    """The part of ``trace`` that the budget covers; releases outside it still count towards epsilon."""
    return replace(trace, releases=()) if spec is not None and spec.covers == "training" else trace


def make_budget(spec: BudgetSpec, delta: float) -> Budget:
    """The budget of ``spec``. delta: of the trial, at which a budget in epsilon is meant."""
    if spec.rho is not None:
        return RhoBudget(spec.rho)
    assert spec.epsilon is not None, "a budget has exactly one of the two"
    return EpsilonBudget(spec.epsilon, delta)
