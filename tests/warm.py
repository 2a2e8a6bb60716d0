"""Processes that are forked from one which has imported what tests import: that takes longer than most of them run.

Ray is left out: it reads the environment when it is imported.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "dp_accounting.pld",
        "hypothesis",
        "mpmath",
        "scipy.stats",
        "sklearn.datasets",
        "torchvision",
        "dpsweep.orchestration.commands.main",
        "dpsweep.orchestration.report.page",
        "dpsweep.orchestration.tracking.mlflow",
        "dpsweep.workers.trials.trial",
        "dpsweep.workers.training.trainer",
    ]
)
