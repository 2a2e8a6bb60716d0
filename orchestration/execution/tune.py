"""Training under Ray Tune: the only module that imports ray.tune.

Tune starts trials, restarts those whose worker died, and runs the scheduler that the sweep asks for. Its state is not
needed to resume: a trial continues from its own checkpoint, and ``result.json`` marks it as complete. A trial whose
worker died is retried; a trial that raised an exception has failed and is not.

Tune stores and prints whatever a trial raises or reports, so trials raise and report only what may be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune
from ray.exceptions import RayTaskError
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from accounting.errors import StorageError
from accounting.records import exists
from orchestration.execution.backend import TrainingObserver, TrialContext
from orchestration.sweeps.plan import PlannedTrial
from orchestration.sweeps.schema import ResourceSettings, SchedulerSettings
from orchestration.sweeps.user_code import unpacked
from workers.trial import Progress, run_trial


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
    root, code = context.files.trial(planned.key).root, context.code
    try:
        context.require_key()
        run_trial(planned.spec, root, code=unpacked(code), releases=planned.releases, on_progress=_report)
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
    """
    for retries in range(resources.max_failures, -1, -1):
        if not trials or observer.must_stop:
            return
        callback = _ObserverCallback(observer, retries, context)
        by_key = {planned.key: planned for planned in trials}
        worker = tune.with_parameters(train_trial, trials=by_key, context=context)
        trainable = tune.with_resources(worker, {"cpu": resources.cpus, "gpu": resources.gpus})
        tuner = tune.Tuner(
            trainable,
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
                failure_config=tune.FailureConfig(max_failures=retries),
                callbacks=[callback],
                stop=_Stop(observer),
            ),
        )
        _fit(tuner, context.files.tune)
        trials = [by_key[key] for key in callback.lost_before_start]


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
    """Translates Tune's events for a `TrainingObserver`."""

    def __init__(self, observer: TrainingObserver, retries: int, context: TrialContext) -> None:
        self._observer, self._retries, self._context = observer, retries, context
        self.lost_before_start: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """Empty: Tune pickles callbacks only for `Tuner.restore`, which is not used."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._observer.started(_trial_name(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "progress" in result:
            self._observer.progressed(_trial_name(trial), result["progress"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        key, error = _trial_name(trial), trial.last_result.get("error")
        if self._observer.must_stop and not error and not exists(self._context.files.trial(key).training):
            return  # left for another run, unlike a trial that the scheduler stopped
        if error is not None:
            self._observer.failed(key, error)
        else:
            self._observer.ended(key)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.num_failures <= self._retries:
            self.lost_before_start.append(_trial_name(trial))
            return
        error, key = _stored_error(trial), _trial_name(trial)
        reason = self._context.failure(key, error) if error else "the reason could not be stored; is the disk full?"
        self._observer.failed(key, f"its worker was lost too often: {reason}")


def _stored_error(trial: Any) -> Exception | None:
    """Why Tune gave up on a trial: the exception that the trial raised, if it raised one."""
    error: Exception | None = trial.get_pickled_error()
    if error is None:
        text = trial.get_error()
        return tune.TuneError(text) if text else None
    return error.cause if isinstance(error, RayTaskError) else error
