"""Requirements on a trial that involve several fields or the data, checked by the planner and again before training."""

from __future__ import annotations

from dataclasses import replace

from dpsweep.accounting.calibration.planned_runs import TrialMechanism
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.correlated import as_independent, costs_by_step
from dpsweep.workers.clipping import ClippingMethod
from dpsweep.workers.machine.devices import known_device
from dpsweep.workers.sampling.users import require_per_user
from dpsweep.workers.spec import Refreshes, TrialSpec
from dpsweep.workers.training.gradient_canaries import check_gradient_audit
from dpsweep.workers.training.one_run_audit import check_audit


def with_chosen_norms(spec: TrialSpec, mechanism: TrialMechanism, method: ClippingMethod) -> TrialSpec:
    """Return the trial with a choice in place of ``auto`` norms; any other is kept.

    Off where no epsilon of single examples is proven (`costs_by_step`), and in a trial that protects users. Once per
    epoch for a clipping method that uses the norms of all examples at a refresh, and where an example displaces others
    from batches: with ``when_sampled`` it would also change when their norms are measured.
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

    Raises: InvalidInput for an unknown device, noise without clipping, a clipping method that needs norms which the
    trial does not refresh, a filter without epsilon, a validation-driven schedule without public data, an audit that
    its sampling or its clipping does not allow, and whatever is not proven per user. UnsupportedMechanism for
    correlated noise with batches for which no theorem is known here.
    """
    trace = mechanism.trace(spec.epochs)
    as_independent(trace)
    require_per_user(spec, [release.name for release in mechanism.releases])
    if spec.audit is not None:
        if spec.audit.kind == "gradient":
            check_gradient_audit(spec, layerwise=method.layerwise)
        else:
            check_audit(spec.audit, spec.sampling, mechanism.dataset_size)
            if spec.attacks.exposure is not None:
                raise InvalidInput(
                    "audit.kind is rows, of which half are left out of training, secrets of attacks.exposure among "
                    "them; set audit.kind: gradient, or leave one of the two out"
                )
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
    if spec.noise.schedule.name == "validation" and not public_size:
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
