"""The training split on the device, from which a step takes the rows of its batch."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from dpsweep.workers.clipping import Examples
from dpsweep.workers.data import Dataset, as_targets
from dpsweep.workers.gradients import BatchNorms
from dpsweep.workers.machine.devices import room_for_data
from dpsweep.workers.sampling.users import slots_of, with_weights
from dpsweep.workers.spec import UserSpec


class TrainingData:
    """The training split, kept on the device if it fits. ``rows`` are positions in the split, int64 [b].

    `room`: largest number of bytes of features and labels to keep on the device; larger data stay in the memory of the
    host, and each batch is copied to the device.
    """

    def __init__(self, dataset: Dataset, device: torch.device, room: float) -> None:
        split = dataset.train
        place = device if split.features.nbytes + split.labels.nbytes <= room else torch.device("cpu")
        self._preparation = dataset.preparation
        self._features, self._labels = split.features.to(place), split.labels.to(place)
        self._groups, self._ids = split.groups.to(device), split.example_ids
        self.device = device

    def __len__(self) -> int:
        return len(self._ids)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return prepared features [b, ...] and labels [b, ...], copies of those stored.

        index_select copies whole rows, indexing single values.
        """
        return self._prepared(rows), as_targets(_at(self._labels, rows).to(self.device))

    def _prepared(self, rows: Tensor) -> Tensor:
        return self._preparation(_at(self._features, rows).to(self.device))

    def examples(self, rows: Tensor, norms: BatchNorms) -> Examples:
        """Return what a clipping method may know about the examples ``rows``."""
        return Examples(norms.norms, self._groups.index_select(0, rows), rows, norms.layer_norms)

    def ids(self, rows: Tensor) -> Tensor:
        """Return example ids [b], on the CPU."""
        return self._ids[rows.cpu()]


def _at(column: Tensor, rows: Tensor) -> Tensor:
    return column.index_select(0, rows.to(column.device))


class UserData(TrainingData):
    """The training split as users, each an example of ``most`` consecutive rows
    (`dpsweep.workers.sampling.users.slots_of`).

    ``rows`` are positions among the users. Targets carry the weights of the rows
    (`dpsweep.workers.sampling.users.per_user`).
    """

    def __init__(self, dataset: Dataset, device: torch.device, room: float, most: int) -> None:
        super().__init__(dataset, device, room)
        slots, weights = slots_of(dataset.train, most)
        self._slots, self._weights = torch.from_numpy(slots).to(device), torch.from_numpy(weights).to(device)
        self._targets: Tensor | None = None
        """Targets of all users [users, most, 2], where a row has one label: joined once, not at every step."""
        if self._labels.ndim == 1:
            labels = as_targets(_at(self._labels, self._slots.flatten()).to(device))
            self._targets = with_weights(labels, self._weights.flatten()).view(*slots.shape, 2)
        self._groups, self._ids = torch.zeros(len(slots), dtype=torch.int64, device=device), torch.arange(len(slots))

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return prepared features and weighted targets of the users' rows, [b * most, ...]."""
        slots = _at(self._slots, rows).flatten()
        if self._targets is not None:
            return self._prepared(slots), _at(self._targets, rows).flatten(0, 1)
        features, labels = super().inputs(slots)
        return features, with_weights(labels, _at(self._weights, rows).flatten())


def training_data(dataset: Dataset, users: UserSpec | None, device: torch.device) -> TrainingData:
    """Return the population that is sampled: the rows of the training split, or its users."""
    room = room_for_data(device)
    if users is None:
        return TrainingData(dataset, device, room)
    match users.sampling:
        case "els":
            return TrainingData(dataset, device, room)
        case "uls":
            return UserData(dataset, device, room, users.max_records)
        case _:
            assert_never(users.sampling)
