"""Parameters of a trial as flat names and values, by which MLflow can filter and compare runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from orchestration.records.published import Label, PublishedDataset
from workers.history import TrainingResult
from workers.spec import DataSpec, TrialSpec


def parameters(spec: TrialSpec, labels: Mapping[str, Label]) -> dict[str, Label]:
    """The trial's specification as flat parameters ``spec.*``, without those that its labels already give.

    MLflow's comparison page preselects the first three parameters that differ, in alphabetical order; the prefix
    ``spec.`` makes it pick labels.
    """
    said = {"key", *labels, *(f"{_FIELDS.get(axis, axis)}.name" for axis in labels)}
    return {f"spec.{name}": value for name, value in _flat(asdict(spec)).items() if name not in said}


_FIELDS = {"schedule": "noise.schedule"}
"""Labels whose field in the specification has another name."""


def found_sizes(training: TrainingResult) -> dict[str, Label]:
    """Sizes known after training: of the training and test data, and the number of model parameters."""
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return {**sizes, "parameters": training.parameters}


def dataset_of(data: DataSpec, training: TrainingResult) -> PublishedDataset:
    """The training data by name, digest of its specification, and sizes."""
    digest = hashlib.sha256(json.dumps(asdict(data), sort_keys=True).encode()).hexdigest()[:16]
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return PublishedDataset(data.name, digest, data.name, sizes)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Label]:
    """Nested parameters by dotted names; None is left out."""
    flat: dict[str, Label] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        elif isinstance(item, str | int | float):
            flat[f"{prefix}{key}"] = item
        elif item is not None:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat
