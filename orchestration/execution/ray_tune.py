"""Training under Ray Tune: the only module that imports ray.tune.

Tune starts trials, restarts those whose worker died, and runs the scheduler that the sweep asks for. Its state is not
needed to resume: a trial continues from its own checkpoint, and ``result.json`` marks it as complete. A trial whose
worker died is retried, beside fewer trials if memory was lacking. A trial that raised an exception has failed and is
not retried.

Tune stores and prints whatever a trial raises or reports, so trials raise and report only what may be shown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.air.execution._internal import actor_manager
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.tune.analysis import experiment_analysis
from ray.tune.execution import tune_controller
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from dpsweep.accounting.errors import DpsweepError, StorageError
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.comparison.publishing import recorded_epoch
from dpsweep.orchestration.execution.backend import TrainingObserver, TrialContext, lighter
from dpsweep.orchestration.execution.cluster import at_level, replaced
from dpsweep.orchestration.execution.nodes import has_autoscaler, off_gpu_nodes, require_gpu
from dpsweep.orchestration.execution.storage_checks import train_patiently
from dpsweep.orchestration.execution.turns import Turns
from dpsweep.orchestration.store.published import PublishedEpoch
from dpsweep.orchestration.sweeps.grid import rivals
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import ResourceSettings, SchedulerSettings
from dpsweep.orchestration.sweeps.user_code import unpacked
from dpsweep.workers.machine.memory import GPU_SHARE
from dpsweep.workers.tasks import main_score
from dpsweep.workers.training.history import Progress
from dpsweep.workers.training.less_memory import LackOfMemory


def train_trial(
    config: Mapping[str, Any],
    trials: Mapping[str, PlannedTrial],
    context: TrialContext,
    reserved: Mapping[str, ResourceSettings],
) -> None:
    """Train the trial ``config["key"]`` on a Tune worker, reporting after every epoch.

    Raises: StorageError, with only the text that may be shown, if files cannot be written, and RankLost if one of its
    processes was lost. Any other error is reported as the trial's result.
    """
    key = config["key"]
    failure = _attempt(trials[key], context, reserved[key])
    if isinstance(failure, StorageError):
        raise failure
    if failure is not None:
        lacked = isinstance(failure, LackOfMemory)
        tune.report({"error": str(failure), "lacked_memory": lacked, **_UNMEASURED})


def _attempt(planned: PlannedTrial, context: TrialContext, resources: ResourceSettings) -> Exception | None:
    """Train; return the error that ended the trial, with only the text that may be shown. Raises: RankLost."""
    from dpsweep.orchestration.execution.ray_ranks import (
        train_together,  # late: it imports torch, which drivers do without
    )
    from dpsweep.workers.trials.ranks import RankLost

    try:
        context.require_node()
        if resources.processes > 1:
            return train_together(planned, context, resources, _report)
        require_gpu(planned, resources)
        os.environ[GPU_SHARE] = str(min(resources.gpus, 1.0) or 1.0)
        train_patiently(planned, context.files.trial(planned.key).root, unpacked(context.code), _report)
    except RankLost:
        raise
    except BaseException as error:  # user code may raise anything, and Tune would store its text
        if isinstance(error, SystemExit) and error.code == 0:
            raise  # how Tune ends the thread of a trial that its scheduler stopped
        return context.shown(planned.key, error)
    return None


_UNMEASURED = {"test_accuracy": None, "public_accuracy": None}
"""Placeholders, because Tune requires the scheduler's metric in every result."""


def _report(progress: Progress) -> None:
    """Report an epoch to Tune. The last report omits `epoch` so that ASHA ignores it."""
    public = progress.public_evaluation
    epoch = {"epoch": progress.epoch} if progress.step < progress.total_steps else {}
    tune.report(
        {
            "progress": progress,
            "test_accuracy": progress.evaluation.main,
            "public_accuracy": public.main if public else None,
            **epoch,
        }
    )


