"""Train one trial on several ranks: processes on one node, or on several, that share its gradient computation.

Each rank is an actor in the trial's placement group. Tune owns the group: it reserves all of it before the trial
starts, and removes it, which ends the ranks, when the trial ends, is stopped or is lost. The process that Tune starts
only follows the ranks. If a rank is lost, all are ended, and Tune starts the trial again from its checkpoint.

Ray Train's `TorchTrainer` is not used, because it would reserve the ranks in a second placement group that Tune does
not know of: see docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch._C._distributed_c10d import Store

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.nodes import own_address, require_gpu
from dpsweep.orchestration.execution.storage_checks import patiently
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.sections import ResourceSettings
from dpsweep.orchestration.sweeps.user_code import unpacked
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.ranks import RankLost, connected_ranks
from dpsweep.workers.trials.trial import follow_trial, run_trial

_REASON_TIMEOUT: Final = 10.0
"""Seconds to wait for the errors of the other ranks, to find the one that failed first."""

Report = Callable[[Progress], None]


class _RankDied(RankLost):
    """Ray reported that a rank's process was lost, and why."""


def train_together(
    planned: PlannedTrial, context: TrialContext, reserved: ResourceSettings, report: Report
) -> Exception | None:
    """Train one trial on the ranks of ``reserved``, in this process's placement group; report their progress to Tune.

    Returns: the error that ended the trial, with only the text that may be shown, or None. Raises: RankLost if a rank
    was lost.
    """

    def train() -> None:
        failure = _trained(planned, context, reserved, report)
        if failure is not None:
            raise failure

    try:
        patiently(context.files.trial(planned.key).root, train)
    except RankLost:
        raise
    except DpsweepError as failure:
        return failure
    return None


def _trained(
    planned: PlannedTrial, context: TrialContext, reserved: ResourceSettings, report: Report
) -> Exception | None:
    with _meeting(reserved) as place, _started(reserved) as ranks:
        ends = [rank.train.remote(planned, context, number, reserved, place) for number, rank in enumerate(ranks)]
        return _followed(ranks[0], ends, report)


@contextlib.contextmanager
def _meeting(reserved: ResourceSettings) -> Iterator[Any]:
    """Yield where the ranks find each other: a file of their node, or an actor that all their nodes reach."""
    if reserved.ranks_on == "nodes":
        with meeting(reserved.processes) as actor:
            yield actor
    else:
        with tempfile.TemporaryDirectory(prefix="dps-ranks-") as folder:
            yield str(Path(folder) / "meeting")


@contextlib.contextmanager
def _started(reserved: ResourceSettings) -> Iterator[list[Any]]:
    """An actor for each rank, for the duration of a ``with`` block."""
    place, bundle, actor = get_current_placement_group(), reserved.bundle, cast(Any, ray.remote(_Rank))
    assert place is not None, "Tune places every trial in a group"
    ranks = [
        actor.options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place, number),
        ).remote()
        for number in range(reserved.processes)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            ray.kill(rank)


def _followed(leader: Any, ends: Sequence[Any], report: Report) -> Exception | None:
    """Forward the reports of rank 0 until it ends; return the error that a rank ended with, or None.

    ends: for each rank, the pending call that returns when it ends.
    """
    running, report_call = [*ends], leader.first_report.remote()
    while True:
        (ready,), _ = ray.wait([report_call, *running])
        result = _result(ready)
        if isinstance(result, Progress):
            report(result)
            report_call = leader.next_report.remote()
        elif result is not None:
            return _reason(result, [end for end in running if end != ready])
        elif ready == ends[0]:
            return None
        else:
            running.remove(ready)


def _result(call: Any) -> Progress | Exception | None:
    """Return the result of a call to a rank; `_RankDied` if the rank was lost."""
    try:
        result: Progress | Exception | None = ray.get(call)
    except RayError as error:
        starved = "low on memory" in str(error)  # Ray killed the process for lack of memory
        return _RankDied(f"a rank was lost: {'its node ran low on memory' if starved else type(error).__name__}")
    return result


