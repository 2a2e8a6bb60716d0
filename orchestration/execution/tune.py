"""Training under Ray Tune: the only module that imports ray.tune.

Tune starts trials, restarts those whose worker died, and runs the scheduler that the sweep asks for. Its state is not
needed to resume: a trial continues from its own checkpoint, and ``result.json`` marks it as complete. A trial whose
worker died is retried, with fewer beside it if memory was lacking; a trial that raised an exception has failed and is
not.

Tune stores and prints whatever a trial raises or reports, so trials raise and report only what may be shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.air.execution._internal import actor_manager
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.tune.execution import tune_controller
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from accounting.errors import StorageError
from accounting.records import exists
from orchestration.execution.backend import TrainingObserver, TrialContext
from orchestration.execution.patience import train_patiently
from orchestration.sweeps.plan import PlannedTrial
from orchestration.sweeps.schema import ResourceSettings, SchedulerSettings
from orchestration.sweeps.user_code import unpacked
from workers.trial import Progress


def train_trial(config: Mapping[str, Any], trials: Mapping[str, PlannedTrial], context: TrialContext) -> None:
    """Train the trial ``config["key"]`` on a Tune worker, reporting after every epoch.

    Raises: StorageError, with only the text that may be shown, where files cannot be written. Any other error is
    reported as the trial's result.
    """
    failure = _attempt(trials[config["key"]], context)
    if isinstance(failure, StorageError):
        raise failure
    if failure is not None:
        tune.report({"error": failure, **_UNMEASURED})


def _attempt(planned: PlannedTrial, context: TrialContext) -> str | StorageError | None:
    """Train; return what may be shown of the error that ended the trial, without its traceback or cause; else None."""
    try:
        context.require_key()
        train_patiently(planned, context, unpacked(context.code), _report)
    except BaseException as error:  # whatever user code raises: Tune would store its text
        if isinstance(error, SystemExit) and error.code == 0:
            raise  # how Tune ends the thread of a trial that its scheduler stopped
        failure = context.failure(planned.key, error)
        return StorageError(failure) if isinstance(error, StorageError) else failure
    return None


_UNMEASURED = {"test_accuracy": None, "public_accuracy": None}
"""Tune requires the scheduler's metric in every result."""


def _report(progress: Progress) -> None:
    """Report an epoch to Tune. The last report omits `epoch` so that ASHA ignores it."""
    public = progress.public_evaluation
    epoch = {"epoch": progress.epoch} if progress.step < progress.total_steps else {}
    tune.report(
        {
            "progress": progress,
            "test_accuracy": progress.evaluation.accuracy,
            "public_accuracy": public.accuracy if public else None,
            **epoch,
        }
    )


def train(
    trials: Sequence[PlannedTrial],
    observer: TrainingObserver,
    resources: ResourceSettings,
    scheduler: SchedulerSettings,
    context: TrialContext,
    name: str,
) -> None:
    """Train every trial, sending events to ``observer`` as they happen; return when all have ended.

    Tune retries a trial whose worker died during training, but not one whose worker died before training started.
    This function retries those in a further round, where a scheduler does not compare them with the earlier trials.
    So it does with trials that ended for lack of memory, half as many at once as before, until one alone lacks it.
    """
    retries, at_once = resources.max_failures, resources.max_concurrent
    while trials and not observer.must_stop:
        callback = _ObserverCallback(observer, retries, context, alone=at_once == 1)
        _train_round(trials, callback, resources.model_copy(update={"max_concurrent": at_once}), scheduler, name)
        if callback.out_of_memory:
            at_once = max(1, min(at_once or len(trials), callback.most_at_once) // 2)
        elif retries == 0:
            return
        else:
            retries -= 1
        again = {*callback.lost_before_start, *callback.out_of_memory}
        trials = [planned for planned in trials if planned.key in again]


def _train_round(
    trials: Sequence[PlannedTrial],
    callback: _ObserverCallback,
    resources: ResourceSettings,
    scheduler: SchedulerSettings,
    name: str,
) -> None:
    """Train every trial once, or more often where its worker is lost."""
    context, by_key = callback.context, {planned.key: planned for planned in trials}
    worker = tune.with_parameters(train_trial, trials=by_key, context=context)
    tuner = tune.Tuner(
        tune.with_resources(worker, {"cpu": resources.cpus, "gpu": resources.gpus}),
        param_space={"key": tune.grid_search(list(by_key))},
        tune_config=tune.TuneConfig(
            scheduler=_SCHEDULERS[scheduler.name](scheduler),
            max_concurrent_trials=resources.max_concurrent,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=context.files.tune,
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=callback.retries),
            callbacks=[callback],
            stop=_Stop(callback.observer),
        ),
    )
    with _lack_of_memory_is_a_loss():
        _fit(tuner, context.files.tune)


