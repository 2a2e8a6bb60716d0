"""Checks the claims in stored results against the recomputed cost of their traces.

Checksums find damage, but not tampering: whoever can write a result can write its checksum too. This check finds a
claim that is smaller than the cost of the stored trace; it does not find a trace that was forged as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator

from accounting.accountants import ACCOUNTANTS, account
from accounting.attacks import FALSE_POSITIVE_RATES, AttackRisk, attack_risk, privacy_curve, rate_name
from accounting.errors import START_ANEW, DataCorruption
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import Trace
from accounting.records import TrialFiles, read_trace
from orchestration.comparison.record import SweepRecord
from orchestration.records.attempts import Attempt
from orchestration.records.layout import SweepFiles
from orchestration.records.release_modes import release_spec
from orchestration.records.results import StoppedTrial, StoredResult
from orchestration.sweeps.schema import SweepSpec

_ROUNDING = 1e-6
"""Relative tolerance: far above rounding errors, far below any relevant difference."""


def unfounded(files: SweepFiles, record: SweepRecord) -> Iterator[str]:
    """One line for each stored claim that is smaller than the cost of its trace, or for another delta or adjacency.

    Equal traces, such as those of several seeds, are accounted once. Raises: DataCorruption for a missing or damaged
    trace.
    """
    for point in record.points:
        result = record.status(point.key).result
        if result is None:
            continue
        trial = files.trial(point.key)
        trace = result.trace if isinstance(result, StoppedTrial) else _stored_trace(trial)
        attempts = record.attempts.get(point.key, ())
        for reason in (*_claims(result, trace, point.spec.delta, record.sweep), *_ledger(attempts, trace, result)):
            yield f"{trial.result}: {reason}; restore the trial from a backup, or {START_ANEW}"


def _stored_trace(trial: TrialFiles) -> Trace:
    """The stored trace of a trial. Raises: DataCorruption if it is damaged or missing: no claim can be checked then."""
    try:
        return read_trace(trial.trace)
    except FileNotFoundError as error:
        raise DataCorruption(f"{trial.trace} is missing; restore it from a backup, or {START_ANEW}") from error


def _claims(result: StoredResult, trace: Trace, delta: float, sweep: SweepSpec) -> Iterator[str]:
    """Check the claims of a result by the accountants and group sizes that the result itself names.

    The sweep file may have changed since and ask for others.
    """
    yield from _smaller("epsilon", result.worst_case, trace, delta, _named(result.worst_case, sweep))
    for other in result.others:
        yield from _smaller(f"epsilon by {other.accountant}", other, trace, delta, _named(other, sweep))
    groups = [estimate for estimate in result.groups if estimate.group_size > 1]
    for group in groups:
        size = group.group_size
        yield from _smaller(f"epsilon of groups of {size}", group, trace, delta, "pld", size)
    for risk in result.risks:
        yield from _smaller_risk(risk, trace, {1, *(group.group_size for group in groups)})
    epochs = () if isinstance(result, StoppedTrial) else zip(result.training.history, result.epsilons, strict=False)
    for epoch, shown in epochs:
        least = min(_cost(trace.until(epoch.step), delta, "rdp", 1).epsilon, result.worst_case.epsilon)
        if shown < least * (1.0 - _ROUNDING):
            yield f"it claims epsilon {shown:.6g} after epoch {epoch.epoch}, but its trace had cost {least:.6g}"
    release = release_spec(sweep.release.name, sweep.release.params)
    if release is not None and result.individuals is not None:
        alone = _cost(Trace(trace.dataset_size, releases=release.releases()), delta, "auto", 1).epsilon
        if (result.individuals.release_epsilon or 0.0) < alone * (1.0 - _ROUNDING):
            yield f"it claims that its statistics cost {result.individuals.release_epsilon}, but they cost {alone:.6g}"


def _named(claim: PrivacyEstimate, sweep: SweepSpec) -> str:
    """The accountant that recomputes a claim: its own or, for the names ``none`` and ``filter``, the sweep's.

    These two names are no accountants; any accountant gives the same result in these cases.
    """
    return claim.accountant if claim.accountant in ACCOUNTANTS else sweep.privacy.accountant


def _smaller(
    what: str, claim: PrivacyEstimate, trace: Trace, delta: float, accountant: str, size: int = 1
) -> Iterator[str]:
    found = _cost(trace, delta, accountant, size)
    if claim.delta != delta or claim.adjacency != found.adjacency:
        yield (
            f"it claims {what} at delta {claim.delta:g} and adjacency {claim.adjacency}, but the trial's delta is "
            f"{delta:g} and the adjacency of its trace {found.adjacency}"
        )
    if claim.epsilon < found.epsilon * (1.0 - _ROUNDING) or (math.isinf(found.epsilon) and claim.is_private):
        yield f"it claims {what} {claim.epsilon:.6g}, but its trace costs {found.epsilon:.6g}"
    if claim.is_private and claim.kind == "guarantee" == trace.kind and found.kind == "estimate":
        yield f"it claims that {what} is a guarantee, but by {accountant} it is an estimate"


def _smaller_risk(claim: AttackRisk, trace: Trace, sizes: Collection[int]) -> Iterator[str]:
    """One line for each bound on attacks that is below the recomputed bound of the trace.

    If the noise follows results, the claimed bounds are those of the plan, whose numerical error differs from the error
    for the trace: they are compared with the proven lower end of the recomputed bound.
    """
    if claim.group_size not in sizes:
        yield f"it bounds attacks on groups of {claim.group_size}, of which it claims no epsilon"
        return
    found = _risk(trace, claim.group_size)
    whose = "one record" if claim.group_size == 1 else f"groups of {claim.group_size}"
    if (claim.unit, claim.adjacency) != (found.unit, found.adjacency):
        yield (
            f"it bounds attacks on {claim.unit} under adjacency {claim.adjacency}, but its trace bounds those on "
            f"{found.unit} under {found.adjacency}"
        )
    if len(claim.true_positive_rates) != len(FALSE_POSITIVE_RATES):
        yield f"it claims {len(claim.true_positive_rates)} true positive rates instead of {len(FALSE_POSITIVE_RATES)}"
        return
    names = ("advantage", *map(rate_name, FALSE_POSITIVE_RATES))
    for name, claimed, cost in zip(
        names, (claim.advantage, *claim.true_positive_rates), (found.advantage, *found.true_positive_rates), strict=True
    ):
        least = cost.lower if trace.noise_follows_results else cost.upper
        if not claimed.upper >= least * (1.0 - _ROUNDING):
            yield f"it claims {name} {claimed.upper:.6g} of attacks on {whose}, but its trace allows {least:.6g}"


def _ledger(attempts: tuple[Attempt, ...], trace: Trace, result: StoredResult) -> Iterator[str]:
    """A line if the recorded attempts at the trial cost less than the trial's trace."""
    if not attempts or not trace.is_private:
        return
    delta = result.spec.delta
    recorded = max(_cost(attempt.trace, delta, "rdp", 1).epsilon for attempt in attempts)
    spent = _cost(trace, delta, "rdp", 1).epsilon
    if recorded < spent * (1.0 - _ROUNDING):
        yield f"the record of its attempts claims epsilon {recorded:.6g}, but its trace costs {spent:.6g}"


@functools.lru_cache(maxsize=8192)
def _cost(trace: Trace, delta: float, accountant: str, size: int) -> PrivacyEstimate:
    return account(trace, delta, accountant, size)


@functools.lru_cache(maxsize=8192)
def _risk(trace: Trace, size: int) -> AttackRisk:
    return attack_risk(privacy_curve(trace, size))