def _reason(failure: Exception, others: Sequence[Any]) -> Exception:
    """Return the error of the rank that failed first; the others only report that they lost it. Raises: RankLost."""
    ended, _ = ray.wait([*others], num_returns=len(others), timeout=_REASON_TIMEOUT)
    failures = [failure, *(each for each in map(_result, ended) if isinstance(each, Exception))]
    reason = min(failures, key=lambda each: isinstance(each, RankLost) + (type(each) is RankLost))
    if isinstance(reason, RankLost):
        raise reason
    return reason


class _Rank:
    """One process of a trial: an actor with two threads, one to train, one to answer calls for reports meanwhile."""

    def __init__(self) -> None:
        self._reports, self._may_continue = queue.SimpleQueue[Progress](), threading.Semaphore(0)

    def train(
        self, planned: PlannedTrial, context: TrialContext, number: int, reserved: ResourceSettings, place: Any
    ) -> Exception | None:
        """Take part in the trial to its end; return its error, with only the text that may be shown, or None."""
        root, spec, releases = context.files.trial(planned.key).root, planned.spec, planned.releases
        try:
            context.require_node()
            require_gpu(planned, reserved)
            code = unpacked(context.code)
            met, here = (place, "127.0.0.1") if isinstance(place, str) else (RayStore(place), own_address())
            together = connected_ranks(
                number, reserved.processes, met, nccl=reserved.gpus > 0, address=here, shard=reserved.shard
            )
            with together as group:
                if number:
                    follow_trial(spec, root, group, code=code, releases=releases)
                else:
                    run_trial(
                        spec,
                        root,
                        code=code,
                        releases=releases,
                        on_progress=self._report,
                        group=group,
                        data_digest=planned.data_digest,
                    )
        except RankLost as lost:
            return RankLost(str(lost))
        except BaseException as error:  # user code may raise anything, and Ray would store its text
            return context.shown(planned.key, error)
        return None

    def _report(self, progress: Progress) -> None:
        self._reports.put(progress)
        self._may_continue.acquire()

    def first_report(self) -> Progress:
        """Wait for the first epoch of rank 0, which then waits for `next_report`."""
        return self._reports.get()

    def next_report(self) -> Progress:
        """Let rank 0 continue training, and wait for its next epoch.

        One call does both: of two, Ray may begin the later one first, as after a pause of this process. That one would
        take the only free thread, and wait for an epoch that nothing lets begin.
        """
        self._may_continue.release()
        return self._reports.get()


_PATIENCE: Final = 600.0
"""Seconds in which the other ranks must have come."""


class _Meeting:
    """Values by key, for the calls of all ranks. An asyncio actor: any number of calls wait in it at once.

    Only processes of the cluster can ask an actor; a store of torch's own would listen on all interfaces, and answer
    whoever connects.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def get(self, key: str) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    async def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    async def add(self, key: str, amount: int) -> int:
        async with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total


@contextlib.contextmanager
def meeting(ranks: int) -> Iterator[Any]:
    """Yield an actor in which ``ranks`` ranks can meet, for the duration of a ``with`` block."""
    actor = cast(Any, ray.remote(_Meeting)).options(num_cpus=0.0, max_concurrency=2 * ranks).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)


class RayStore(Store):
    """A store of torch.distributed whose values the actor of a `meeting` holds.

    Raises: RuntimeError, as torch's own stores do, if the actor is lost or a rank does not come in time.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = actor

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        _answer(self._actor.set.remote(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        value: bytes = _answer(self._actor.get.remote(key))
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, at first 0; return the sum."""
        total: int = _answer(self._actor.add.remote(key, amount))
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        found: bool = _answer(self._actor.has.remote(keys))
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all values are there."""
        for key in keys:
            self.get(key)


def _answer(call: Any) -> Any:
    try:
        return ray.get(call, timeout=_PATIENCE)
    except RayError as error:  # of a lost actor, or `GetTimeoutError`
        raise RuntimeError("the other ranks cannot be found") from error
