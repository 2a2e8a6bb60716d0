"""The numbers of ``status.json`` as gauges of the Ray cluster, for Prometheus.

Ray serves them on every node, with the prefix ``ray_``, until the driver ends. They show nothing beyond the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, final

from ray.util.metrics import Gauge

from dpsweep.orchestration.records.states import TrialState
from dpsweep.orchestration.records.status_snapshot import SweepSnapshot

Value = tuple[dict[str, str], float]
"""Tags of a gauge besides ``sweep``, and its value."""


@dataclass(frozen=True)
class SweepGauge:
    """A gauge: name, description, its values in a snapshot, and its tags besides ``sweep``."""

    name: str
    description: str
    values: Callable[[SweepSnapshot], Iterable[Value]]
    tags: tuple[str, ...] = ()


def _trials(snapshot: SweepSnapshot) -> Iterable[Value]:
    counts = snapshot.counts()
    return [({"state": state.value}, float(counts[state])) for state in TrialState]


def _epsilon(snapshot: SweepSnapshot) -> Iterable[Value]:
    known = [trial.epsilon for trial in snapshot.trials if trial.epsilon is not None]
    return [({}, max(known))] if known else []


SWEEP_GAUGES: Final = (
    SweepGauge("dpsweep_trials", "Trials by state.", _trials, ("state",)),
    SweepGauge("dpsweep_steps", "Steps trained, of all trials.", lambda s: [({}, float(s.steps))]),
    SweepGauge(
        "dpsweep_steps_per_second",
        "Steps trained per second, lately.",
        lambda s: [] if s.steps_per_second is None else [({}, s.steps_per_second)],
    ),
    SweepGauge("dpsweep_parts_accounted", "Parts accounted by this driver.", lambda s: [({}, float(s.parts))]),
    SweepGauge("dpsweep_epsilon", "Largest upper bound on epsilon of a private trial so far.", _epsilon),
    SweepGauge(
        "dpsweep_shard_bytes",
        "Bytes of the norm shards by now, before compression, as planned.",
        lambda s: [({}, float(s.shard_bytes))],
    ),
)


@final
class Gauges:
    """The gauges of one sweep; Ray must be initialised."""

    def __init__(self) -> None:
        self._gauges = [(each, Gauge(each.name, each.description, ("sweep", *each.tags))) for each in SWEEP_GAUGES]

    def show(self, snapshot: SweepSnapshot) -> None:
        """Set every gauge to its value in the snapshot."""
        for each, gauge in self._gauges:
            for tags, value in each.values(snapshot):
                gauge.set(value, {"sweep": snapshot.name, **tags})
