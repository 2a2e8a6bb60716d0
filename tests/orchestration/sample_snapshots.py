"""Statuses as drivers write them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dpsweep.orchestration.store.status_snapshot import SweepSnapshot, TrialSnapshot


def snapshot_of(*trials: TrialSnapshot, age: float = 0.0, **changes: Any) -> SweepSnapshot:
    """Return the status that a driver wrote ``age`` seconds ago, with ``changes`` of its fields."""
    found = SweepSnapshot(
        name="small",
        sweep_id="id",
        state="running",
        heartbeat=time.time() - age,
        elapsed=9.0,
        seconds_left=None,
        host="host",
        pid=1,
        job=None,
        trials=trials,
    )
    return replace(found, **changes)