def train(
    trials: Sequence[PlannedTrial],
    observer: TrainingObserver,
    sweep: SweepSpec,
    context: TrialContext,
    name: str,
    turns: Turns | None,
) -> None:
    """Train every trial, sending events to ``observer`` as they happen; return when all have ended or it must stop.

    Tune retries a trial whose worker died during training, but not one whose worker died before training started. This
    function retries those in a further round. Trials that Ray killed for lack of memory are retried in the same way, at
    most half as many at once as before. A trial that lacked memory with no trial beside it, or on its device, starts
    again in smaller micro-batches if it has shown nothing. A round also ends when nothing runs and it is another
    sweep's turn; the next one then waits and reserves nothing. `turns`: the sweeps that share the cluster; None if no
    other does.
    """
    for_all = sweep.resources[-1]
    retries, at_once = for_all.max_failures, for_all.max_concurrent
    while trials and not observer.must_stop:
        callback = _ObserverCallback(trials, observer, retries, context, alone=at_once == 1)
        held = _train_round(trials, callback, sweep, at_once, name, turns)
        if callback.out_of_memory:
            at_once = max(1, min(at_once or len(trials), callback.most_at_once) // 2)
        elif callback.lost_before_start and retries > 0:
            retries -= 1
        else:
            callback.lost_before_start.clear()
        again = {*callback.lost_before_start, *callback.out_of_memory, *held}
        trials = [*(planned for planned in trials if planned.key in again), *callback.lighter]


def _train_round(
    trials: Sequence[PlannedTrial],
    callback: _ObserverCallback,
    sweep: SweepSpec,
    at_once: int | None,
    name: str,
    turns: Turns | None,
) -> list[str]:
    """Train every trial once, with Tune's retries if its worker is lost; return the keys of those that other sweeps
    kept from beginning.
    """
    context, scheduler, by_key = callback.context, sweep.scheduler, {planned.key: planned for planned in trials}
    reserved = {key: sweep.reserved(planned.spec) for key, planned in by_key.items()}
    worker = tune.with_parameters(train_trial, trials=by_key, context=context, reserved=reserved)
    search = None if turns is None else _InTurn(list(trials), sweep, turns, at_once or 0)
    tuner = tune.Tuner(
        tune.with_resources(worker, _reservation(sweep, trials)),
        param_space={"key": tune.grid_search(list(by_key))},
        tune_config=tune.TuneConfig(
            scheduler=_SCHEDULERS[scheduler.name](scheduler, callback.observer),
            search_alg=search,
            max_concurrent_trials=at_once if turns is None else None,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=context.files.tune,
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=callback.retries),
            callbacks=[callback, _Silent()],
            stop=_Stop(callback.observer),
        ),
    )
    with _lack_of_memory_is_a_loss(), _idle_workers_given_back(search):
        _fit(tuner, context.files.tune)
    return [] if search is None else [planned.key for planned in trials[search.begun :]]


def _reservation(
    sweep: SweepSpec, trials: Sequence[PlannedTrial]
) -> tune.PlacementGroupFactory | Callable[[dict[str, Any]], tune.PlacementGroupFactory]:
    """Return the reservation of all trials, or a function of a trial's configuration.

    The configuration holds only the trial's key, because it is sent to every worker.
    """
    factories = [_placed(section) for section in sweep.resources]
    if len(factories) == 1:
        return factories[0]
    places = {planned.key: sweep.resources.index(sweep.reserved(planned.spec)) for planned in trials}
    return lambda config: factories[places[config["key"]]]


def _placed(resources: ResourceSettings) -> tune.PlacementGroupFactory:
    """Return the reservation of a trial on nodes with the requested labels: one bundle for each rank. Without GPUs it
    keeps off the nodes that have some, if others can run it.

    A trial on several ranks gets an additional empty bundle for the process that follows them.
    """
    ranks = resources.processes
    labels = {**resources.labels, **off_gpu_nodes(resources.on_each_node, times=resources.times)}
    selector: dict[str, Any] = {"bundle_label_selector": [labels] * ranks} if labels else {}
    follower: list[dict[str, float]] = [{}] if ranks > 1 else []
    strategy = "STRICT_PACK" if resources.ranks_on == "one_node" else "PACK"
    return tune.PlacementGroupFactory([*follower, *[resources.bundle] * ranks], strategy=strategy, **selector)


class _InTurn(BasicVariantGenerator):
    """Creates the trials in their order, each when the sweep's turn has come on the cluster that it shares.

    Where no autoscaler needs to see what waits, hardly more trials are created than there is room for. A reservation
    that waits with Ray would be served before the later ones of other sweeps.
    """

    def __init__(self, trials: Sequence[PlannedTrial], sweep: SweepSpec, turns: Turns, at_once: int) -> None:
        super().__init__(max_concurrent=at_once)
        self._needs = [sweep.reserved(planned.spec) for planned in trials]
        self._turns, self._created = turns, list[Any]()
        self.is_held = False
        """Whether other sweeps come first, and nothing of this one waits for a worker."""
        self._stays_off_gpus = {
            repr(each): bool(off_gpu_nodes(each.on_each_node, times=each.times)) for each in sweep.resources
        }
        self._is_scaled = has_autoscaler()

    @property
    def begun(self) -> int:
        """Number of trials that were created."""
        return len(self._created)

    def next_trial(self) -> Any:
        """Create the next trial, or None while it is not its turn."""
        left = self._needs[len(self._created) :]
        running = sum(trial.status == "RUNNING" for trial in self._created)
        waiting = [needs for trial, needs in zip(self._created, self._needs, strict=False) if trial.status == "PENDING"]
        self._turns.trains(running, [*waiting, *left])
        if left and not self._turns.may_begin(
            left[0].amounts, running + len(waiting), self._stays_off_gpus[repr(left[0])]
        ):
            self.is_held = not waiting
            if self._created and not running and not waiting:
                # else Tune would wait here, and its idle workers keep what they reserve
                self.set_finished()  # type: ignore[no-untyped-call]
            return None
        self.is_held = False
        if left and not self._is_scaled and len(waiting) > self._turns.fits(left[0].amounts):
            return None
        trial = super().next_trial()  # type: ignore[no-untyped-call]
        self._created += [trial] if trial is not None else []
        return trial

    def get_state(self) -> bool:
        """Return nothing: Tune stores it only for `Tuner.restore`, which is not used."""
        return False


