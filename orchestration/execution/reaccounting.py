"""Account finished trials again, from stored norms and traces: at another delta, by another method, for groups."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.individual import individual_reasons
from dpsweep.accounting.jobs.examples import AccountingJob, Part, PartwiseJob, Result, Scatter, account_all
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting
from dpsweep.accounting.jobs.user_accounting import account_users
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, in_words, union, weakened
from dpsweep.accounting.records.epsilon_files import StoredEpsilons
from dpsweep.accounting.records.files import delete_partials
from dpsweep.accounting.records.shards import has_norms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import StoredUsers, read_user_groups
from dpsweep.orchestration.comparison.claims import recomputed, require_founded
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.execution.backend import Warn
from dpsweep.orchestration.execution.backends import on_stored
from dpsweep.orchestration.execution.example_statistics import exact_statistics
from dpsweep.orchestration.execution.upkeep import trained
from dpsweep.orchestration.store.integrity import require_unaltered
from dpsweep.orchestration.store.later_results import write_account
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import IndividualStatistics
from dpsweep.orchestration.store.results import StoredResult
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import NO_CODE


@dataclass(frozen=True)
class ReaccountingRequest:
    """The finished trials to account again, and the method.

    `trial`: key of one trial; by default, all private ones.
    `delta`, `individual`: by default, as in the sweep.
    `group_sizes`: sizes k of groups of any k records.
    `group_by`: a file of groups (`dpsweep.accounting.records.user_files.read_user_groups`), or "".
    `users`: whether to account each user as well.
    """

    trial: str | None = None
    delta: float | None = None
    individual: str | None = None
    group_sizes: tuple[int, ...] = ()
    group_by: str = ""
    users: bool = False


@dataclass(frozen=True)
class OfUsers:
    """Exact statistics of the epsilons of users, each for all records of the user together: private data.

    `users`: number of users. `most_records`: most records of one user. `largest`: the largest epsilon of a user.
    """

    users: int
    most_records: int
    largest: float
    statistics: IndividualStatistics


@dataclass(frozen=True)
class TrialCosts:
    """The costs of one trial. individuals: exact statistics of its training examples, private data.

    examples: number of accounted examples. seconds: duration of the accounting. folder: where epsilons are stored.
    """

    key: str
    worst_case: PrivacyEstimate
    groups: tuple[PrivacyEstimate, ...]
    individuals: IndividualStatistics
    examples: int
    seconds: float
    folder: str
    users: OfUsers | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without times."""
        return {
            "key": self.key,
            "folder": self.folder,
            "examples": self.examples,
            **self.worst_case.as_dict(),
            "groups": [estimate.as_dict() for estimate in self.groups],
            "individuals": dataclasses.asdict(self.individuals),
            **({} if self.users is None else {"users": dataclasses.asdict(self.users)}),
        }


OnPart = Callable[[str, int, int], None]
"""Called after each accounted part with the key of the trial, the parts done and all parts."""


def account_trials_again(
    folder: SweepFiles, request: ReaccountingRequest, address: str, on_part: OnPart, warn: Warn
) -> Iterator[TrialCosts]:
    """Account the trials one after the other, and store each answer privately in a folder named by delta and method.

    Parts that are already stored there for the same norms are not computed again. Raises: InvalidInput, before any
    accounting, for a trial that cannot be accounted; DataCorruption for damaged files.
    """
    record = owned_record(folder)
    require_founded(folder, record)
    results = _asked(folder, record, request)
    if request.group_by:
        read_user_groups(request.group_by)
    with on_stored(folder, record.sweep, (), address, NO_CODE, warn) as execution:
        for sentence in in_words(union(result.reasons for result in results)):
            warn(sentence)
        for result in results:
            yield _answer(folder.trial(result.key), result, record.sweep, request, execution.scatter, on_part)


