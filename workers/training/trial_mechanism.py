"""The mechanism that a trial runs, how many epochs its budget covers, and the trials that are refused.

The planner checks these requirements, and the trainer checks them again before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dpsweep.accounting.accountants.methods import optimal_order
from dpsweep.accounting.calibration.budgets import Budget, EpsilonBudget, RhoBudget
from dpsweep.accounting.calibration.parameter_search import calibrate_filter, count_within_budget, sampled_alike
from dpsweep.accounting.calibration.planned_runs import TrialMechanism
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.correlated import as_independent, costs_by_step, steps_apart
from dpsweep.accounting.mechanism.schedules import make_noise, reads_accuracies
from dpsweep.accounting.mechanism.trace import Release, Trace
from dpsweep.workers.clipping import ClippingMethod, ExampleBudget
from dpsweep.workers.machine.devices import known_device
from dpsweep.workers.sampling.rows_per_user import release_of
from dpsweep.workers.sampling.samplers import planned_sampling
from dpsweep.workers.sampling.users import require_per_user
from dpsweep.workers.spec import BudgetSpec, Component, Refreshes, TrialSpec
from dpsweep.workers.training.gradient_canaries import check_gradient_audit
from dpsweep.workers.training.one_run_audit import check_audit
from dpsweep.workers.training.preprocessing import planned_releases

LEAST_ORDER: Final = 4.0
"""Minimum of `moment_order`: mean contributions are made for tails, which low orders neglect."""


def mechanism_of(
    spec: TrialSpec, method: ClippingMethod, dataset_size: int, releases: tuple[Release, ...] = ()
) -> TrialMechanism:
    """Return the mechanism of ``spec`` on a population of this size: training examples, or users if they are sampled.

    method: that of the spec. releases: made from the same data in addition to training.

    Contributions are output-specific if norms are computed at every step for exactly the gradients that are summed, or
    if clipping enforces the recorded contributions. With augmentation the summed gradients come from other inputs, and
    with autocast their rounding depends on the batch size. Norms at every step are then estimates. A filter is
    calibrated here, from all epochs of the spec, so that planner and trainer use the same one.
    """
    budget, of_method = method.example_budget, method.releases
    named, sampling = spec.noise.schedule, planned_sampling(spec.sampling, dataset_size)
    steps = spec.epochs * sampling.steps_per_epoch
    apart = steps_apart(sampling, steps)
    schedule, strategy = make_noise(named.name, spec.noise.initial_noise_multiplier, named.params, steps, apart)
    repeatable = spec.augmentation is None and not spec.execution.autocast
    exact = spec.norms.refreshes_per_epoch == "every_step" and repeatable
    unfiltered = TrialMechanism(
        schedule=schedule,
        sampling=sampling,
        dataset_size=dataset_size,
        side_queries=method.side_queries,
        releases=(*planned_releases(spec.preprocessing), *_of_users(spec), *of_method, *releases),
        contributions="output_specific" if exact or method.keeps_to_contributions else "estimate",
        adjacency=spec.adjacency,
        selection=spec.selection,
        unit=spec.unit,
        strategy=strategy,
    )
    if budget is None or budget.epsilon is None:
        return unfiltered
    limit = calibrate_filter(unfiltered.trace(spec.epochs), budget.epsilon, spec.delta)
    return replace(unfiltered, filter=limit)


def _of_users(spec: TrialSpec) -> tuple[Release, ...]:
    """Return the release of the rows per user that the trial was planned by, if there was one."""
    if spec.users is None or spec.users.counted_with is None or not spec.is_private:
        return ()
    return (release_of(spec.users.counted_with, spec.unit),)


def with_noise(
    trial: TrialSpec, budget: ExampleBudget | None, noise_multiplier: float, target_epsilon: float
) -> TrialSpec:
    """Return the trial with the calibrated noise multiplier.

    budget: that of each example, if the clipping method is a privacy filter. The noise multiplier is then multiplied by
    its noise_factor, and the target epsilon becomes the budget of every example. Raises: InvalidInput if the method
    already has its own epsilon.
    """
    if budget is None:
        return replace(trial, noise=replace(trial.noise, initial_noise_multiplier=noise_multiplier))
    if budget.epsilon is not None:
        raise InvalidInput(
            f"the budget of clipping method {trial.clipping.name!r} is privacy.target_epsilon; leave out its epsilon "
            f"{budget.epsilon:g}, or give privacy.noise_multiplier instead"
        )
    sigma = float(f"{budget.noise_factor * noise_multiplier:.6g}")
    limited = Component(trial.clipping.name, {**trial.clipping.params, "epsilon": target_epsilon})
    return replace(trial, noise=replace(trial.noise, initial_noise_multiplier=sigma), clipping=limited)


def moment_order(spec: TrialSpec, mechanism: TrialMechanism) -> float:
    """Return the order of moments by which the contributions of several steps are averaged, at least 4.

    It is the order that gives the epsilon of the planned run by Renyi DP. A mean of a higher order would over-estimate
    the epsilons of single examples more than needed; one of a lower order would under-estimate them. The cost of a
    private selection does not matter: it needs no epsilons of single examples, as a run without norms.
    """
    if spec.norms.are_off:
        return LEAST_ORDER
    planned = replace(mechanism, selection=None).trace(spec.epochs)
    return max(optimal_order(sampled_alike(planned), spec.delta), LEAST_ORDER) if planned.is_private else LEAST_ORDER


def affordable_epochs(spec: TrialSpec, mechanism: TrialMechanism, public_accuracies: Sequence[float]) -> int:
    """Return the number of planned epochs that fit in the trial's budget, given the public accuracies so far.

    An epoch whose cost would exceed the budget is not started (paper C, Sec. IV-A).
    """
    if spec.budget is None:
        return spec.epochs
    budget = make_budget(spec.budget, spec.delta)

    def paid(epochs: int) -> Trace:
        return paid_by(spec.budget, mechanism.trace(epochs, public_accuracies))

    return count_within_budget(paid, budget, spec.epochs)


def paid_by(spec: BudgetSpec | None, trace: Trace) -> Trace:
    """Return the part of ``trace`` that the budget covers; releases outside it still count towards epsilon."""
    return replace(trace, releases=()) if spec is not None and spec.covers == "training" else trace


def make_budget(spec: BudgetSpec, delta: float) -> Budget:
    """Return the budget of ``spec``. delta: of the trial, at which a budget in epsilon is meant."""
    if spec.rho is not None:
        return RhoBudget(spec.rho)
    assert spec.epsilon is not None, "a budget has exactly one of the two"
    return EpsilonBudget(spec.epsilon, delta)


def with_chosen_norms(spec: TrialSpec, mechanism: TrialMechanism, method: ClippingMethod) -> TrialSpec:
    """Return the trial with a choice in place of ``auto`` norms; any other is kept.

    Off where no epsilon of single examples is proven (`costs_by_step`), and in a trial that protects users. Once per
    epoch for a clipping method that uses the norms of all examples at a refresh. Once per epoch, too, where an example
    displaces others from batches: with ``when_sampled`` it would also change when their norms are measured.
    """
    if spec.norms.refreshes_per_epoch != "auto":
        return spec
    if spec.users is not None or not costs_by_step(mechanism.sampling, mechanism.strategy):
        return replace(spec, norms=replace(spec.norms, refreshes_per_epoch="off"))
    often: Refreshes = 1.0 if method.refreshes or mechanism.sampling.displaced else "when_sampled"
    return replace(spec, norms=replace(spec.norms, refreshes_per_epoch=often))


def check_spec(spec: TrialSpec, mechanism: TrialMechanism, method: ClippingMethod, public_size: int) -> None:
    """Refuse a trial that cannot be trained, or not privately, before anything is written.

    public_size: number of public examples in the data set.

    Raises: InvalidInput for an unknown device, noise without clipping, a filter without epsilon, a clipping method
    whose norms the trial does not refresh, a validation-driven schedule without public data, an audit that sampling or
    clipping do not allow, and all that is not proven per user. UnsupportedMechanism for correlated noise with batches
    for which no theorem is known here.
    """
    require_per_user(spec, [release.name for release in mechanism.releases])
    trace = mechanism.trace(spec.epochs)
    as_independent(trace)
    if spec.audit is not None and spec.audit.leaves_out_rows:
        check_audit(spec.audit, spec.sampling, mechanism.dataset_size)
        if spec.attacks.exposure is not None:
            raise InvalidInput(
                "audit.kind is rows, of which half are left out of training, secrets of attacks.exposure among them; "
                "set audit.kind: gradient, or leave one of the two out"
            )
    elif spec.audit is not None:
        check_gradient_audit(spec, layerwise=method.layerwise)
    if spec.execution.device != "auto":
        known_device(spec.execution.device)
    highest = max(segment.noise_multiplier for segment in trace.segments)
    if highest > 0.0 and spec.clipping.name == "none":
        raise InvalidInput(
            f"the noise multiplier reaches {highest:g}, but without clipping the sensitivity is infinite; "
            "choose a clipping method, or constant noise of multiplier 0"
        )
    if not costs_by_step(mechanism.sampling, mechanism.strategy):
        _require_no_single_epsilons(spec, mechanism, method)
    if (spec.norms.when_sampled or spec.norms.are_off) and method.refreshes:
        raise InvalidInput(
            f"norms.refreshes_per_epoch is {spec.norms.refreshes_per_epoch}, but clipping method "
            f"{spec.clipping.name!r} uses the norms of all examples at each refresh; give auto, a number, or every_step"
        )
    if method.example_budget is not None and mechanism.filter is None:
        raise InvalidInput(
            f"clipping method {spec.clipping.name!r} needs epsilon, the budget of every example: give it, or calibrate "
            "the sweep to privacy.target_epsilon"
        )
    if reads_accuracies(spec.noise.schedule.name) and not public_size:
        raise InvalidInput("a validation-driven schedule needs public data; set data.public_fraction above 0")


def _require_no_single_epsilons(spec: TrialSpec, mechanism: TrialMechanism, method: ClippingMethod) -> None:
    """Raise `InvalidInput` for norms, or a clipping method, that serve epsilons of single examples."""
    words = mechanism.words
    if method.refreshes or method.keeps_to_contributions:
        raise InvalidInput(
            f"clipping method {spec.clipping.name!r} limits what single examples pay, but with {words} no epsilon of "
            "single examples is proven; choose another clipping method, or sampling poisson with independent noise"
        )
    if not spec.norms.are_off:
        raise InvalidInput(
            f"norms.refreshes_per_epoch is {spec.norms.refreshes_per_epoch}, but with {words} no epsilon of single "
            "examples is proven; give auto or off, or sampling poisson with independent noise"
        )
