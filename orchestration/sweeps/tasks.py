"""Checks that a sweep fits the task of its data. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.compare import require_defined
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.tune import require_selectable
from dpsweep.workers.dataset_description import DatasetDescription


def require_one_task(sweep: SweepSpec, known: Iterable[DatasetDescription], dataset: DatasetDescription) -> None:
    """Raise InvalidInput if other data of the sweep have another task, or if the sweep uses metrics that it lacks.

    known: descriptions of the sweep's data loaded so far.
    """
    other = next((each for each in known if each.task != dataset.task), None)
    if other is not None:
        raise InvalidInput(
            f"the data {other.name} are for {other.task}, but {dataset.name} for {dataset.task}, whose numbers cannot "
            "be compared; give each a sweep of its own"
        )
    require_defined(sweep.compare, dataset.name, len(dataset.class_names), dataset.task)
    if sweep.compare.worst_group == "user_accuracy" and dataset.test_users is None:
        raise InvalidInput(
            f"compare.worst_group is user_accuracy, but the test examples of {dataset.name} name no users; name them "
            "(data.user), or choose accuracy"
        )
    require_selectable(sweep.tune, dataset.task)
