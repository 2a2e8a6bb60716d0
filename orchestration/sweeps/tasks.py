"""What the task of the data requires of a sweep. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from accounting.errors import InvalidInput
from orchestration.sweeps.compare import require_defined
from orchestration.sweeps.schema import SweepSpec
from orchestration.sweeps.tune import require_selectable
from workers.data import DatasetDescription


def require_one_task(sweep: SweepSpec, known: Iterable[DatasetDescription], dataset: DatasetDescription) -> None:
    """Raises: InvalidInput where the sweep has data of another task, or asks for numbers that the task lacks.

    known: descriptions of the data of the sweep so far.
    """
    other = next((each for each in known if each.task != dataset.task), None)
    if other is not None:
        raise InvalidInput(
            f"the data {other.name} are for {other.task}, but {dataset.name} for {dataset.task}, whose numbers cannot "
            "be compared; give each a sweep of its own"
        )
    require_defined(sweep.compare, dataset.name, len(dataset.class_names), dataset.task)
    require_selectable(sweep.tune, dataset.task)
