"""Smaller micro-batches for a trial whose memory does not suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.spec import TrialSpec

_SHRINK_FACTOR: Final = 4
"""Factor by which each further attempt shrinks the micro-batch."""


class LackOfMemory(InvalidInput):
    """The memory of the device does not suffice for the trial at its micro-batch size."""


def in_smaller_pieces(spec: TrialSpec, dataset_size: int) -> TrialSpec | None:
    """Return the trial with a quarter of its micro-batch size; None if that is one example already."""
    size = spec.execution.micro_batch_size or spec.sampling.expected_size(dataset_size)
    if size == 1:
        return None
    return replace(spec, execution=replace(spec.execution, micro_batch_size=max(1, size // _SHRINK_FACTOR)))
