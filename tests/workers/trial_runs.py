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
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import Dataset, load_dataset
from dpsweep.workers.noise.gaussian_sources import NoiseSource
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.sampling.users import population_of
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.batch_gradients import recipe_of
from dpsweep.workers.training.history import TrainingResult
from dpsweep.workers.training.norm_recorder import stored_norms
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import DEVICE
from tests.workers.trial_specs import TUMOURS
from tests.workers.user_modules import code_of

TRAIN_SIZE = len(load_dataset(TUMOURS).train)
ROWS = ("example_ids", "groups", "norms", "contributions", "losses")


def train(spec: TrialSpec, root: Path, **options: Any) -> tuple[TrainingResult, Trace, TrialFiles]:
    result = run_trial(spec, str(root), **{"code": code_of(spec), **options})
    files = TrialFiles(str(root))
    return result, read_trace(files.trace), files


def made_trainer(
    spec: TrialSpec, root: Path, dataset: Dataset | None = None, noise: NoiseSource | None = None
) -> Trainer:
    """A trainer as `run_trial` makes it, before it begins; by default on the data and with the noise of the trial."""
    code, method = code_of(spec), make_clipping(spec.clipping)
    dataset = dataset or load_dataset(spec.data, code)
    noise = noise or make_noise_source(spec.noise_source, spec.seed, DEVICE)
    mechanism = mechanism_of(spec, method, population_of(spec, dataset))
    stores, recipe = stored_norms(TrialFiles(str(root)), spec.norms), recipe_of(spec, method, dataset, code)
    return Trainer(spec, mechanism, dataset, noise, stores, recipe)


def norms_of(files: TrialFiles) -> PartNorms:
    """All parts of the snapshots of all training examples."""
    shards = NormShards(files.norms)
    parts = [shards.read(part) for part in shards.parts]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ROWS}
    return replace(parts[0], **columns)
