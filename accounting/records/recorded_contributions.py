"""Recorded contributions of examples, checked against the run that recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsweep.accounting.errors import InvalidInput, count_of, require_numbers, require_whole
from dpsweep.accounting.mechanism.correlated import require_step_by_step
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.shards import check_contributions


def checked_snapshots(
    steps: Sequence[int] | NDArray[np.integer[Any]], contributions: ArrayLike, trace: Trace
) -> tuple[list[int], NDArray[np.float64]]:
    """Return the steps of snapshots [snapshots] as ints, and their contributions [examples, snapshots] as doubles.

    Raises: InvalidInput for steps that are not whole, do not start at 0, do not increase or lie beyond the run.
    InvalidInput also for shapes that do not match, for NaN and for contributions outside [0, 1]. UnsupportedMechanism
    where what one example contributes has no known cost
    (`dpsweep.accounting.mechanism.correlated.require_step_by_step`).
    """
    require_step_by_step(trace)
    starts = [require_whole("a snapshot step", step, at_least=0) for step in require_numbers("steps", steps, 1)]
    values = require_numbers("contributions", contributions, 2)
    if values.shape[1] != len(starts):
        raise InvalidInput(
            f"contributions have shape {values.shape}, but must be [examples, {len(starts)}], one column per snapshot"
        )
    if not starts or starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
        raise InvalidInput(f"snapshot steps are {starts[:5]}..., but must start at 0 and increase")
    if starts[-1] >= max(trace.steps, 1):
        raise InvalidInput(
            f"a snapshot was taken at step {starts[-1]}, but the trace has {count_of(trace.steps, 'step')}; give "
            "the trace of the run that recorded it"
        )
    check_contributions(values, "individual accounting")
    return starts, np.asarray(values, np.float64)
