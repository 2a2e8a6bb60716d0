"""Accounting the examples of a stored trial, or its users, part by part.

The unit of work is stateless: `account_part` reads one fixed range of examples across all snapshots, stores its
epsilons and returns their hash and sufficient statistics. One that an interrupted run has stored is not computed
again. A missing part is an error, never a zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from accounting.errors import DataCorruption
from accounting.individual import individual_epsilons
from accounting.mechanism import Trace
from accounting.records import (
    Epsilons,
    NormShards,
    PartFiles,
    PartRecord,
    StoredUsers,
    TrialFiles,
    commit_epsilons,
    forget_notes,
    noted_epsilons,
    read_contributions,
    read_groups,
    read_trace,
    write_epsilons,
)
from accounting.summaries import Counting, EpsilonSummary, summarise
from accounting.users import epsilons_of_users


@dataclass(frozen=True)
class AccountingJob:
    """What to account: a trial's root (absolute path or URI), delta, and the method (``rdp`` or ``pld``).

    counting: what the summary counts. folder: where the epsilons are stored. group_by: a file of groups
    (`accounting.records.read_groups`) that the summary counts in place of the trial's own; "" for these.
    """

    root: str
    delta: float
    method: str = "rdp"
    _: KW_ONLY
    counting: Counting
    folder: str
    group_by: str = ""
    unit: str = "example"
    """A key of `UNITS`."""


@dataclass(frozen=True)
class Work:
    """One part of a job: the norms that its epsilons depend on, and how they follow from the trace."""

    job: AccountingJob
    norms: object
    epsilons: Callable[[Trace], Epsilons]

    def inputs(self, trace: Trace) -> str:
        """Digest of what determines the epsilons: trace, norms, delta and method."""
        return hashlib.sha256(repr((trace, self.job.delta, self.job.method, self.norms)).encode()).hexdigest()


@dataclass(frozen=True)
class PartResult:
    """A part whose epsilons are stored: the line that commits it, and their sufficient statistics."""

    part: int
    record: PartRecord
    summary: EpsilonSummary


Scatter = Callable[[AccountingJob, Sequence[PartFiles]], Iterator[PartResult]]
"""Accounts the given parts and yields their results in the same order."""


def account_part(job: AccountingJob, part: PartFiles) -> PartResult:
    """Store the epsilon of every example in one part, unless it was stored by a run that was interrupted.

    A pure function of the trial's verified shards and trace. The claim is that of `accounting.individual.epsilons`.
    Raises: DataCorruption for missing, cut or altered files, StorageError.
    """
    trace, work = read_trace(TrialFiles(job.root).trace), UNITS[job.unit](job, part)
    inputs = work.inputs(trace)
    stored = noted_epsilons(job.folder, part.part, inputs)
    if stored is None:
        epsilons = work.epsilons(trace)
        stored = write_epsilons(job.folder, part.part, epsilons, inputs), epsilons
    record, epsilons = stored
    if job.group_by:
        epsilons = replace(epsilons, groups=read_groups(job.group_by).labels_of(epsilons.example_ids))
    return PartResult(part.part, record, summarise(epsilons, job.counting))


def epsilons_of_part(job: AccountingJob, part: PartFiles, trace: Trace) -> Epsilons:
    """Epsilon of every example in one part. Raises: DataCorruption for missing, cut or altered files."""
    rows = read_contributions(part)
    result = individual_epsilons(rows.steps, rows.contributions, trace, job.delta, job.method)
    return Epsilons(
        example_ids=rows.example_ids,
        groups=rows.groups,
        upper=result.upper,
        lower=result.lower,
        losses=rows.losses,
        delta=result.delta,
        method=result.method,
        kind=result.kind,
    )


def _of_examples(job: AccountingJob, part: PartFiles) -> Work:
    """The epsilons of the examples of one part."""
    return Work(job, part.identity, lambda trace: epsilons_of_part(job, part, trace))


def _of_users(job: AccountingJob, part: PartFiles) -> Work:
    """The epsilons of one share of the users. There are as many shares as parts, and each depends on all norms."""
    shards, users = NormShards(TrialFiles(job.root).norms), StoredUsers(TrialFiles(job.root).users)
    norms = (tuple(shards.files(each).identity for each in shards.parts), users.digests())
    return Work(job, norms, lambda trace: epsilons_of_users(shards, users, trace, job.delta, part.part))


UNITS: Mapping[str, Callable[[AccountingJob, PartFiles], Work]] = {"example": _of_examples, "user": _of_users}
"""Whose epsilons a job computes: those of each part's examples, or of users, with a share of the users per part."""


def account_in_process(job: AccountingJob, parts: Sequence[PartFiles]) -> Iterator[PartResult]:
    """Account the parts one after the other in this process: `AccountingQueue.scatter` without Ray."""
    return (account_part(job, part) for part in parts)


def store_epsilons(job: AccountingJob, scatter: Scatter = account_in_process) -> EpsilonSummary:
    """Account every example of a trial, store the epsilons privately, and return their summary.

    Parts stored by a run that was interrupted are not computed again. Raises: as `account_all`.
    """
    summary = account_all(job, scatter)
    forget_notes(job.folder)
    return summary


def account_all(job: AccountingJob, scatter: Scatter) -> EpsilonSummary:
    """`store_epsilons` that keeps the notes of stored parts, so that a repeated call does not compute them again.

    The calling process holds the record of each part and a few summaries, never an epsilon per example. Raises:
    DataCorruption when training was interrupted, when examples lack shards, or when files are damaged.
    """
    files = TrialFiles(job.root)
    shards = NormShards(files.norms)
    shards.require_complete(read_trace(files.trace).dataset_size)
    parts = [shards.files(part) for part in shards.parts]
    return gathered(job, (_checked(result, part) for part, result in _in_order(scatter, job, parts)))


def gathered(job: AccountingJob, results: Iterator[PartResult]) -> EpsilonSummary:
    """Commit the stored parts (at least one) and merge their summaries."""
    first = next(results)
    records, summary = [first.record], first.summary
    for result in results:
        records.append(result.record)
        summary = summary.merged(result.summary)
    commit_epsilons(job.folder, records)
    return summary


def _in_order(scatter: Scatter, job: AccountingJob, parts: Sequence[PartFiles]) -> Iterator[tuple[int, PartResult]]:
    results = scatter(job, parts)
    for part in (each.part for each in parts):
        result = next(results, None)
        if result is None:
            raise DataCorruption(f"{job.root}: part {part} was not accounted; run the accounting again")
        yield part, result


def _checked(result: PartResult, part: int) -> PartResult:
    if result.part != part:
        raise DataCorruption(f"part {result.part} was returned in place of part {part}; run the accounting again")
    return result
