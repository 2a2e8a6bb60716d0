"""Per-example accounting of a trial on Ray actors: the only file of this package that imports ray.

The unit of work is stateless: `account_part` reads one fixed range of examples across all snapshots and returns its
final result. Actors hold only caches, so an actor that dies is restarted and its part computed again. Parts are
concatenated; a missing part is an error, never a zero.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray

from accounting.errors import DataCorruption, DpsweepError
from accounting.individual.epsilons import individual_epsilons
from accounting.records.layout import TrialFiles
from accounting.records.shards import Epsilons, NormShards, read_epsilons, write_epsilons
from accounting.records.traces import read_trace

RESTARTS = 3
"""How often an actor is restarted, and a part retried, before the trial's accounting fails."""


@dataclass(frozen=True)
class AccountingJob:
    """What to account: a trial's root (absolute path or URI), delta, and the method (``rdp`` or ``pld``)."""

    root: str
    delta: float
    method: str = "rdp"


@dataclass(frozen=True)
class PartResult:
    """The epsilons of one part."""

    part: int
    epsilons: Epsilons


Scatter = Callable[[AccountingJob, Sequence[int]], Iterator[PartResult]]
"""Accounts the given parts and yields their results in the same order."""


def account_part(job: AccountingJob, part: int) -> PartResult:
    """Epsilon of every example in one part, from its verified shards: a pure function of the trial's files.

    The claim is that of `accounting.individual.epsilons`. Raises: DataCorruption for missing, cut or altered files.
    """
    files = TrialFiles(job.root)
    rows = NormShards(files.norms).read(part)
    result = individual_epsilons(rows.steps, rows.contributions, read_trace(files.trace), job.delta, job.method)
    epsilons = Epsilons(
        example_ids=rows.example_ids,
        groups=rows.groups,
        upper=result.upper,
        lower=result.lower,
        losses=rows.losses[:, -1],
        delta=result.delta,
        method=result.method,
        kind=result.kind,
    )
    return PartResult(part, epsilons)


def account_in_process(job: AccountingJob, parts: Sequence[int]) -> Iterator[PartResult]:
    """Account the parts one after the other in this process: `AccountingPool.scatter` without Ray."""
    return (account_part(job, part) for part in parts)


def account_trial(job: AccountingJob, scatter: Scatter = account_in_process) -> Epsilons:
    """Account every example of a trial, store the result under its private folder, and return it read back.

    Raises: DataCorruption when training was interrupted, when examples lack shards, or when files are damaged.
    """
    files = TrialFiles(job.root)
    shards = NormShards(files.norms)
    shards.require_complete(read_trace(files.trace).dataset_size)
    write_epsilons(files.epsilons, (_checked(result, part) for part, result in _in_order(scatter, job, shards.parts)))
    return read_epsilons(files.epsilons)


def _in_order(scatter: Scatter, job: AccountingJob, parts: Sequence[int]) -> Iterator[tuple[int, PartResult]]:
    results = scatter(job, parts)
    for part in parts:
        result = next(results, None)
        if result is None:
            raise DataCorruption(f"{job.root}: part {part} was not accounted; run the accounting again")
        yield part, result


def _checked(result: PartResult, part: int) -> Epsilons:
    if result.part != part:
        raise DataCorruption(f"part {result.part} was returned in place of part {part}; run the accounting again")
    return result.epsilons


class AccountingActor:
    """Runs `account_part` in a process of its own, where tables stay cached between parts."""

    def account(self, job: AccountingJob, part: int) -> PartResult:
        """As `account_part`."""
        return account_part(job, part)

    def process_id(self) -> int:
        """The id of the actor's process."""
        return os.getpid()


class AccountingFailed(DpsweepError):
    """A part could not be accounted: its actor died too often, or the cluster lost it."""


class AccountingPool:
    """A fixed number of actors on the running Ray cluster; a context manager whose `scatter` `account_trial` takes."""

    def __init__(self, actors: int, **actor_options: Any) -> None:
        """Start the actors; Ray must be initialised. actor_options are Ray's (num_cpus, resources, ...)."""
        options = {"num_cpus": 1, "max_restarts": RESTARTS, "max_task_retries": RESTARTS, **actor_options}
        remote = ray.remote(AccountingActor)
        self.actors: list[Any] = [remote.options(**options).remote() for _ in range(actors)]

    def scatter(self, job: AccountingJob, parts: Sequence[int]) -> Iterator[PartResult]:
        """Submit all parts at once, round robin, and yield results in order.

        Errors of `account_part` are raised unchanged. Raises: AccountingFailed when an actor died too often.
        """
        pending = [self.actors[i % len(self.actors)].account.remote(job, part) for i, part in enumerate(parts)]
        for part, reference in zip(parts, pending, strict=True):
            yield _collect(job, part, reference)

    def process_ids(self) -> tuple[int, ...]:
        """The process id of each actor."""
        return tuple(ray.get([actor.process_id.remote() for actor in self.actors]))

    def close(self) -> None:
        """Stop all actors."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self.close()


def _collect(job: AccountingJob, part: int, reference: Any) -> PartResult:
    try:
        result: PartResult = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, DpsweepError) else error from None
    except ray.exceptions.RayError as error:
        raise AccountingFailed(
            f"{job.root}: part {part} was lost after {RESTARTS} restarts ({type(error).__name__}); "
            "give the actors more memory, or run again"
        ) from error
    return result
