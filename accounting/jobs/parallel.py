"""Parts of trials accounted as Ray tasks: the only file of this package that imports ray.

Processes hold only caches, so a part whose process or node is lost is computed again elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import ray

from dpsweep.accounting.errors import DpsweepError, UnfitNode
from dpsweep.accounting.jobs.examples import Numbered, Part, PartwiseJob, Result, account_part

ATTEMPTS = 16
"""How often a part is tried before its trial's accounting fails."""
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.5, 20.0, 1.7
"""Seconds before a lost part is tried again, and the factor from one pause to the next: 200 s in all. Ray takes up to
65 s to notice that a node is gone, and until then sends work to it. The factor keeps pauses out of step with whatever
kills processes periodically."""
_POLL = 0.2
"""Seconds after which the queue looks for new work while parts run."""
_CENSUS = 2.0
"""Seconds between two counts of the cluster's nodes."""


class AccountingFailed(DpsweepError):
    """A part could not be accounted: its process was lost too often, or the cluster was."""


@dataclass(eq=False)
class _Part:
    """A part in the queue. due: when it may be tried (again), on the monotonic clock. attempts: begun so far."""

    job: PartwiseJob[Any, Any]
    files: Numbered
    result: Future[Any] = field(default_factory=Future)
    attempts: int = 0
    due: float = 0.0

    def rest(self) -> None:
        """Postpone the next attempt, after every failure for longer."""
        self.due = time.monotonic() + min(_FIRST_PAUSE * _GROWTH ** (self.attempts - 1), _LONGEST_PAUSE)


class AccountingQueue:
    """One queue of the parts of all trials, worked off by Ray tasks; a context manager. Thread-safe.

    Tasks are spread over the nodes, pinned to none, and parts are collected as they finish. About twice as many parts
    as the cluster can run at once are outside the queue: running, waiting for another attempt, or finished and not yet
    taken. A part whose process or node is lost is tried again, up to `ATTEMPTS` times. A node on which a part raised
    `UnfitNode` is given no further ones, as long as there are others.
    """

    def __init__(
        self,
        cpus: float,
        resources: Mapping[str, float] | None = None,
        at_most: int | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Start the queue; Ray must be initialised.

        cpus, resources: what a part reserves on its node; if nothing, parts share the CPUs of other work, one for each
        CPU. at_most: parts running at once; by default as many as there is room for. warn: called with one sentence
        about each node that is given no further parts.
        """
        reserved = dict(resources or {})
        self.room = _Room({"CPU": cpus, **reserved}, at_most)
        self._warn = warn
        self._task: Any = ray.remote(num_cpus=cpus, resources=reserved, scheduling_strategy="SPREAD", max_retries=0)(
            account_part
        )
        self._news = threading.Condition()
        self._queued: deque[_Part] = deque()
        self._resting: list[_Part] = []
        self._running: dict[Any, _Part] = {}
        self._outside: set[_Part] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="dpsweep-accounting-queue", daemon=True)
        self._thread.start()

    def scatter(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        """Queue the parts behind the parts of earlier calls, and yield their results in order.

        Errors of the job are raised unchanged. Raises: AccountingFailed when a part was lost too often.
        """
        added = [_Part(job, part) for part in parts]
        with self._news:
            if self._closed:
                raise AccountingFailed(f"{job.root}: the cluster is gone; run the same command again")
            self._queued.extend(added)
            self._news.notify()
        try:
            for part in added:
                result = part.result.result()
                self._forget([part])
                yield result
        finally:
            self._forget(added)

    def close(self) -> None:
        """Drop what is not finished, and stop."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forget(self, parts: Sequence[_Part]) -> None:
        """Make room for others: these parts were taken, or nobody waits for them any more."""
        with self._news:
            for part in parts:
                part.result.cancel()
                self._outside.discard(part)
            self._news.notify()

    def _serve(self) -> None:
        failure = "the sweep was interrupted"
        try:
            while not self._closed:
                self._begin()
                self._collect()
        except Exception as error:  # of any kind: those who wait for parts must be told
            failure = f"the cluster is gone ({type(error).__name__}: {error})"
        with self._news:
            self._closed = True
            for part in (*self._queued, *self._resting, *self._running.values()):
                _settle(part, AccountingFailed(f"{part.job.root}: {failure}; run the same command again"))

    def _begin(self) -> None:
        """Start what may start now; wait for news if there is nothing to do."""
        with self._news:
            if not (self._closed or self._queued or self._resting or self._running):
                self._news.wait()
        slots, limit = self.room.slots(), self.room.running_limit()
        with self._news:
            now = time.monotonic()
            due = [part for part in self._resting if part.due <= now]
            self._resting = [part for part in self._resting if part.due > now]
            while self._queued and len(self._outside) < 2 * slots:
                part = self._queued.popleft()
                if not part.result.cancelled():  # else nobody would ever take it out again
                    due.append(part)
                    self._outside.add(part)
            free = max(0, limit - len(self._running))
            self._resting += due[free:]
            for part in due[:free]:
                if not part.result.cancelled():
                    part.attempts += 1
                    self._running[self._begun(part)] = part
            if not self._running and not self._closed:
                self._news.wait(_POLL)

    def _begun(self, part: _Part) -> Any:
        """Return the reference of a new task for the part, on a node that was not found unfit."""
        return self._task.options(label_selector=self.room.selector).remote(part.job, part.files)

    def _collect(self) -> None:
        """Wait shortly for parts that run, and settle those that ended."""
        ended: Sequence[Any] = ray.wait(list(self._running), timeout=_POLL)[0] if self._running else ()
        for reference in ended:
            part = self._running.pop(reference)
            outcome = _outcome(reference)
            if isinstance(outcome, _Lost):
                self._lost(part, outcome)
            elif isinstance(outcome, UnfitNode):
                self._avoid(part, outcome)
            else:
                with self._news:
                    _settle(part, outcome)

    def _lost(self, part: _Part, loss: _Lost) -> None:
        with self._news:
            if part.attempts < ATTEMPTS:
                part.rest()
                self._resting.append(part)
            else:
                _settle(part, loss.failure(part))
        if loss.memory:
            self.room.shrink()

    def _avoid(self, part: _Part, unfit: UnfitNode) -> None:
        """Give the part to another node, if there is one."""
        if self.room.without(unfit.node):
            self._warn(f"{unfit}; meanwhile no further parts go there")
        with self._news:
            if self.room.has_nodes():
                part.attempts -= 1
                self._resting.append(part)
            else:
                _settle(part, unfit)


@dataclass(frozen=True)
class _Lost:
    """An attempt at a part that ended without a result. memory: because there was too little of it."""

    reason: str
    memory: bool

    def failure(self, part: _Part) -> AccountingFailed:
        """Return the error that is raised after the last attempt."""
        step = "give accounting nodes with more memory" if self.memory else "see whether its nodes are well"
        return AccountingFailed(
            f"{part.job.root}: part {part.files.part} was lost {part.attempts} times, at last by {self.reason}; "
            f"{step}, and run the same command again"
        )


def _outcome(reference: Any) -> Numbered | Exception | _Lost:
    """Return the result, error or loss of an attempt that has ended."""
    try:
        result: Numbered = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, MemoryError):
            return _Lost("lack of memory", memory=True)
        return error.cause if isinstance(error.cause, DpsweepError) else error
    except ray.exceptions.OutOfMemoryError:
        return _Lost("lack of memory", memory=True)
    except ray.exceptions.RayError as error:
        return _Lost(type(error).__name__, memory=False)
    return result


def _settle(part: _Part, outcome: Numbered | Exception) -> None:
    if part.result.done():  # cancelled: nobody waits for it
        return
    if isinstance(outcome, Exception):
        part.result.set_exception(outcome)
    else:
        part.result.set_result(outcome)


class _Room:
    """The number of parts that the cluster can run at once, counted again as nodes come and go.

    Parts keep off the nodes with GPUs as long as others can run them.
    """

    def __init__(self, needs: Mapping[str, float], at_most: int | None) -> None:
        self._needs = {name: amount for name, amount in needs.items() if amount > 0.0}
        self._at_most = at_most
        self._unfit: dict[str, None] = {}
        self._with_gpus: frozenset[str] = frozenset()
        self._counted, self._count = -_CENSUS, 1

    @property
    def selector(self) -> dict[str, str]:
        """The label selector of tasks, which keeps them off nodes that were found unfit, and off those with GPUs."""
        avoided = [*self._unfit, *sorted(self._with_gpus - self._unfit.keys())]
        return {"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else {}

    def without(self, node: str) -> bool:
        """Leave a node out from now on; False if it was left out before."""
        is_new = node not in self._unfit
        self._unfit[node] = None
        self._counted = -_CENSUS
        return is_new

    def has_nodes(self) -> bool:
        """Return whether parts fit onto any node."""
        self.slots()
        return self._count > 0

    def slots(self) -> int:
        """Return parts that fit onto the nodes, at least 1."""
        if time.monotonic() >= self._counted + _CENSUS:
            self._counted = time.monotonic()
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            fit = {n["NodeID"]: n["Resources"] for n in nodes if n["Alive"] and n["NodeID"] not in self._unfit}
            counts = {name: fitting(there, self._needs) for name, there in fit.items()}
            gpus = frozenset(name for name, there in fit.items() if there.get("GPU", 0.0))
            elsewhere = sum(count for name, count in counts.items() if name not in gpus)
            self._with_gpus = gpus if elsewhere else frozenset()
            self._count = elsewhere or sum(counts.values())
        return max(1, min(self._count, self._at_most or self._count))

    def running_limit(self) -> int:
        """Return parts to submit at once: twice the slots, so that none waits for the driver, unless Ray must not run
        more.
        """
        return self.slots() if self._at_most or not self._needs else 2 * self.slots()

    def shrink(self) -> None:
        """Run half as many at once from now on."""
        self._at_most = max(1, self.slots() // 2)


def fitting(there: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many pieces of work with these needs a node can run at once; no more than it has CPUs, if it has any.

    >>> fitting({"CPU": 4.0, "memory": 1e9}, {"CPU": 1.0}), fitting({"memory": 1e9}, {"CPU": 1.0})
    (4, 0)
    >>> fitting({"CPU": 4.0}, {"CPU": 1e-4}), fitting({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})
    (4, 1)
    >>> fitting({"CPU": 0.0, "accounting": 2.0}, {"accounting": 1.0})
    2
    """
    counts = [there.get(name, 0.0) / amount for name, amount in needs.items() if amount > 0.0]
    cpus = there.get("CPU", 0.0)
    most = min([*counts, cpus] if cpus or not counts else counts)
    return int(most + 1e-9)