@contextlib.contextmanager
def _lack_of_memory_is_a_loss() -> Iterator[None]:
    """Let Tune treat a worker that Ray killed for lack of memory as a lost worker; by itself, it would end all trials.

    Tune 2.60 recognises a lost worker by `RayActorError`, but Ray's `OutOfMemoryError` is not a subclass.
    """
    lost = (RayActorError, OutOfMemoryError)
    with replaced(actor_manager, "RayActorError", lost), replaced(tune_controller, "RayActorError", lost):
        yield


def _idle_workers_given_back(search: _InTurn | None) -> contextlib.AbstractContextManager[None]:
    """Let Tune give back what idle workers reserve while other sweeps come first; by itself, it keeps one of them."""
    if search is None:
        return contextlib.nullcontext()
    module: Any = tune_controller
    cache = module._ObjectCache
    flush = cache.flush_cached_objects
    return replaced(
        cache, "flush_cached_objects", lambda self, force_all=False: flush(self, force_all or search.is_held)
    )


class _Silent(TrialProgressCallback):
    """Replaces Tune's own, which prints a line about a trial that ends without results, even at verbosity 0."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Print nothing."""


class _Stop(tune.Stopper):
    """Ends the experiment when the observer must stop."""

    def __init__(self, observer: TrainingObserver) -> None:
        self._observer: TrainingObserver | None = observer

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._observer is not None and self._observer.must_stop is not None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the observer: Tune pickles this only for `Tuner.restore`, which is not used."""
        return {"_observer": None}


def _fit(tuner: tune.Tuner, tune_folder: str) -> None:
    quiet = at_level(experiment_analysis.__name__, logging.ERROR)  # of no metrics in Tune's own files, which are off
    try:
        with quiet, _nothing_unpickled():
            tuner.fit()
    except EOFError as error:  # Tune reads back state files that a full disk has cut short
        raise StorageError(
            f"{tune_folder} holds a file that was cut short; is the disk full? Free some space, and the same command "
            "continues"
        ) from error
    except tune.TuneError as error:  # Tune puts it in place of an error of the observer, such as of a full disk
        if isinstance(error.__context__, DpsweepError):
            raise error.__context__ from None
        raise


def _nothing_unpickled() -> contextlib.AbstractContextManager[None]:
    """Let Tune not read trials back from its folder, as it does where no trial was created.

    It unpickles them, and they may be somebody else's.
    """
    return replaced(experiment_analysis.ExperimentAnalysis, "_load_trials", lambda self: [])


def _trial_name(trial: Any) -> str:
    return str(trial.config["key"])


class _AshaByGroup(FIFOScheduler):
    """Runs a separate ASHA scheduler for each group of `rivals`; a trial without a group is never stopped.

    It begins with all that was seen of the sweep's trials before, by earlier drivers too.
    """

    def __init__(self, settings: SchedulerSettings, observer: TrainingObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compared, self._group_of = settings.metric, dict[str, str | None]()
        self._schedulers: dict[str | None, Any] = {None: FIFOScheduler()}  # type: ignore[no-untyped-call]
        for planned, epochs in observer.seen():
            group = self._group_of[planned.key] = rivals(planned.point)
            self._schedulers.setdefault(group, _asha(settings))
            self._schedulers[group].on_trial_add(None, _Named(planned.key))
            self._take(planned.key, [epoch for epoch in epochs if epoch.step < planned.trace.steps])

    def _take(self, key: str, epochs: Sequence[PublishedEpoch]) -> None:
        """Rank epochs that a trial completed before."""
        split = f"{self._compared.partition('_')[0]}_"
        for epoch in epochs:
            found = {name.removeprefix(split): value for name, value in epoch.metrics.items() if name.startswith(split)}
            score = main_score(found.get("accuracy"), found)
            if score is not None:
                shown = {"epoch": epoch.epoch + 1, self._compared: score}
                self._of(key).on_trial_result(None, _Named(key), shown)

    def _of(self, key: str) -> Any:
        return self._schedulers[self._group_of[key]]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        key = _trial_name(trial)
        self._of(key).on_trial_add(tune_controller, _Named(key))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        key = _trial_name(trial)
        if "progress" in result:  # of a trial that another driver began
            self._take(key, [recorded_epoch(epoch, math.inf) for epoch in result["progress"].earlier])
        return str(self._of(key).on_trial_result(tune_controller, _Named(key), result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        key = _trial_name(trial)
        self._of(key).on_trial_complete(tune_controller, _Named(key), result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        key = _trial_name(trial)
        self._of(key).on_trial_remove(tune_controller, _Named(key))


@dataclass(frozen=True)
class _Named:
    """A trial as ASHA needs it. `trial_id`: its key, as Tune's own id is another one at each start."""

    trial_id: str


