"""Recommend, before any training, whether to sample rows or users, and how many rows of each user to keep.

The comparison is of the noise in the mean gradient of a step at equal compute, where clipping changes nothing. That is
equally many gradients of rows a step, and equally many steps, as in Charles et al. 2024 (arXiv 2407.07737). The mean
gradient of a user with r rows is as long as one row's gradient if the rows are alike. It is sqrt(r) times shorter
if they are unrelated, and the clipping bound of ``uls`` may shrink with it. Only training shows which of the two holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from dpsweep.accounting.calibration.parameter_search import calibrate_noise_multiplier
from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.dataset_description import RowsPerUser
from dpsweep.workers.sampling.rows_per_user import RELEASE, median_rows, release_of
from dpsweep.workers.sampling.users import population, rows_kept
from dpsweep.workers.spec import UserSampling, UserSpec

WayVerdict = Literal["els", "uls", "unknown", "unreachable", "els_alone"]
"""The way with less noise; ``unknown`` where that depends on how alike the rows of a user are, ``unreachable`` where no
noise meets the target. ``els_alone`` where only that is proven."""


@dataclass(frozen=True)
class Way:
    """One way of protecting users, with its calibrated noise.

    `most`: rows that each user keeps at most.
    `members`: expected rows (``els``) or users (``uls``) of a step.
    `used`: share of all rows that is kept.
    `noise`: standard deviation of the noise of one coordinate of the mean gradient, in clipping bounds of a row.
    `unrelated`: the same, with the bound of a user's mean where the rows of a user are unrelated.
    """

    sampling: UserSampling
    most: int
    noise_multiplier: float
    members: float
    used: float
    noise: float
    unrelated: float


@dataclass(frozen=True)
class WaysCompared:
    """The ways that trials with this target may take on one data set, and which has less noise.

    `rows`, `steps`: gradients of rows of a step, and steps, equal for all.
    `parameters`: of the model, or None.
    `verdict`: on both ways at the median number of rows per user.
    `els`, `uls`: the best of each; see `_best`.
    """

    data: str
    target_epsilon: float
    delta: float
    rows: int
    steps: int
    users: int
    parameters: int | None
    ways: tuple[Way, ...]
    verdict: WayVerdict
    els: Way | None
    uls: Way | None


def comparisons(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> Iterator[WaysCompared]:
    """Yield one comparison for each data set and target of the private trials, by the rows per user. They are
    declared, or read off the data where the adjacency takes them as known.

    None without either. The first trial of each gives delta, accountant, steps, compute and side queries.
    """
    declared, seen = sweep.privacy.rows_per_user, set[tuple[str, float]]()
    for trial in trials:
        target, of_data = trial.point.target_epsilon, trial.dataset.name
        if target is None or trial.spec.users is None or (of_data, target) in seen:
            continue
        seen.add((of_data, target))
        if trial.spec.adjacency == "fixed_graph":
            yield _compared(sweep, trial, trial.spec.users, target, trial.dataset.rows_per_user, ("els",))
        elif declared is not None:
            yield _compared(sweep, trial, trial.spec.users, target, declared.histogram, _SAMPLINGS)


def _compared(
    sweep: SweepSpec,
    trial: PlannedTrial,
    asked: UserSpec,
    target: float,
    histogram: RowsPerUser,
    samplings: Sequence[UserSampling],
) -> WaysCompared:
    """Compare these ``samplings``, each with caps of 1, 2, 4, ... rows and the median; with those that were counted
    (`RowsKept`) if rows may have several owners.
    """
    kept = trial.dataset.rows_kept
    members = trial.spec.sampling.expected_size(trial.trace.dataset_size)
    rows = members * asked.rows_of_member
    largest, median = histogram[-1][0], median_rows(histogram)
    caps = {median, largest, *(2**power for power in range(largest.bit_length()) if 2**power <= largest)}
    remaining = {most: rows_kept(histogram, most) for most in caps} if kept is None else dict(kept)
    total = rows_kept(histogram, largest) if kept is None else trial.dataset.train_size
    ways: list[Way] = []
    for most in sorted(remaining):
        for sampling in samplings:
            users = replace(asked, sampling=sampling, max_records=most)
            size = population(users, total, histogram, kept)
            mean_rows = remaining[most] / sum(count for _, count in histogram)
            drawn = min(float(size), rows / users.rows_of_member)
            sigma = _noise_multiplier(sweep, trial, users, size, drawn / size, target)
            if sigma is not None:
                noise = sigma / drawn
                used = remaining[most] / total
                ways.append(Way(sampling, most, sigma, drawn, used, noise, noise / _shorter(sampling, mean_rows)))
    return WaysCompared(
        trial.dataset.name,
        target,
        trial.spec.delta,
        rows,
        trial.trace.steps,
        sum(count for _, count in histogram),
        trial.parameters,
        tuple(ways),
        *(_best(ways, median) if len(samplings) > 1 else _alone(ways, median)),
    )


def _alone(ways: Sequence[Way], median: int) -> tuple[WayVerdict, Way | None, Way | None]:
    """Return the verdict of `_best` where only ``els`` is proven: the largest cap up to the median number of rows."""
    best = max((way for way in ways if way.most <= median), key=lambda way: way.most, default=None)
    return ("unreachable" if best is None else "els_alone"), best, None


def _shorter(sampling: UserSampling, mean_rows: float) -> float:
    """Return how many times shorter than a row's the gradient of a member is if the rows of a user are unrelated."""
    match sampling:
        case "els":
            return 1.0
        case "uls":
            return math.sqrt(mean_rows)
        case _:
            assert_never(sampling)


_SAMPLINGS: Final[tuple[UserSampling, ...]] = ("els", "uls")


def _noise_multiplier(
    sweep: SweepSpec, trial: PlannedTrial, users: UserSpec, size: int, rate: float, target: float
) -> float | None:
    """Return the noise multiplier of the trial's run with other users, by Poisson batches; None if none is enough."""
    unit = replace(trial.spec, users=users).unit
    released = [each for each in trial.trace.releases if each.name != RELEASE]
    if users.counted_with is not None:
        released.append(release_of(users.counted_with, unit))
    queries = trial.trace.segments[0].side_queries

    def trace(noise_multiplier: float) -> Trace:
        steps = Segment(0, trial.trace.steps, PoissonSampling(rate), noise_multiplier, queries)
        return Trace(size, (steps,), tuple(released), trial.trace.adjacency, unit=unit)

    try:
        return calibrate_noise_multiplier(trace, target, trial.spec.delta, sweep.privacy.accountant)
    except DpsweepError:
        return None


def _best(ways: Sequence[Way], median: int) -> tuple[WayVerdict, Way | None, Way | None]:
    """Return the verdict at the median number of rows per user, and the best of each way.

    ``els`` keeps the median number of rows: more would add noise for the rows of few. ``uls`` keeps at least as many,
    those with the least noise if the rows of a user are unrelated. Where it is preferred for certain, it keeps as many
    as leave it with less noise than ``els`` even if they are alike.
    """
    by_rows = next((way for way in ways if way.sampling == "els" and way.most == median), None)
    by_users = [way for way in ways if way.sampling == "uls" and way.most >= median]
    at_median = next((way for way in by_users if way.most == median), None)
    if by_rows is None or at_median is None:
        return "unreachable", None, None
    certain = [way for way in by_users if way.noise <= by_rows.noise]
    best = min(certain or by_users, key=lambda way: way.unrelated)
    if at_median.noise <= by_rows.noise:
        return "uls", by_rows, best
    return ("els" if by_rows.noise <= at_median.unrelated else "unknown"), by_rows, best
