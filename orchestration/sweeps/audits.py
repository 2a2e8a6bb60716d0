"""Simulated audits of a sweep, before any training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.workers.training.audit_prospects import AuditProspect, prospect


def prospects(trials: Sequence[PlannedTrial]) -> Iterator[AuditProspect]:
    """Yield what the audits of private trials can show, once for all trials with equal runs."""
    seen = set[object]()
    for trial in trials:
        audit = trial.spec.audit
        same = (audit, trial.trace, trial.spec.delta, trial.parameters)
        if audit is None or not trial.worst_case.is_private or same in seen:
            continue
        seen.add(same)
        data = trial.dataset
        yield prospect(trial.spec, audit, trial.trace, trial.worst_case.epsilon, data.train_size, trial.parameters)
