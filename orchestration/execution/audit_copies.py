"""Audit finished trials after the fact: each in a copy of its settings, trained with canaries and then deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.claims import require_founded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.execution.backend import AuditedCopy, Backend, OnEpoch, Warn
from dpsweep.orchestration.execution.backends import on_stored
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.store.integrity import digest_of_its_data, require_unaltered
from dpsweep.orchestration.store.later_results import AuditRecord, record_of, stored_audit, write_audit
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.own_code.own_record import require_same_code
from dpsweep.workers.spec import AttackSpec, AuditSpec, NormSpec, TrialSpec
from dpsweep.workers.training.trial_mechanism import mechanism_of


@dataclass(frozen=True)
class AuditRequest:
    """Trials to audit, all finished private ones without `only`, and how. `seed`: tells copies of a trial apart."""

    only: tuple[str, ...]
    audit: AuditSpec
    seed: int


def audit_again(
    files: SweepFiles,
    record: SweepRecord,
    request: AuditRequest,
    code: UserCode,
    address: str,
    on_epoch: OnEpoch,
    warn: Warn,
) -> Iterator[tuple[AuditRecord, str]]:
    """Audit trials of a record, one after the other at ``address``; yield what each audit found and its private file.

    A copy has the settings of its trial, with another seed. It trains on the same examples in a new folder, which is
    deleted: of it remains what the audit has found, which is private. Trials are only read. A copy that was
    audited before is not trained again, so that an interrupted command can be repeated.
    Raises: InvalidInput, before any training, for a trial that cannot be audited; DataCorruption for damaged files.
    """
    require_founded(files, record)
    asked = _asked(files, record, request)
    for result in asked:
        require_same_code(files.trial(result.key), result.spec, code, "audit it with the code that it was trained with")
    resources = () if address == IN_PROCESS else record.sweep.resources  # this process has none to reserve
    with on_stored(files, record.sweep, resources, address, code, warn) as execution:
        for result in asked:
            done = stored_audit(files, result.key, request.audit, _copy(result.spec, request, code).seed)
            if done is not None:  # the same copy, which would count as a second audit
                warn(f"{result.key} was audited so before, as shown; another --seed audits another copy")
            yield done or write_audit(files, _audited(files, result, request, code, execution, on_epoch))


def _asked(files: SweepFiles, record: SweepRecord, request: AuditRequest) -> list[TrialResult]:
    results = (record.finished(point.key) for point in record.points)
    finished = {result.key: result for result in results if result is not None and result.worst_case.is_private}
    unknown = [key for key in request.only if key not in finished]
    if unknown or not finished:
        named = f" {unknown[0]!r}" if unknown else ""
        there = ", ".join([*finished][:5]) or "none"
        raise InvalidInput(f"{files.root} has no finished private trial{named} to audit; it has: {there}")
    chosen = [finished[key] for key in dict.fromkeys(request.only)] if request.only else [*finished.values()]
    selected = [result.key for result in chosen if result.spec.selection is not None]
    if selected:
        raise InvalidInput(
            f"{selected[0]} is the best of a private selection, and an audit examines a single run; name another trial"
        )
    return chosen


def _audited(
    files: SweepFiles,
    result: TrialResult,
    request: AuditRequest,
    code: UserCode,
    execution: Backend,
    on_epoch: OnEpoch,
) -> AuditRecord:
    trial = files.trial(result.key)
    require_unaltered(trial, result, trial.trace)
    begun = time.monotonic()
    spec = _copy(result.spec, request, code)
    copy = AuditedCopy(result.key, spec, _given_releases(trial, spec, code), digest_of_its_data(trial))
    found = execution.audit(copy, on_epoch)
    seconds = time.monotonic() - begun
    return record_of(result.key, found, request.audit.canaries, spec.seed, result.worst_case.epsilon, seconds)


def _copy(spec: TrialSpec, request: AuditRequest, code: UserCode) -> TrialSpec:
    """Return the settings of the copy; norms only where the clipping method needs them, and no other attacks."""
    return replace(
        spec,
        seed=derive_seed(spec.seed, f"audit {request.seed}"),
        audit=request.audit,
        attacks=AttackSpec(),
        norms=spec.norms if make_clipping(spec.clipping, code).refreshes else NormSpec("off"),
    )


def _given_releases(files: TrialFiles, copy: TrialSpec, code: UserCode) -> tuple[Release, ...]:
    """Return the releases of the trial besides those that its own settings make."""
    trace = read_trace(files.trace)
    return trace.releases[len(mechanism_of(copy, make_clipping(copy.clipping, code), trace.dataset_size).releases) :]
