"""What was set for a trial and what it found, as flat parameters that runs can be selected by."""

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
    """The trial's specification below ``spec.``, without what its labels say already.

    MLflow's comparison starts with the first three names that differ: with this prefix the labels come before them.
    """
    said = {"key", *labels, *(f"{_FIELDS.get(axis, axis)}.name" for axis in labels)}
    return {f"spec.{name}": value for name, value in _flat(asdict(spec)).items() if name not in said}


_FIELDS = {"schedule": "noise.schedule"}
"""Where the specification has what a label says, if not under the label's own name."""


def found_sizes(training: TrainingResult) -> dict[str, Label]:
    """What the data and the model turned out to be."""
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return {**sizes, "parameters": training.parameters}


def dataset_of(data: DataSpec, training: TrainingResult) -> PublishedDataset:
    digest = hashlib.sha256(json.dumps(asdict(data), sort_keys=True).encode()).hexdigest()[:16]
    sizes = {"train_size": training.train_size, "test_size": training.test_size}
    return PublishedDataset(data.name, digest, data.name, sizes)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Label]:
    """Nested parameters by dotted names; what is not set is left out."""
    flat: dict[str, Label] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        elif isinstance(item, str | int | float):
            flat[f"{prefix}{key}"] = item
        elif item is not None:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat
