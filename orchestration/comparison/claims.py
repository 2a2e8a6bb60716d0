"""Checks the claims in stored results against the recomputed cost of their traces.

Checksums find damage, but not tampering: whoever can write a result can write its checksum too. This check finds a
claim that is smaller than the cost of the stored trace; it does not find a trace that was forged as well.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dpsweep.accounting.accountants.account import account, account_again
from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES, AttackRisk, rate_name, risk_of
from dpsweep.accounting.calibration.so_far import cost_so_far
from dpsweep.accounting.errors import START_ANEW, DataCorruption, count_of
from dpsweep.accounting.jobs.release import ReleaseSpec
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedAccount
from dpsweep.orchestration.store.release_modes import release_spec
from dpsweep.orchestration.store.remembered import remembered
from dpsweep.orchestration.store.results import StoppedTrial, StoredResult, read_result
from dpsweep.workers.training.history import reasons_of_trial

_ROUNDING = 1e-6
"""Relative tolerance: far above rounding errors, far below any relevant difference."""
_OF_PLAN = 0.01
"""Relative tolerance for bounds on attacks that were computed for another trace, the plan."""


def checked_record(files: SweepFiles) -> SweepRecord:
    """Return the sweep in a folder, for callers that show, export, compare or register what its results claim.

    Raises: as `stored_record`; DataCorruption with a line for each claim that its trace does not bear out.
    """
    record = stored_record(files)
    require_founded(files, record)
    return record


def require_founded(files: SweepFiles, record: SweepRecord) -> None:
    """Raise DataCorruption unless every claim of the record, and of the tuning that it counts, is borne out."""
    wrong = [*unfounded(files, record)]
    if record.candidates:
        tuning = files.of_tuning
        wrong += unfounded(tuning, stored_record(tuning))
    if wrong:
        raise DataCorruption("\n".join(wrong))


def founded_result(files: TrialFiles) -> StoredResult | None:
    """Return the result of a trial by itself, without its sweep. Raises: DataCorruption for a claim that is not
    borne out.
    """
    result = read_result(files.result)
    if result is None:
        return None
    trace = result.trace if isinstance(result, StoppedTrial) else _stored_trace(files)
    wrong = _wrong(_Claims(result, trace, result.spec.delta, reasons_of_trial(result.spec, ())))
    if wrong:
        raise DataCorruption("\n".join(_said(files, line) for line in wrong))
    return result


def unfounded(files: SweepFiles, record: SweepRecord) -> Iterator[str]:
    """Yield one line for each stored claim that its trace does not bear out. It may be smaller than the cost, stronger
    than its kind, for another delta or adjacency, or lack a reason why it is no guarantee.

    A check is remembered by the digest of all that was compared. Equal traces, as of several seeds, are accounted
    once. Raises: DataCorruption for a missing or damaged trace.
    """
    release = release_spec(record.sweep.release.name, record.sweep.release.params)
    for point in record.points:
        result = record.statuses[point.key].result if point.key in record.statuses else None
        if result is None:
            continue
        trial = files.trial(point.key)
        trace = result.trace if isinstance(result, StoppedTrial) else _stored_trace(trial)
        reasons = union((reasons_of_trial(result.spec, ()), reasons_of_trial(point.spec, ())))
        attempts, accounts = record.attempts.get(point.key, ()), record.accounts.get(point.key, ())
        claims = _Claims(result, trace, point.spec.delta, reasons, attempts, accounts, release)
        yield from (_said(trial, line) for line in _wrong(claims))


def recomputed(trace: Trace, delta: float, accountant: str, size: int = 1) -> PrivacyEstimate:
    """Return `dpsweep.accounting.accountants.account.account`, remembered for the same trace and question. Raises: as
    it."""
    question = f"cost {trace!r} {delta!r} {accountant} {size}"
    found = parsed_json(remembered(question, lambda: json.dumps(asdict(account(trace, delta, accountant, size)))))
    return PrivacyEstimate(**{**found, "reasons": tuple(found["reasons"])})


@dataclass(frozen=True)
class _Claims:
    """All that a stored trial claims, and what it is compared with.

    reasons: those that its specification gives, as the sweep file and as the result hold it.
    """

    result: StoredResult
    trace: Trace
    delta: float
    reasons: tuple[Reason, ...]
    attempts: tuple[Attempt, ...] = ()
    accounts: tuple[PublishedAccount, ...] = ()
    release: ReleaseSpec | None = None

    @property
    def epochs(self) -> list[tuple[int, int, float]]:
        """Return the number and last step of each epoch, and the epsilon that the result shows after it."""
        if isinstance(self.result, StoppedTrial):
            return []
        shown = zip(self.result.training.history, self.result.epsilons, strict=False)
        return [(epoch.epoch, epoch.step, epsilon) for epoch, epsilon in shown]

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the last step of each epoch."""
        return tuple(step for _, step, _ in self.epochs)

    @property
    def of_run(self) -> tuple[Reason, ...]:
        """Return the reasons that the specification and the data of the trial give."""
        told = () if isinstance(self.result, StoppedTrial) else self.result.training.reasons
        return union((self.reasons, told)) if self.result.spec.is_private else ()

    @property
    def expected(self) -> tuple[Reason, ...]:
        """Return the reasons that every claim of the trial must give."""
        return union((self.of_run, self.result.reasons)) if self.result.spec.is_private else ()

    def question(self) -> str:
        """Return a text that determines what `_unfounded` says."""
        result = self.result
        costs = (result.worst_case, result.others, result.groups, result.risks, self.epochs, self.expected)
        compared = (
            self.trace,
            self.delta,
            result.spec.unit,
            result.spec.delta,
            self.attempts,
            self.accounts,
            self.release,
        )
        return repr(("claims", _own_code(), type(result).__name__, costs, result.individuals, compared))