@contextlib.contextmanager
def _lack_of_memory_is_a_loss() -> Iterator[None]:
    """Let Tune treat a worker that Ray killed for lack of memory as any lost worker; by itself it ends all trials.

    Tune 2.60 knows a lost worker by `RayActorError`, of which Ray's `OutOfMemoryError` is no subclass.
    """
    modules: tuple[Any, ...] = (actor_manager, tune_controller)
    for module in modules:
        module.RayActorError = (RayActorError, OutOfMemoryError)
    try:
        yield
    finally:
        for module in modules:
            module.RayActorError = RayActorError


class _Stop(tune.Stopper):
    """Ends the experiment when the observer says so."""

    def __init__(self, observer: TrainingObserver) -> None:
        self._observer: TrainingObserver | None = observer

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._observer is not None and self._observer.must_stop is not None

    def __getstate__(self) -> dict[str, Any]:
        """Without the observer, as of `_ObserverCallback`."""
        return {"_observer": None}


def _fit(tuner: tune.Tuner, tune_folder: str) -> None:
    try:
        tuner.fit()
    except EOFError as error:  # Tune reads back state files that a full disk has cut short
        raise StorageError(
            f"{tune_folder} holds a file that was cut short; is the disk full? Free some space, and the same command "
            "continues"
        ) from error


def _trial_name(trial: Any) -> str:
    return str(trial.config["key"])


def _asha(settings: SchedulerSettings) -> TrialScheduler:
    return ASHAScheduler(
        time_attr="epoch",
        metric=settings.metric,
        mode="max",
        max_t=10**9,
        grace_period=settings.grace_epochs,
        reduction_factor=settings.reduction_factor,
    )


def _fifo(settings: SchedulerSettings) -> TrialScheduler:
    return FIFOScheduler()  # type: ignore[no-untyped-call]


_SCHEDULERS = {"fifo": _fifo, "asha": _asha}


class _ObserverCallback(tune.Callback):
    """Translates Tune's events of one round for a `TrainingObserver`.

    alone: whether no trial runs beside another one. lost_before_start, out_of_memory: keys of trials to try again.
    most_at_once: how many trials ran at the same time.
    """

    def __init__(self, observer: TrainingObserver, retries: int, context: TrialContext, alone: bool) -> None:
        self.retries, self.context, self.observer, self._alone = retries, context, observer, alone
        self.lost_before_start: list[str] = []
        self.out_of_memory: list[str] = []
        self.most_at_once = 1

    def __getstate__(self) -> dict[str, Any]:
        """Empty: Tune pickles callbacks only for `Tuner.restore`, which is not used."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.most_at_once = max(self.most_at_once, sum(each.status == "RUNNING" for each in trials))
        self.observer.started(_trial_name(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "progress" in result:
            self.observer.progressed(_trial_name(trial), result["progress"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key, error = _trial_name(trial), trial.last_result.get("error")
        if self.observer.must_stop and not error and not exists(self.context.files.trial(key).training):
            return  # left for another run, unlike a trial that the scheduler stopped
        if error is not None:
            self.observer.failed(key, error)
        else:
            self.observer.ended(key)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key, was_alone = _trial_name(trial), self._alone or self.most_at_once == 1
        if _lacked_memory(trial) and was_alone:
            self.observer.failed(key, _LACK_OF_MEMORY)
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
    """Whether the last failure of a trial is that Ray killed its worker for lack of memory."""
    try:
        text = Path(trial.error_file or "").read_text()
    except OSError:
        return False
    return "low on memory" in text.rpartition("Failure # ")[2]


def _stored_error(trial: Any) -> Exception | None:
    """Why Tune gave up on a trial: the exception that the trial raised, if it raised one."""
    error: Exception | None = trial.get_pickled_error()
    if error is None:
        text = trial.get_error()
        return tune.TuneError(text) if text else None
    return error.cause if isinstance(error, RayTaskError) else error
