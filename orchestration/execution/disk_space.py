"""Check for free disk space before any trial starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records import exists
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.planned import Plan

REPORTS_AND_TRACKING = 64 * 2**20
"""Bytes reserved for the two reports, MLflow and logs; the quickstart sweep needs about half of this."""
MODELS_AND_CHECKPOINTS = 4 * 2**20
"""Bytes reserved per trial for a small model and its checkpoints, in addition to norm shards."""


def require_space(files: SweepFiles, plan: Plan) -> None:
    """Refuse a sweep whose remaining trials do not fit on the disk of its folder; object stores are not checked.

    Shards are counted at their size before compression, an upper bound; the rest is a rough estimate.
    Raises: InvalidInput with the needed and the free space, and what to do.
    """
    if "://" in files.root:
        return
    pending = [trial for trial in plan.trials if not exists(files.trial(trial.key).result)]
    if not pending:
        return
    needed = REPORTS_AND_TRACKING + sum(MODELS_AND_CHECKPOINTS + trial.shard_bytes for trial in pending)
    folder = Path(files.root)
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    if free < needed:
        raise InvalidInput(
            f"{files.root} has {free / 2**20:.0f} MiB free, but the sweep may write {needed / 2**20:.0f} MiB; free "
            "some space, choose another --output, or refresh norms less often (norms.refreshes_per_epoch)"
        )
