"""Types of a metric: the entries of `metrics.METRICS` and `rate_metrics.GROUP_METRICS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from dpsweep.orchestration.comparison.extremes import Extreme
from dpsweep.orchestration.comparison.formats import Format
from dpsweep.orchestration.comparison.tallies import Measure
from dpsweep.orchestration.comparison.values import Value
from dpsweep.orchestration.store.published import PublishedGroup, PublishedTrial

Better = Literal["higher", "lower", ""]


class MetricTable(Enum):
    """A table in which a metric can have a column; results.json holds every metric, MLflow every tracked one."""

    SETTINGS = auto()
    """The report's table of settings, averaged over seeds."""
    TRIALS = auto()
    """The report's table of all trials."""
    FAIRNESS = auto()
    """The report's table of rates on test data and gaps between groups, averaged over seeds."""
    TERMINAL = auto()
    """The table that ``dpsweep run`` and ``dpsweep report`` print."""


@dataclass(frozen=True)
class Metric:
    """One number of a trial, and how it is shown.

    `name`: its name in results.json.
    `tracked`: its name in MLflow, with the section (``final/``, ``fairness/``, ``privacy/``); None if a parameter of
    the run has the same value.
    `heading`: heading of its column.
    `meaning`: its explanation in the report, "" if the heading suffices.
    `of_model`: whether it describes the final model; if so, it is not recorded as a final value for a stopped trial.
    `exact`: whether it is computed from training examples without noise; if so, it is known only where exact statistics
    are shown.
    `whose`: returns the groups that the number belongs to, if it is not that of all.
    `better`: whether higher or lower values are better; "" if neither is.
    `measure`: computes the number from (resampled) outcomes of test examples, for its interval; None if it does not
    depend on them.
    `task`: the task whose trials have it (`dpsweep.workers.tasks`); None for all tasks.
    `extreme`: the group metrics whose extreme over groups it is, or None.
    """

    name: str
    tracked: str | None
    heading: str
    value: Value
    format: Format
    meaning: str = ""
    places: frozenset[MetricTable] = frozenset()
    of_model: bool = False
    exact: bool = False
    whose: Callable[[PublishedTrial], tuple[str, ...]] = lambda trial: ()
    better: Better = ""
    measure: Measure | None = None
    task: str | None = None
    extreme: Extreme | None = None


@dataclass(frozen=True)
class GroupMetric:
    """One number of a group of test examples, and how it is shown.

    `name`: its name in results.json. `measure`: computes the number of every group from (resampled) outcomes, for its
    interval; None if it does not depend on them. `better`, `task`: as in `Metric`.
    """

    name: str
    heading: str
    value: Callable[[PublishedGroup], float | None]
    format: Format
    better: Better = ""
    measure: Measure | None = None
    task: str | None = None
