"""A trial on several ranks: processes on one node that share its gradients, each an actor in the trial's own placement
group.

The group belongs to Tune, which reserves all of it before the trial starts and removes it, and so ends whatever runs in
it, when the trial ends, is stopped or is lost. The process that Tune starts only follows the ranks. When one of them is
lost, all are ended, and Tune starts the trial again from its checkpoint.

A `TorchTrainer` of Ray Train would reserve the ranks in a second placement group, of which Tune knows nothing: see
docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from accounting.errors import DpsweepError
from orchestration.execution.backend import TrialContext
from orchestration.execution.storage_retries import patiently
from orchestration.sweeps.plan import PlannedTrial
from orchestration.sweeps.resources import ResourceSettings
from orchestration.sweeps.user_code import unpacked
from workers.ranks import RankLost, connected
from workers.trial import Progress, follow_trial, run_trial

_EXPLANATION: Final = 10.0
"""Seconds in which the other ranks may say why a rank was left alone."""

Report = Callable[[Progress], None]


class _Died(RankLost):
    """Ray says why a rank was lost."""


def train_together(
    planned: PlannedTrial, context: TrialContext, reserved: ResourceSettings, report: Report
) -> Exception | None:
    """Train one trial on the ranks of ``reserved``, in the placement group of this process, which reports for them.

    Returns: the error that ended the trial, with what may be shown of it. Raises: RankLost when a rank was lost.
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
    with tempfile.TemporaryDirectory(prefix="dps-ranks-") as folder, _started(reserved) as ranks:
        place = str(Path(folder) / "meeting")
        ends = [rank.train.remote(planned, context, number, reserved, place) for number, rank in enumerate(ranks)]
        return _followed(ranks[0], ends, report)


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
    """Report what rank 0 reports until it has ended; returns the error that a rank ended with, if one did.

    ends: of each rank, the call that returns when it has ended.
    """
    running, said = [*ends], leader.next_report.remote()
    while True:
        (ready,), _ = ray.wait([said, *running])
        result = _result(ready)
        if isinstance(result, Progress):
            report(result)
            leader.go_on.remote()
            said = leader.next_report.remote()
        elif result is not None:
            return _reason(result, [end for end in running if end != ready])
        elif ready == ends[0]:
            return None
        else:
            running.remove(ready)


def _result(call: Any) -> Progress | Exception | None:
    """What a call of a rank returned; `_Died` if the rank did."""
    try:
        result: Progress | Exception | None = ray.get(call)
    except RayError as error:
        starved = "low on memory" in str(error)  # what Tune is told of a process that Ray killed for lack of memory
        return _Died(f"a rank was lost: {'its node ran low on memory' if starved else type(error).__name__}")
    return result


def _reason(failure: Exception, others: Sequence[Any]) -> Exception:
    """The error of the rank that failed first: what the others say is only that they lost it. Raises: RankLost."""
    ended, _ = ray.wait([*others], num_returns=len(others), timeout=_EXPLANATION)
    failures = [failure, *(each for each in map(_result, ended) if isinstance(each, Exception))]
    reason = min(failures, key=lambda each: isinstance(each, RankLost) + (type(each) is RankLost))
    if isinstance(reason, RankLost):
        raise reason
    return reason


class _Rank:
    """One process of a trial, as an actor with two threads: one trains, the other answers for rank 0 meanwhile."""

    def __init__(self) -> None:
        self._reports, self._heard = queue.SimpleQueue[Progress](), threading.Semaphore(0)

    def train(
        self, planned: PlannedTrial, context: TrialContext, number: int, reserved: ResourceSettings, place: str
    ) -> Exception | None:
        """Take part in the trial to its end; returns the error that ended it, with what may be shown of it."""
        root, spec, releases = context.files.trial(planned.key).root, planned.spec, planned.releases
        try:
            context.require_key()
            code = unpacked(context.code)
            with connected(number, reserved.processes, place, nccl=reserved.gpus > 0) as group:
                if number:
                    follow_trial(spec, root, group, code=code, releases=releases)
                else:
                    run_trial(spec, root, code=code, releases=releases, on_progress=self._report, group=group)
        except RankLost as lost:
            return RankLost(str(lost))
        except BaseException as error:  # whatever user code raises: Ray would store its text
            return context.shown(planned.key, error)
        return None

    def _report(self, progress: Progress) -> None:
        self._reports.put(progress)
        self._heard.acquire()

    def next_report(self) -> Progress:
        """Of rank 0: wait for its next epoch, after which it waits for `go_on`."""
        return self._reports.get()

    def go_on(self) -> None:
        """Let rank 0 train on."""
        self._heard.release()
