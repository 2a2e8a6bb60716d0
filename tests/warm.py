"""Processes that are forked from one which has imported what commands import: that takes longer than most of them run.

Ray is left out: it reads the environment when it is imported. So is torchvision, which takes four seconds and few need.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

PRELOADED: Final = (
    "sklearn.datasets",
    "dpsweep.orchestration.commands.main",
    "dpsweep.orchestration.report.page",
    "dpsweep.orchestration.tracking.mlflow",
    "dpsweep.workers.trials.trial",
    "dpsweep.workers.training.trainer",
)
FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*PRELOADED])
