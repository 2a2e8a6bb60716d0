"""Whole training runs and what they stored, for the tests of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.shards import NormShards, PartNorms
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import load_dataset
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.history import TrainingResult
from dpsweep.workers.trials.trial import run_trial
from tests.workers.trial_specs import TUMOURS
from tests.workers.user_modules import code_of

TRAIN_SIZE = len(load_dataset(TUMOURS).train)
ROWS = ("example_ids", "groups", "norms", "contributions", "losses")


def train(spec: TrialSpec, root: Path, **options: Any) -> tuple[TrainingResult, Trace, TrialFiles]:
    result = run_trial(spec, str(root), **{"code": code_of(spec), **options})
    files = TrialFiles(str(root))
    return result, read_trace(files.trace), files


def norms_of(files: TrialFiles) -> PartNorms:
    """All parts of the snapshots of all training examples."""
    shards = NormShards(files.norms)
    parts = [shards.read(part) for part in shards.parts]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ROWS}
    return replace(parts[0], **columns)
