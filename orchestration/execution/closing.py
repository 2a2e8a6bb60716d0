"""Store the norms and the trace of trials that a scheduler stopped, in Ray tasks with the resources of the trials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import ray

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.stopped_trials import close_here
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.resources import ResourceSettings
from dpsweep.orchestration.sweeps.user_code import unpacked

_RETRIES: Final = 8
"""Most repetitions of a task whose process or node was lost."""


_LOOK = 0.5
"""Seconds from one look at a task to the next."""


def close_on_node(
    planned: PlannedTrial, step: int, context: TrialContext, reserved: ResourceSettings
) -> Iterator[None]:
    """Close a trial that was stopped after ``step`` steps on a node that fits it; yield until that is done.

    Left early, the task ends with the driver; closing can be repeated. reserved: of the trial; one of its ranks
    suffices. Raises: StorageError or DpsweepError, with the text that may be shown.
    """
    bundle = reserved.bundle
    task = ray.remote(_close).options(
        num_cpus=bundle.get("CPU", 0.0),
        num_gpus=bundle.get("GPU", 0.0),
        max_retries=_RETRIES,
        **({"label_selector": dict(reserved.labels)} if reserved.labels else {}),
    )
    closing = task.remote(planned, step, context, reserved.processes)
    try:
        while not ray.wait([closing], timeout=_LOOK)[0]:
            yield
        failure = ray.get(closing)
    except ray.exceptions.RayError as error:
        raise DpsweepError(f"its process was lost too often ({type(error).__name__})") from error
    if failure is not None:
        raise failure


def _close(planned: PlannedTrial, step: int, context: TrialContext, ranks: int) -> DpsweepError | None:
    """Close the trial in this process; return the error that ended it, with only the text that may be shown."""
    try:
        context.require_node()
        close_here(planned, step, context, unpacked(context.code), ranks)
    except BaseException as error:  # user code may raise anything, and Ray would store its text
        return context.shown(planned.key, error)
    return None
