"""Accounting the examples of a stored trial part by part.

The unit of work is stateless: `AccountingJob.account` reads one fixed range of examples across all snapshots, stores
its epsilons and returns their hash and sufficient statistics. One that an interrupted run has stored is not computed
again. A missing part is an error, never a zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol, TypeVar

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.jobs.summaries import Counting, EpsilonSummary, summarise
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.arrow_parts import PartRecord, commit_parts
from dpsweep.accounting.records.epsilon_files import (
    Epsilons,
    forget_notes,
    noted_epsilons,
    write_epsilons,
)
from dpsweep.accounting.records.part_files import PartFiles
from dpsweep.accounting.records.shards import NormShards, read_contributions
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import read_user_groups


class Numbered(Protocol):
    """The unit of work of a job: a range of examples, or a share of the users, by its number."""

    @property
    def part(self) -> int: ...


Part = TypeVar("Part", bound=Numbered)
Result = TypeVar("Result", bound=Numbered)
_Part = TypeVar("_Part", bound=Numbered, contravariant=True)
_Result = TypeVar("_Result", bound=Numbered, covariant=True)


class PartwiseJob(Protocol[_Part, _Result]):
    """Work on the parts of the trial at ``root``, each alone and anywhere: what is done twice is done once."""

    @property
    def root(self) -> str: ...

    def account(self, part: _Part, /) -> _Result:
        """Return a pure function of stored files. Its result has the number of the part."""


class Scatter(Protocol):
    """Accounts the given parts and yields their results in the same order."""

    def __call__(self, job: PartwiseJob[Part, Result], parts: Sequence[Part], /) -> Iterator[Result]: ...


@dataclass(frozen=True)
class AccountingJob:
    """The trial and method to account by: a trial's root (absolute path or URI), delta, and the method (``rdp`` or
    ``pld``).

    counting: what the summary counts. folder: where the epsilons are stored. group_by: a file of groups
    (`dpsweep.accounting.records.user_files.read_user_groups`) that the summary counts in place of the trial's
    own; "" for these.
    """

    root: str
    delta: float
    method: str = "rdp"
    _: KW_ONLY
    counting: Counting
    folder: str
    group_by: str = ""

    def account(self, part: PartFiles) -> PartResult:
        """Store the epsilon of every example in one part, unless it was stored by a run that was interrupted.

        A pure function of the trial's verified shards and trace. The claim is that of
        `dpsweep.accounting.individual.epsilons`. Raises: DataCorruption for missing, cut or altered files,
        StorageError.
        """
        trace = read_trace(TrialFiles(self.root).trace)
        inputs = inputs_of(self, trace, part.identity)
        stored = taken_up(self, part.part, inputs)
        return stored or store_part(self, part.part, epsilons_of_part(self, part, trace), inputs)


@dataclass(frozen=True)
class PartResult:
    """A part whose epsilons are stored: the line that commits it, and their sufficient statistics."""

    part: int
    record: PartRecord
    summary: EpsilonSummary


def account_part(job: PartwiseJob[Part, Result], part: Part) -> Result:
    """Return what the job makes of a part; a function, as Ray wants it."""
    return job.account(part)


def inputs_of(job: AccountingJob, trace: Trace, norms: object) -> str:
    """Return the digest of the inputs of epsilons: trace, delta, method, and the norms, by their identity."""
    return hashlib.sha256(repr((trace, job.delta, job.method, norms)).encode()).hexdigest()


def taken_up(job: AccountingJob, part: int, inputs: str) -> PartResult | None:
    """Return a part that an interrupted run has stored from the same inputs; None if there is none, or it is
    damaged.
    """
    stored = noted_epsilons(job.folder, part, inputs)
    return None if stored is None else _result(job, part, *stored)


def store_part(job: AccountingJob, part: int, epsilons: Epsilons, inputs: str) -> PartResult:
    """Store the epsilons of a part. inputs: digest of their inputs. Raises: StorageError."""
    return _result(job, part, write_epsilons(job.folder, part, epsilons, inputs), epsilons)


def _result(job: AccountingJob, part: int, record: PartRecord, epsilons: Epsilons) -> PartResult:
    if job.group_by:
        epsilons = replace(epsilons, groups=read_user_groups(job.group_by).labels_of(epsilons.example_ids))
    return PartResult(part, record, summarise(epsilons, job.counting))


def epsilons_of_part(job: AccountingJob, part: PartFiles, trace: Trace) -> Epsilons:
    """Return the epsilon of every example in one part. Raises: DataCorruption for missing, cut or altered files."""
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


def account_in_process(job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
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
    """Return `store_epsilons` that keeps the notes of stored parts, so that a repeated call does not compute them
    again.

    The calling process holds the record of each part and a few summaries, never an epsilon per example. Raises:
    DataCorruption when training was interrupted, when examples lack shards, or when files are damaged.
    """
    files = TrialFiles(job.root)
    shards = NormShards(files.norms)
    shards.require_complete(read_trace(files.trace).dataset_size)
    parts = [shards.files(part) for part in shards.parts]
    return gathered(job, in_order(scatter, job, parts))


def gathered(job: AccountingJob, results: Iterator[PartResult]) -> EpsilonSummary:
    """Commit the stored parts (at least one) and merge their summaries."""
    first = next(results)
    records, summary = [first.record], first.summary
    for result in results:
        records.append(result.record)
        summary = summary.merged(result.summary)
    commit_parts(job.folder, records)
    return summary


def in_order(scatter: Scatter, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
    """Yield the results of all parts. Raises: DataCorruption when one is missing, or there is another in its place."""
    results = scatter(job, parts)
    for part in (each.part for each in parts):
        result = next(results, None)
        if result is None:
            raise DataCorruption(f"{job.root}: part {part} was not accounted; run the accounting again")
        if result.part != part:
            raise DataCorruption(f"part {result.part} was returned in place of part {part}; run the accounting again")
        yield result
