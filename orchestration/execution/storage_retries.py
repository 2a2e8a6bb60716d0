"""Training that waits where an object store refuses for a while: a trial goes on from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from accounting.errors import StorageError
from orchestration.execution.backend import TrialContext
from orchestration.sweeps.plan import PlannedTrial
from workers.imports import UserCode
from workers.trial import Progress, run_trial

PAUSES = (2.0, 6.0, 15.0, 25.0, 30.0)
"""Seconds after which a trial is tried again while the storage refuses: longer than most object stores are away."""


def train_patiently(
    planned: PlannedTrial, context: TrialContext, code: UserCode, report: Callable[[Progress], None]
) -> None:
    """Train one trial in this process, again after each of `PAUSES` while an object store refuses; see `patiently`."""
    root = context.files.trial(planned.key).root
    patiently(root, lambda: run_trial(planned.spec, root, code=code, releases=planned.releases, on_progress=report))


def patiently(root: str, train: Callable[[], object]) -> None:
    """Train the trial in ``root``, again after each of `PAUSES` while an object store refuses.

    Epochs since the last checkpoint are reported again. A local disk that refuses is full, and waits for nobody.

    Raises: StorageError where the storage still refuses, and whatever ``train`` does.
    """
    for pause in (*(PAUSES if "://" in root else ()), None):
        try:
            train()
        except StorageError:
            if pause is None:
                raise
            time.sleep(pause)
        else:
            return
