"""Wait while an object store fails, and try again."""

from __future__ import annotations

import time
from collections.abc import Callable

from dpsweep.accounting.errors import StorageError
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.training.history import Progress

PAUSES = (2.0, 6.0, 15.0, 25.0, 30.0)
"""Seconds to wait before each retry after a storage error; in total longer than most outages of object stores."""


def train_patiently(planned: PlannedTrial, root: str, code: UserCode, report: Callable[[Progress], None]) -> None:
    """Train one trial in this process, with retries while the object store of its folder fails; see `patiently`.

    A retry continues from the last checkpoint, and reports the epochs since then again.
    """
    from dpsweep.workers.trials.trial import run_trial  # late: it imports torch, and drivers import this module

    patiently(root, lambda: run_trial(planned.spec, root, code=code, releases=planned.releases, on_progress=report))


def patiently(root: str, work: Callable[[], object]) -> None:
    """Call ``work``, which writes to ``root``, and again after each of `PAUSES` while an object store fails.

    A local disk is not retried: an error means that it is full. Raises: StorageError if the storage still fails after
    the last retry, and any other error of ``work``.
    """
    for pause in (*(PAUSES if "://" in root else ()), None):
        try:
            work()
        except StorageError:
            if pause is None:
                raise
            time.sleep(pause)
        else:
            return