def _asha(settings: SchedulerSettings) -> ASHAScheduler:
    return ASHAScheduler(
        time_attr="epoch",
        metric=settings.metric,
        mode="max",
        max_t=10**9,
        grace_period=settings.grace_epochs,
        reduction_factor=settings.reduction_factor,
    )


def _fifo(settings: SchedulerSettings, observer: TrainingObserver) -> TrialScheduler:
    return FIFOScheduler()  # type: ignore[no-untyped-call]


_SCHEDULERS: Mapping[str, Callable[[SchedulerSettings, TrainingObserver], TrialScheduler]] = {
    "fifo": _fifo,
    "asha": _AshaByGroup,
}


class _ObserverCallback(tune.Callback):
    """Translates Tune's events of one round for a `TrainingObserver`.

    `alone`: whether trials run one at a time.
    lost_before_start, out_of_memory: keys of trials to retry.
    lighter: trials to retry in smaller micro-batches.
    most_at_once: the most trials that ran at the same time.
    """

    def __init__(
        self,
        trials: Sequence[PlannedTrial],
        observer: TrainingObserver,
        retries: int,
        context: TrialContext,
        alone: bool,
    ) -> None:
        self._trials = {planned.key: planned for planned in trials}
        self.retries, self.context, self.observer, self._alone = retries, context, observer, alone
        self.lighter: list[PlannedTrial] = []
        self.lost_before_start: list[str] = []
        self.out_of_memory: list[str] = []
        self.most_at_once = 1

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: Tune pickles callbacks only for `Tuner.restore`, which is not used."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        others = sum(each.status == "RUNNING" and each is not trial for each in trials)  # ``trial`` is so only later
        self.most_at_once = max(self.most_at_once, 1 + others)
        self.observer.started(_trial_name(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "progress" in result:
            self.observer.progressed(_trial_name(trial), result["progress"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key, error = _trial_name(trial), trial.last_result.get("error")
        if self.observer.must_stop and not error and not exists(self.context.files.trial(key).training):
            return  # stopped by a limit of this run, not by the scheduler: another run continues it
        if error is None:
            self.observer.ended(key)
        elif trial.last_result.get("lacked_memory"):
            self._lighten(key, error)
        else:
            self.observer.failed(key, error)

    def _lighten(self, key: str, error: str) -> None:
        smaller = lighter(self._trials[key], self.observer)
        if smaller is None:
            self.observer.failed(key, error)
        else:
            self.lighter.append(smaller)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key, was_alone = _trial_name(trial), self._alone or self.most_at_once == 1
        if _lacked_memory(trial) and was_alone:
            self._lighten(key, _LACK_OF_MEMORY)
        elif _lacked_memory(trial):
            self.out_of_memory.append(key)
        elif trial.num_failures <= self.retries:
            self.lost_before_start.append(key)
        else:
            error = _stored_error(trial)
            reason = self.context.failure(key, error) if error else "the reason could not be stored; is the disk full?"
            self.observer.failed(key, f"its worker was lost too often: {reason}")


_LACK_OF_MEMORY = (
    "its worker was killed for lack of memory, also with no trial beside it; lower execution.micro_batch_size and "
    "start it anew with --retry failed, or use nodes with more memory"
)


def _lacked_memory(trial: Any) -> bool:
    """Return whether the last failure of a trial was that Ray killed its worker for lack of memory."""
    try:
        text = Path(trial.error_file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "low on memory" in text.rpartition("Failure # ")[2]


def _stored_error(trial: Any) -> Exception | None:
    """Return the exception for which Tune gave up on a trial (the trial's own, if it raised one), or None.

    It is read from the driver's local file, because Tune copies it to the storage only later.
    """
    try:
        error: Exception = cloudpickle.loads(Path(trial.pickled_error_file or "").read_bytes())
    except OSError:
        return None
    return error.cause if isinstance(error, RayTaskError) else error