def _asked(files: SweepFiles, record: SweepRecord, request: ReaccountingRequest) -> list[StoredResult]:
    finished = [result for result in trained(record) if result.worst_case.is_private]
    found = [result for result in finished if request.trial in (None, result.key)]
    if not found:
        keys = ", ".join(result.key for result in finished[:5]) or "none"
        wanted = f"no finished private trial {request.trial!r}" if request.trial else "no finished private trial"
        raise InvalidInput(f"{files.root} has {wanted}; it has: {keys}")
    never = [result.key for result in found if result.spec.norms.are_off]
    if never:
        raise InvalidInput(
            f"norms.refreshes_per_epoch is off for {', '.join(never)}, and without norms nothing is accounted again; "
            "name another trial with --trial, or ask `dpsweep epsilon --trial` for the worst case"
        )
    pruned = [result.key for result in found if not has_norms(files.trial(result.key).norms)]
    if pruned:
        raise InvalidInput(
            f"the norms of {', '.join(pruned)} were deleted, and without them nothing can be accounted again; restore "
            "them from a backup, or name another trial with --trial"
        )
    return found


def _answer(
    files: TrialFiles,
    result: StoredResult,
    sweep: SweepSpec,
    request: ReaccountingRequest,
    scatter: Scatter,
    on_part: OnPart,
) -> TrialCosts:
    require_unaltered(files, result, files.trace)
    begun, trace = time.monotonic(), read_trace(files.trace)
    delta = result.worst_case.delta if request.delta is None else request.delta
    method = request.individual or sweep.accounting.individual
    folder = files.accounted_again(f"delta={delta!r},{method}")
    for of_killed in (folder, f"{folder}/epsilons", f"{folder}/users"):
        delete_partials(of_killed)
    worst = weakened(recomputed(trace, delta, sweep.privacy.accountant), result.reasons)
    groups = tuple(weakened(recomputed(trace, delta, "pld", size), result.reasons) for size in request.group_sizes)
    names = read_user_groups(request.group_by).names if request.group_by else result.group_names
    job = AccountingJob(
        files.root,
        delta,
        method,
        counting=Counting(worst.epsilon),
        folder=f"{folder}/epsilons",
        group_by=request.group_by,
    )

    def counted(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        for done, each in enumerate(scatter(job, parts), start=1):
            on_part(result.key, done, len(parts))
            yield each

    users = _of_users(job, result.reasons, counted) if request.users else None
    summary = account_all(job, counted)
    individuals = exact_statistics(
        CountedEpsilons(summary, StoredEpsilons(job.folder)), names, worst, individual_reasons(trace)
    )
    answer = TrialCosts(
        result.key, worst, groups, individuals, summary.examples, time.monotonic() - begun, folder, users
    )
    write_account(folder, answer.as_dict())
    return answer


def _of_users(job: AccountingJob, reasons: tuple[Reason, ...], scatter: Scatter) -> OfUsers:
    """Account every user by privacy loss distributions, into a folder beside the epsilons of examples.

    Raises: InvalidInput if no users are stored, and if no finite epsilon bounds the user with the most records.
    """
    files = TrialFiles(job.root)
    most = StoredUsers(files.users).most_records
    folder = job.folder.removesuffix("/epsilons")
    trace = read_trace(files.trace)
    bound = account(trace, job.delta, "pld", max(most, 1))  # not kept: the number of records is private
    if not math.isfinite(bound.epsilon):
        raise InvalidInput(
            f"{job.root}: no finite epsilon is known for a user of {count_of(most, 'record')}; raise delta"
        )
    asked = replace(job, method="pld", counting=Counting(bound.epsilon), folder=f"{folder}/users", group_by="")
    summary = account_users(asked, scatter)
    counted = CountedEpsilons(summary, StoredEpsilons(asked.folder))
    statistics = exact_statistics(counted, (), weakened(bound, reasons), trace.individual_reasons)
    return OfUsers(summary.examples, most, float(summary.everyone.epsilons.high[0]), statistics)
