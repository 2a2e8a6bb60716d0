"""Accounting of the users of a stored trial, whose records may lie in any part of the norms: a group-by over the parts.

A user's epsilon needs all records of that user at every snapshot together. Users are divided into shares, by the
remainder of their id: as many as there are parts, or up to `LEAST_TASKS` of `USERS_AT_ONCE` users each. Tasks over a
few parts each read their norms once and write the rows in the order of shares (`dpsweep.accounting.records.user_rows`).
Then one task for each share reads its rows from these files and accounts its users. So every byte is read a fixed
number of times, however many parts there are. Where one or two shares are to be accounted, each reads the norms
themselves.

Both kinds of task are stateless and idempotent, as in `dpsweep.accounting.jobs`: what an interrupted run has stored,
rows or epsilons, is not made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.jobs.examples import (
    AccountingJob,
    PartResult,
    Scatter,
    gathered,
    in_order,
    inputs_of,
    store_part,
    taken_up,
)
from dpsweep.accounting.jobs.summaries import EpsilonSummary
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.accounting.records.files import delete_folder, list_files
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import OwnedPart, StoredUsers
from dpsweep.accounting.records.user_rows import ShareOfRows, SortedRows, noted_rows, shares_of, write_rows

_TOLERANCE: Final = 1e-3
"""By about which share the epsilon of a user of several records may exceed the least that can be proven."""


def epsilons_of_users(
    users: NDArray[np.int64], rows: NDArray[np.float32], steps: Sequence[int], trace: Trace, delta: float
) -> Epsilons:
    """Return the epsilons of some users, from all of their records.

    users: whose each record is [records]. rows: what it contributed [records, snapshots], at ``steps`` of the run. The
    result has the ids of users in place of examples, ascending, and neither losses nor lower bounds, as none is known
    for several records together.
    """
    order = np.argsort(users, kind="stable")
    ids, starts, counts = np.unique(users[order], return_index=True, return_counts=True)
    alone = counts == 1
    upper = np.empty(len(ids))
    upper[alone] = individual_epsilons(steps, rows[order[starts[alone]]], trace, delta, "pld").upper
    for place in np.flatnonzero(~alone).tolist():
        own = rows[order[starts[place] : starts[place] + counts[place]]]
        upper[place] = epsilon_of_examples(trace, steps, own, delta, _TOLERANCE).upper
    return Epsilons(
        example_ids=ids,
        groups=np.zeros(len(ids), np.int32),
        upper=upper,
        lower=None,
        losses=np.full(len(ids), np.nan, np.float32),
        delta=delta,
        method="pld",
        kind=trace.individual_kind,
    )


DIRECT = 2
"""Maximum number of shares that read the norms themselves; more are sorted first, which costs a write and a read."""
SORTED_BYTES = 2**28
"""Maximum bytes of contributions per sorting task of several parts; held twice, with encryption three times."""
USERS_AT_ONCE = 32
"""Users of a share where parts are few: one of many records takes seconds, and cores share them as progress shows."""
LEAST_TASKS = 64
"""Minimum number of sorting tasks if there are that many parts, and of shares, so that all nodes have work."""

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Share:
    """The users whose id leaves the remainder ``part`` when divided by the number of shares."""

    part: int


@dataclass(frozen=True)
class ShareOfNorms:
    """The rows of one of ``shares`` shares of the users, among all parts of the norms."""

    part: int
    shares: int
    parts: tuple[OwnedPart, ...]

    def read(self) -> tuple[Ids, Rows]:
        """As `ShareOfRows.read`. Raises: DataCorruption for files that are missing, cut or altered."""
        kept = []
        for each in self.parts:
            owners = each.users()
            mine = owners.ids % self.shares == self.part
            kept.append((owners.ids[mine], each.contributions(owners)[mine]))
        users, rows = (np.concatenate(column) for column in zip(*kept, strict=True))
        return users, rows


@dataclass(frozen=True)
class SomeParts:
    """Parts of the norms whose rows one task sorts; ``part`` is the first."""

    part: int
    parts: tuple[OwnedPart, ...]


@dataclass(frozen=True)
class ReusedShare:
    """The stored result of a share; None if there is none, or a damaged one."""

    part: int
    result: PartResult | None


@dataclass(frozen=True)
class ReuseShares:
    """Job that looks up shares which an interrupted run has stored. inputs: digest that their result must have."""

    job: AccountingJob
    inputs: str

    @property
    def root(self) -> str:
        return self.job.root

    def account(self, part: Share) -> ReusedShare:
        """Return the stored result of the share, if there is an intact one."""
        return ReusedShare(part.part, taken_up(self.job, part.part, self.inputs))


@dataclass(frozen=True)
class SortRows:
    """Job that writes the rows of the norms into a folder, in the order of ``shares``. inputs: digest of the norms."""

    root: str
    shares: int
    inputs: str

    def account(self, part: SomeParts) -> SortedRows:
        """Sort some parts, unless an interrupted run has. Raises: DataCorruption, StorageError."""
        directory = TrialFiles(self.root).rows_by_user
        stored = noted_rows(directory, part.part, self.inputs)
        return stored or write_rows(directory, part.part, *self._sorted(part), self.inputs)

    def _sorted(self, part: SomeParts) -> tuple[Ids, Rows, list[int]]:
        """Users [rows] and contributions [rows, snapshots] in the order of shares, and where each share ends."""
        found = [each.users() for each in part.parts]
        users = np.concatenate([owners.ids for owners in found])
        order = np.argsort(users % self.shares, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        rows = np.empty((len(users), len(part.parts[0].norms.steps)), np.float32)
        ends = np.cumsum([0, *(len(owners.ids) for owners in found)]).tolist()
        for each, owners, (start, stop) in zip(part.parts, found, pairwise(ends), strict=True):
            _fill(rows, places[start:stop], each.contributions(owners))
        return users[order], rows, np.bincount(users % self.shares, minlength=self.shares).cumsum().tolist()


@dataclass(frozen=True)
class AccountShares:
    """Job that accounts the users of a share.

    steps: the steps of the snapshots. inputs: digest of everything that determines the epsilons.
    """

    job: AccountingJob
    steps: tuple[int, ...]
    inputs: str

    @property
    def root(self) -> str:
        return self.job.root

    def account(self, part: ShareOfRows | ShareOfNorms) -> PartResult:
        """Store the epsilon of each user. Raises: DataCorruption for missing, cut or altered files, StorageError."""
        stored = taken_up(self.job, part.part, self.inputs)
        if stored is not None:
            return stored
        trace = read_trace(TrialFiles(self.root).trace)
        epsilons = epsilons_of_users(*part.read(), self.steps, trace, self.job.delta)
        return store_part(self.job, part.part, epsilons, self.inputs)


def account_users(job: AccountingJob, scatter: Scatter) -> EpsilonSummary:
    """Account every user of a trial, store the epsilons privately, and return their summary.

    Shares that an earlier run has stored are not computed again. Where the rows of the norms were sorted by user, they
    are deleted in the end. The calling process holds a few numbers for each share and each sorted file, never one for
    each example.

    Raises: InvalidInput for a run that a filter ended, where no user was bounded, and where no users are stored;
    DataCorruption as `account_all`.
    """
    files = TrialFiles(job.root)
    trace, users, shards = read_trace(files.trace), StoredUsers(files.users), NormShards(files.norms)
    if trace.filter is not None:
        raise InvalidInput("a filter limited single examples, not users, so users have no epsilon of their own here")
    shards.require_complete(trace.dataset_size)
    parts = [users.owned(shards.files(part)) for part in shards.parts]
    shares = max(len(parts), min(LEAST_TASKS, -(-users.count // USERS_AT_ONCE)))
    norms = _digest(parts, users, shares)
    inputs = inputs_of(job, trace, norms)
    found = _stored(job, inputs, shares, scatter)
    missing = [share for share in range(shares) if share not in found]
    asked = _shares(job.root, parts, shares, missing, norms, scatter)
    computed = in_order(scatter, AccountShares(job, tuple(map(int, shards.steps)), inputs), asked)
    summary = gathered(job, (found[share] if share in found else next(computed) for share in range(shares)))
    delete_folder(files.rows_by_user)
    return summary


def _stored(job: AccountingJob, inputs: str, shares: int, scatter: Scatter) -> dict[int, PartResult]:
    """Return the shares that an earlier run has stored, by number."""
    names = set(list_files(job.folder))
    noted = [Share(share) for share in range(shares) if f"part-{share:05d}.json" in names]
    found = in_order(scatter, ReuseShares(job, inputs), noted) if noted else ()
    return {each.part: each.result for each in found if each.result is not None}


def _shares(
    root: str, parts: Sequence[OwnedPart], shares: int, missing: Sequence[int], norms: str, scatter: Scatter
) -> Sequence[ShareOfRows | ShareOfNorms]:
    """Return the rows of the missing shares. More than `DIRECT` shares are sorted first."""
    if len(missing) <= DIRECT:
        return [ShareOfNorms(share, shares, tuple(parts)) for share in missing]
    files = list(in_order(scatter, SortRows(root, shares, norms), _grouped(parts)))
    every = shares_of(TrialFiles(root).rows_by_user, len(parts[0].norms.steps), files)
    return [every[share] for share in missing]


def _grouped(parts: Sequence[OwnedPart]) -> list[SomeParts]:
    """Parts by sorting task: as many per task as `SORTED_BYTES` and `LEAST_TASKS` allow."""
    largest = max(each.norms.rows * len(each.norms.steps) for each in parts) * np.dtype(np.float32).itemsize
    together = max(1, min(SORTED_BYTES // max(largest, 1), -(-len(parts) // LEAST_TASKS)))
    return [SomeParts(start, tuple(parts[start : start + together])) for start in range(0, len(parts), together)]


def _digest(parts: Sequence[OwnedPart], users: StoredUsers, shares: int) -> str:
    """sha256 of everything that determines the rows of all users, and their division into shares."""
    found = hashlib.sha256(repr((shares, users.digests())).encode())
    for each in parts:
        found.update(repr(each.norms.identity).encode())
    return found.hexdigest()


def _fill(rows: Rows, places: NDArray[np.intp], contributions: Rows, block: int = 4096) -> None:
    """Set ``rows[places]``; in blocks of rows, because contributions are stored by snapshot."""
    for start in range(0, len(places), block):
        stop = start + block
        rows[places[start:stop]] = np.ascontiguousarray(contributions[start:stop])
