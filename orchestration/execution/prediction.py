"""Measure a few real steps of each kind of trial, and tell what all steps of a sweep take: time, memory and price."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.orchestration.store.release_modes import shown_error
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.trials.probe import TrialProbe, probe_trial


@dataclass(frozen=True)
class Prediction:
    """Time and memory of all steps of a sweep, one trial after another.

    `memory`, `gpu_memory`: bytes of the largest trial.
    `price`: of the time; None without a price per hour.
    `kinds`: number of kinds of trials that were probed.
    `steps`: number of probed steps.
    """

    seconds: float
    memory: int
    gpu_memory: int
    price: float | None
    trials: int
    kinds: int
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def predict_costs(sweep: SweepSpec, plan: Plan, code: UserCode, price_per_hour: float | None = None) -> Prediction:
    """Take a few steps of every kind of trial; return what all steps of the trials that are not refused take.

    price_per_hour: of the machine that one trial has for itself. Raises: InvalidInput if a trial fails.
    """
    if price_per_hour is not None:
        require_finite("--price-per-hour", price_per_hour, at_least=0.0)
    probes: dict[Hashable, TrialProbe] = {}
    for planned in plan.trials:
        if kind(planned.spec) not in probes:
            probes[kind(planned.spec)] = _probed(planned, sweep, code)
    seconds = sum(planned.trace.steps * probes[kind(planned.spec)].step for planned in plan.trials)
    return Prediction(
        seconds=seconds,
        memory=max((each.memory for each in probes.values()), default=0),
        gpu_memory=max((each.gpu_memory for each in probes.values()), default=0),
        price=None if price_per_hour is None else price_per_hour * seconds / 3600.0,
        trials=len(plan.trials),
        kinds=len(probes),
        steps=sum(each.steps for each in probes.values()),
    )


def _probed(planned: PlannedTrial, sweep: SweepSpec, code: UserCode) -> TrialProbe:
    try:
        return probe_trial(planned.spec, planned.releases, code)
    except (Exception, SystemExit) as error:  # user code may raise anything, and the text may quote the data
        raise InvalidInput(
            f"trial {planned.key} fails within a few steps: {shown_error(error, sweep.disclosure)}"
        ) from None


def kind(spec: TrialSpec) -> Hashable:
    """Return the key of trials with the same time per step and memory; it ignores seeds, rates, bounds and noise
    multipliers.
    """
    named = (spec.optimizer, spec.clipping, spec.averaging)
    return (
        *(spec.data, spec.model, spec.loss, spec.preprocessing, spec.augmentation, spec.sampling),
        *(spec.norms, spec.execution, spec.audit, spec.is_private),
        *(None if component is None else component.name for component in named),
    )