@functools.cache
def _own_code() -> str:
    """Return a sha256 of this file, with which what it has found before is forgotten when it looks for more."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _said(trial: TrialFiles, line: str) -> str:
    return f"{trial.result}: {line}; restore the trial from a backup, or {START_ANEW}"


def _wrong(claims: _Claims) -> list[str]:
    found: list[str] = parsed_json(remembered(claims.question(), lambda: json.dumps(list(_unfounded(claims)))))
    return found


def _stored_trace(trial: TrialFiles) -> Trace:
    """Return the stored trace of a trial. Raises: DataCorruption if it is damaged or missing: no claim can be
    checked then.
    """
    try:
        return read_trace(trial.trace)
    except FileNotFoundError as error:
        raise DataCorruption(f"{trial.trace} is missing; restore it from a backup, or {START_ANEW}") from error


def _unfounded(claims: _Claims) -> Iterator[str]:
    """Check claims by the accountants and group sizes that they name themselves.

    The sweep file may have changed since and ask for others.
    """
    result, trace, delta = claims.result, claims.trace, claims.delta
    if trace.unit != result.spec.unit:
        found, asked = trace.unit, result.spec.unit
        rows = count_of(found.rows, "row")
        yield f"its trace protects {found.name} of {rows}, but its spec {asked.name} of {asked.rows}"
    yield from _smaller("epsilon", result.worst_case, trace, delta)
    for other in result.others:
        yield from _smaller(f"epsilon by {other.accountant}", other, trace, delta)
    for group in result.groups:
        yield from _smaller(f"epsilon of groups of {group.group_size}", group, trace, delta)
    for risk in result.risks:
        yield from _smaller_risk(risk, trace, {1, *(group.group_size for group in result.groups)})
    for epoch, step, shown in claims.epochs:
        least = cost_so_far(trace, claims.ends, step, replace(result.worst_case, delta=delta))
        if not shown >= least * (1.0 - _ROUNDING):
            yield f"it claims epsilon {shown:.6g} after epoch {epoch}, but its trace had cost {least:.6g}"
    if claims.release is not None and result.individuals is not None:
        alone = _cost(Trace(trace.dataset_size, releases=claims.release.releases()), delta, "auto", 1).epsilon
        if not (result.individuals.release_epsilon or 0.0) >= alone * (1.0 - _ROUNDING):
            yield f"it claims that its statistics cost {result.individuals.release_epsilon}, but they cost {alone:.6g}"
    yield from _stronger(claims)
    for again in claims.accounts:
        yield from _of_account(again, trace)
    yield from _ledger(claims)


def _stronger(claims: _Claims) -> Iterator[str]:
    """Yield one line for each claim that does not give all reasons why it is an estimate."""
    result, expected = claims.result, claims.expected
    individuals = [] if result.individuals is None else [result.individuals]
    claimed: list[tuple[Kind, tuple[Reason, ...]]] = [
        *((each.kind, each.reasons) for each in (result.worst_case, *result.others, *result.groups)),
        *((risk.kind, risk.reasons) for risk in result.risks),
        *((each.kind, each.reasons) for each in individuals),
        *((account.kind, account.reasons) for account in claims.accounts),
    ]
    bounds = [(kind, reasons) for kind, reasons in claimed if kind not in ("none", "lower_bound")]
    if lost := union(set(expected).difference(reasons) for _, reasons in bounds):
        yield f"it claims guarantees without saying why they are none: {', '.join(lost)}"
    if any(reasons and kind != "estimate" for kind, reasons in bounds):
        yield "it claims a guarantee and gives reasons why it is none"
    if lost := union(set(claims.of_run).difference(attempt.reasons) for attempt in claims.attempts):
        yield f"the record of its attempts does not say why they guarantee nothing: {', '.join(lost)}"


def _of_account(again: PublishedAccount, trace: Trace) -> Iterator[str]:
    """Yield one line for each epsilon of `dpsweep account` that is below the cost of the trace."""
    sizes = {1: (again.epsilon, again.accountant), **{k: (e, "pld") for k, e in again.group_epsilons.items()}}
    for size, (claimed, accountant) in sizes.items():
        found = _cost(trace, again.delta, accountant, size).epsilon
        if not claimed >= found * (1.0 - _ROUNDING):
            yield (
                f"account {again.name} claims epsilon {claimed:.6g} of {count_of(size, 'record')}, but its trace "
                f"costs {found:.6g}"
            )


def _smaller(what: str, claim: PrivacyEstimate, trace: Trace, delta: float) -> Iterator[str]:
    accountant = claim.accountant if claim.group_size == 1 else "pld"
    found = _cost(trace, delta, accountant, claim.group_size)
    if claim.unit != found.unit:
        yield f"it claims {what} per {claim.unit}, but its trace costs that per {found.unit}"
    if claim.delta != delta or claim.adjacency != found.adjacency:
        yield (
            f"it claims {what} at delta {claim.delta:g} and adjacency {claim.adjacency}, but the trial's delta is "
            f"{delta:g} and the adjacency of its trace {found.adjacency}"
        )
    if not claim.epsilon >= found.epsilon * (1.0 - _ROUNDING) or (math.isinf(found.epsilon) and claim.is_private):
        yield f"it claims {what} {claim.epsilon:.6g}, but its trace costs {found.epsilon:.6g}"
    if claim.lower_epsilon is not None and not claim.lower_epsilon <= claim.epsilon * (1.0 + _ROUNDING):
        yield f"it claims {what} {claim.epsilon:.6g}, and that it is at least {claim.lower_epsilon:.6g}"
    is_bounded = trace.noise_follows_results and not trace.ended_by_results  # by the plan, which the trace is not
    if claim.is_private and claim.kind == "guarantee" and found.kind == "estimate" and not is_bounded:
        yield f"it claims that {what} is a guarantee, but by {found.accountant} it is an estimate"


def _smaller_risk(claim: AttackRisk, trace: Trace, sizes: Collection[int]) -> Iterator[str]:
    """Yield one line for each bound on attacks that is below the recomputed bound of the trace.

    If the noise follows results, the claimed bounds come from the plan, whose numerical error differs from the error
    for the trace by less than `_OF_PLAN`.
    """
    if claim.group_size not in sizes:
        yield f"it bounds attacks on groups of {claim.group_size}, of which it claims no epsilon"
        return
    found = risk_of(trace, claim.group_size)
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
        least = cost.upper * (1.0 - _OF_PLAN) if trace.noise_follows_results else cost.upper
        if not claimed.upper >= least * (1.0 - _ROUNDING):
            yield f"it claims {name} {claimed.upper:.6g} of attacks on {whose}, but its trace allows {least:.6g}"


def _ledger(claims: _Claims) -> Iterator[str]:
    """Yield a line if the recorded attempts at the trial cost less than the trial's trace."""
    if not claims.attempts or not claims.trace.is_private:
        return
    delta = claims.result.spec.delta
    recorded = max(_roughly(attempt.trace, delta) for attempt in claims.attempts)
    spent = _roughly(claims.trace, delta)
    if not recorded >= spent * (1.0 - _ROUNDING):
        yield f"the record of its attempts claims epsilon {recorded:.6g}, but its trace costs {spent:.6g}"


def _roughly(trace: Trace, delta: float) -> float:
    """Return the epsilon of a run by Renyi DP, the quickest, or where that does not cover it by the tightest."""
    return _cost(trace, delta, "rdp", 1).epsilon


@functools.lru_cache(maxsize=8192)
def _cost(trace: Trace, delta: float, claimed: str, size: int) -> PrivacyEstimate:
    return account_again(trace, delta, claimed, size)
