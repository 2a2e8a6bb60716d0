"""Exact counts and means over batches and groups of training examples as data, and their file. Private data.

Imports no torch, because commands that compare trials read them only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Final

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.sealed import read_private, write_private


@dataclass
class GroupCourse:
    """Exact means over the training examples of a group, one per epoch; None if it had no finite loss and norm.

    `losses`, `norms`: loss, and gradient norm before clipping, both at the last refresh. `biases`: norm of the
    difference between clipped and unclipped gradient, by the clipping rule of the epoch's last step (paper D, Section
    4.2).
    """

    group: NonNegativeInt
    examples: PositiveInt
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    biases: list[float | None] = field(default_factory=list)


@dataclass
class GroupDepartures:
    """Training examples of a group that have spent the whole budget of a filter. left: number after each epoch."""

    group: NonNegativeInt
    examples: PositiveInt
    left: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextCounts:
    """Numbers of training texts: in all, cut at ``length`` tokens, and without any token."""

    texts: NonNegativeInt
    length: NonNegativeInt
    cut: NonNegativeInt
    empty: NonNegativeInt


@dataclass
class Counters:
    """Exact counts and means over training batches and examples. Private data.

    texts: None for other data. departures: one for each group with examples, if the clipping method is a filter.
    courses: likewise, if norms are refreshed.
    """

    texts: TextCounts | None = None
    non_finite_gradients: NonNegativeInt = 0
    empty_batches: NonNegativeInt = 0
    departures: list[GroupDepartures] = field(default_factory=list)
    courses: list[GroupCourse] = field(default_factory=list)


COUNTERS: Final[TypeAdapter[Counters]] = TypeAdapter(Counters)


def write_counters(uri: str, counters: Counters) -> None:
    """Store the counters in a file that only its owner may read. Raises: StorageError."""
    write_private(uri, json.dumps(asdict(counters)).encode())


def read_counters(uri: str) -> Counters:
    """Return the stored counters of a trial; empty if there are none. Raises: DataCorruption when they are damaged."""
    try:
        return COUNTERS.validate_json(read_private(uri))
    except FileNotFoundError:
        return Counters()
    except ValidationError as error:
        raise DataCorruption(f"{uri} is damaged; restore it from a backup, or run the trial again") from error
