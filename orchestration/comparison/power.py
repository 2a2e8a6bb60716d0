"""The smallest difference between settings that a sweep can show, before it is run. Pure.

A difference d is found in four of five sweeps if its interval has a half width of about d t / (t + t_0.8), with
quantiles t of Student's distribution. All intervals hold together. Before a sweep its variance is a guess; after it,
`Findings.detectable` of `dpsweep.orchestration.comparison.findings` uses what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from scipy import special

from dpsweep.orchestration.comparison.extremes import groups_not_shown
from dpsweep.orchestration.comparison.findings import POWER
from dpsweep.orchestration.comparison.intervals import TAIL, unnoticed
from dpsweep.orchestration.store.published import RUNS
from dpsweep.orchestration.sweeps.grid import GridPoint, grid
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.evaluation.scores import shown_groups

SEEDS: Final = (2, 3, 5, 10)
"""Numbers of seeds that a plan shows."""


OF_SEEDS: Final = 0.01
"""Assumed standard deviation over seeds of the paired difference of two settings, as a share; on handwritten digits,
ten seeds, it was 0.2 to 0.6 points."""
UNLIKE: Final = 0.1
"""Assumed share of test examples on which two settings differ."""
RIGHT: Final = 0.85
"""Assumed accuracy of groups."""


@dataclass(frozen=True)
class Design:
    """The size of a comparison: private settings, test examples in all and in the smallest shown group, groups.

    `unit`: what is independent and is counted, ``users`` where the test data name them.
    """

    settings: int
    examples: int
    smallest: int
    groups: int
    unit: Literal["examples", "users"] = "examples"


@dataclass(frozen=True)
class Detectable:
    """Smallest differences, as shares, that this number of seeds shows; 1 if nothing smaller does.

    `worst_group`, `gap`: None for a single group.
    """

    seeds: int
    accuracy: float
    worst_group: float | None
    gap: float | None

    @property
    def known(self) -> tuple[float, ...]:
        """Return those that the design compares."""
        return tuple(each for each in (self.accuracy, self.worst_group, self.gap) if each is not None)


def design(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> Design | None:
    """Return the design of a sweep; None if it compares no two settings of classes, or tunes them on other data.

    Groups are those that are large enough to be shown (`shown_groups`). `trials`: as planned, without refused ones; in
    a sweep that tunes first, the tuning's trials, and the compared ones are trained after it.
    """
    points = [trial.point for trial in trials] if sweep.tune is None else _compared(sweep)
    private = [trial for trial in trials if trial.spec.is_private and trial.dataset.task == "classification"]
    settings = {
        tuple((name, str(value)) for name, value in point.labels.items() if name not in RUNS)
        for point in points
        if point.is_private
    }
    if len(settings) < 2 or not private or (sweep.tune is not None and sweep.tune.data is not None):
        return None
    least = min(private, key=lambda each: each.dataset.test_size)
    users = least.dataset.test_users
    sizes = np.array(least.dataset.test_group_sizes)
    shown = shown_groups(sizes, least.spec.min_group_size)
    counts = sizes if users is None else np.array(least.dataset.test_group_users)
    units = least.dataset.test_size if users is None else users
    smallest = int(counts[shown].min()) if len(shown) else units
    return Design(len(settings), units, smallest, max(1, len(shown)), "examples" if users is None else "users")


def _compared(sweep: SweepSpec) -> tuple[GridPoint, ...]:
    """Return the trials of the file, before any value is tuned: their settings are compared."""
    return grid(sweep.model_copy(update={"adapted": None}))


def hours_by_seeds(sweep: SweepSpec, planned: int, hours: float) -> Callable[[int], float] | None:
    """Return the hours of all steps of a sweep by its number of seeds; None if its number of trials is random.

    `planned`: number of planned trials. `hours`: of their steps. Trials after a tuning are taken to last as long as
    its own.
    """
    seeds, trials = len(set(sweep.seeds)), len(_compared(sweep))
    if sweep.tune is None or sweep.adapted is not None:
        return lambda count: hours * count / seeds
    if sweep.tune.is_selection or not planned:
        return None
    return lambda count: hours * (1.0 + trials / planned * count / seeds)


def detectable(of: Design, seeds: int) -> Detectable:
    """Return the smallest differences that a design with this number of seeds shows in four of five sweeps."""
    several = of.groups > 1
    pairs = of.settings * (of.settings - 1) // (1 if several else 2)  # of two metrics, or of one
    freedom = (of.settings - 1) * (seeds - 1)
    of_seeds = (OF_SEEDS * unnoticed(seeds - 1)) ** 2 / seeds
    of_one = RIGHT * (1.0 - RIGHT) / of.smallest

    def smallest(of_examples: float, comparisons: int) -> float:
        quantiles = 1.0 - TAIL / comparisons, POWER
        by_seeds = math.sqrt(of_seeds) * sum(float(special.stdtrit(freedom, each)) for each in quantiles)
        by_examples = math.sqrt(of_examples) * sum(float(special.ndtri(each)) for each in quantiles)
        return min(1.0, math.hypot(by_seeds, by_examples))

    groups = of.groups
    return Detectable(
        seeds,
        smallest(UNLIKE / of.examples, pairs),
        smallest(2.0 * of_one, pairs * groups) if several else None,
        smallest(4.0 * of_one, pairs * groups * (groups - 1)) if several else None,
    )


def lines(of: Design, planned: int, hours: Callable[[int], float] | None = None) -> list[str]:
    """Return the lines on what a design shows with several numbers of seeds.

    planned: seeds of the sweep. hours: of all steps, by number of seeds, if known.
    """
    several = of.groups > 1
    smallest = f" (the smallest of {of.groups} groups: {of.smallest:,})" if several else ""
    what = "accuracy, worst group, gap" if several else "accuracy"
    found = [
        f"what {of.settings} private settings can show, on {of.examples:,} test {of.unit}{smallest}: differences in "
        f"{what}, found in 4 of 5 sweeps"
    ]
    for seeds in sorted({*SEEDS, planned} - {1}):
        each = detectable(of, seeds)
        cost = "" if hours is None else f", {hours(seeds):.3g} hours of steps"
        points = ", ".join(map(_points, each.known))
        found.append(f"  {seeds:>2} seeds: {points} points{cost}{' (planned)' * (seeds == planned)}")
    right = f", groups are right for {100 * RIGHT:g}%" if several else ""
    return [
        *found,
        f"  assumed: seeds move a difference by {100 * OF_SEEDS:g} point, two settings differ on "
        f"{100 * UNLIKE:g}% of test {of.unit}{right}",
    ]


def warnings(of: Design | None, planned: int, asked: float | None) -> list[str]:
    """Return a warning if the design cannot show a difference of accuracy as small as ``asked``, a share.

    `of`: None if nothing is known of the design, so that what is asked cannot be judged.
    """
    if of is None:
        return [] if asked is None else [_UNKNOWN]
    if planned < 2:
        return ["each setting has one seed, so no difference can be shown; list several, such as seeds: [0, 1, 2]"]
    if asked is None:
        return []
    least = detectable(of, planned).accuracy
    if least <= asked:
        return []
    enough = next((seeds for seeds in range(planned + 1, 101) if detectable(of, seeds).accuracy <= asked), None)
    advice = f"{enough} seeds would do" if enough else "more seeds do not help; it takes more test examples"
    return [
        f"compare.detect asks for {_points(asked)} points of accuracy, but {planned} seeds show differences from "
        f"{_points(least)} points on; {advice}"
    ]


def hidden_groups(trials: Sequence[PlannedTrial]) -> list[str]:
    """Return a warning for each data set with groups that no result will show, in the words of `hidden_groups_note`."""
    found: dict[str, None] = {}
    for data, least in ((trial.dataset, trial.spec.min_group_size) for trial in trials):
        shown = shown_groups(np.array(data.test_group_sizes), least).tolist()
        hidden = [name for group, name in enumerate(data.group_names) if group not in shown]
        if sentence := groups_not_shown(hidden, len(data.group_names), [str(least)]):
            found[f"data {data.name}: {sentence}"] = None
    return list(found)


_UNKNOWN: Final = (
    "compare.detect is not judged: what a sweep can show is predicted for the accuracy of two private settings or "
    "more, on data that the plan reads; the report says what it could have shown"
)


def _points(share: float) -> str:
    return "none below 100" if share >= 1.0 else f"{100 * share:.1f}"
