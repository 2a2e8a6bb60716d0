"""Metrics of finished trials on resampled test examples, which give intervals and paired differences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import sparse

from dpsweep.orchestration.comparison.extremes import (
    Extreme,
    corrected,
    extreme_bounds,
    extreme_difference_bounds,
    units_behind,
)
from dpsweep.orchestration.comparison.formats import Format
from dpsweep.orchestration.comparison.intervals import (
    LEVEL,
    Array,
    ConfidenceInterval,
    Moments,
    RunValues,
    SpreadOfSeeds,
    beside,
    difference_bounds,
    joined_runs,
    moments,
    paired,
    singles,
    unpaired,
    with_variance_of_shares,
)
from dpsweep.orchestration.comparison.metrics import METRICS, metric
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS, group_metric
from dpsweep.orchestration.comparison.settings import Setting, finished_settings, pooled
from dpsweep.orchestration.comparison.tallies import ScoreSums, Seen, Tally, Tested
from dpsweep.orchestration.store.published import RUNS, PublishedTrial
from dpsweep.workers.evaluation import rates
from dpsweep.workers.evaluation.outcomes import AnyOutcomes, Outcomes, ScoredOutcomes

RESAMPLES: Final = 1000
_FEWER_RESAMPLES: Final = 300
_MANY_TRIALS: Final = 100
"""Larger sweeps get `_FEWER_RESAMPLES` resamples: the ends of intervals vary more, their coverage is the same."""
_NUMBERS_AT_ONCE: Final = 2**24
"""Most numbers of all resamples that are held at the same time, at 8 bytes each."""
Single = npt.NDArray[np.float32]
NumberName = tuple[str, str]
"""Name of a group, or "" for all test examples, and name of a metric."""
SeedPair = tuple[object, ...]
"""Training seed and split seed, by which trials are paired."""
TEST_USER: Final = "test user"
"""Word for the units of test data that name users."""
Join = Callable[[RunValues, RunValues, Sequence[NumberName]], Moments]
"""Joins the numbers of two settings, which have these names."""


@dataclass(frozen=True)
class _TestedTrial:
    """A trial with the outcomes of its test examples."""

    trial: PublishedTrial
    outcomes: AnyOutcomes

    @property
    def shown(self) -> tuple[str, ...]:
        """Return the names of groups that are large enough to be shown, in the order of the trial."""
        groups = self.trial.quality.groups if self.trial.quality else ()
        return tuple(group.name for group in groups if group.name in self.outcomes.group_names)


@dataclass(frozen=True)
class _Numbers:
    """Metrics of one trial on its test set and on B resamples of it.

    `values`: [1 + B] by name; the first entry is on the original test examples.
    `units`: number of independent units behind each rate, 0 for other numbers.
    `test_set`: identifies the test examples.
    `unit`: which of them are independent, "test example" or "test user".
    `overlap`: number of test examples divided by number of training examples.
    """

    values: Mapping[NumberName, Single]
    units: Mapping[NumberName, float]
    groups: tuple[str, ...]
    test_set: str
    unit: str
    overlap: float


class Evidence:
    """Intervals and differences for trials with stored outcomes.

    private: the private settings of the sweep, over which the variance between seeds is pooled; so is that of their
    differences from a baseline.
    """

    def __init__(self, numbers: Mapping[str, _Numbers], private: Sequence[Setting] = ()) -> None:
        self._numbers = numbers
        self._private = tuple(setting for setting in private if setting.trials)
        self._found: dict[tuple[object, ...], ConfidenceInterval | None] = {}
        """Cache of intervals and differences, because several tables and pages show the same ones."""
        self._pools: dict[tuple[object, ...], SpreadOfSeeds | None] = {}

    def interval(self, setting: Setting, name: str, group: str = "", level: float = LEVEL) -> ConfidenceInterval | None:
        """Return the mean of a metric over the seeds and splits of a setting, with its interval; None if unknown.

        group: name of a group, or "" for all test examples.
        """
        return self._once(self._interval, (setting,), (group, name), (1.0 - level) / 2.0)

    def units(self, setting: Setting, name: str) -> tuple[float, str]:
        """Return the number of independent test examples or users behind a rate, the fewest of any trial, and what they
        are called; 0 if it is not known.
        """
        found = [self._numbers[trial.key] for trial in setting.trials if trial.key in self._numbers]
        return min(((each.units.get(("", name), 0.0), each.unit) for each in found), default=(0.0, ""))

    def over_examples(self, setting: Setting, name: str) -> tuple[float, float] | None:
        """Return ends of the 95% interval of the mean of these very models over other test examples; None if unknown.

        It says nothing of other seeds. Where there are two, `interval` is too wide to say anything.
        """
        runs = self._runs(setting.trials, [("", name)])
        if runs is None or not np.isfinite(runs.resampled).all():
            return None
        low, high = np.percentile(runs.resampled[..., 0].mean(0), [50.0 * (1.0 - LEVEL), 50.0 * (1.0 + LEVEL)])
        return float(low), float(high)

    def _interval(self, setting: Setting, name: NumberName, tail: float) -> ConfidenceInterval | None:
        whole, extreme = self._runs(setting.trials, [name]), _extreme(name)
        if whole is None or not np.isfinite(value := float(whole.values.mean())):
            return None
        cells = self._cells(setting.trials, extreme)
        if cells is None and extreme is not None and extreme.is_between_groups:
            return None
        if extreme is None or cells is None:
            found = _varied(moments(whole, self._pool(setting, [name])), [name])
            low, high = (float(each[0]) for each in singles(found, tail))
            better: float | None = None
        else:
            names, runs = cells
            found = _varied(moments(runs, self._pool(setting, names)), names)
            low, high = extreme_bounds(extreme, found, tail)
            better = corrected(extreme, found) if len(names) > len(extreme.of) else None
        ends = _finite(ConfidenceInterval(value, low, high, found.runs, found.covers, better))
        return ends and ends.within(*_format(name).possible)

    def difference(
        self, one: Setting, other: Setting, name: str, comparisons: int = 1, level: float = LEVEL
    ) -> ConfidenceInterval | None:
        """Return a metric of ``one`` minus the metric of ``other``, paired by seed and split, with an interval.

        `comparisons`: number of differences that are looked at; all their intervals hold simultaneously with ``level``
        (Bonferroni). Settings without common seeds are compared unpaired, on their common test examples; None if they
        have different test examples.
        """
        return self._once(self._difference, (one, other), ("", name), (1.0 - level) / comparisons / 2.0)

    def _once(
        self,
        find: Callable[..., ConfidenceInterval | None],
        settings: Sequence[Setting],
        name: NumberName,
        tail: float,
    ) -> ConfidenceInterval | None:
        asked = (*(tuple(trial.key for trial in each.trials) for each in settings), name, tail)
        if asked not in self._found:
            self._found[asked] = find(*settings, name, tail)
        return self._found[asked]

    def _difference(self, one: Setting, other: Setting, name: NumberName, tail: float) -> ConfidenceInterval | None:
        of_one, of_other = ({_run(trial): trial for trial in setting.trials} for setting in (one, other))
        common = [run for run in of_one if run in of_other and self._same_test(of_one[run], of_other[run])]
        ours, theirs = (
            [trials[run] for run in common] if common else list(setting.trials)
            for trials, setting in ((of_one, one), (of_other, other))
        )
        first, second = self._runs(ours, [name]), self._runs(theirs, [name])
        if first is None or second is None:
            return None
        if not common and len({self._numbers[trial.key].test_set for trial in (*ours, *theirs)}) > 1:
            return None
        value = float(first.values.mean() - second.values.mean())
        if not np.isfinite(value):
            return None
        join, extreme = self._joined(one, other, common), _extreme(name)
        cells = [self._cells(trials, extreme) for trials in (ours, theirs)]
        if None in cells and extreme is not None and extreme.is_between_groups:
            return None
        if extreme is None or None in cells:
            found = join(first, second, [name])
            low, high = difference_bounds(found, tail)
            ends = _finite(ConfidenceInterval(value, low, high, found.runs, found.covers))
        else:
            ends = self._of_extremes(extreme, (ours, theirs), join, tail, value)
        least, most = _format(name).possible
        return ends and ends.within(least - most, most - least)

    def _joined(self, one: Setting, other: Setting, common: Sequence[SeedPair]) -> Join:
        """Return how the numbers of two settings are compared, which share these runs; without any, unpaired."""

        def join(first: RunValues, second: RunValues, names: Sequence[NumberName]) -> Moments:
            if one.is_baseline == other.is_baseline or not common:
                pool = None if one.is_baseline or other.is_baseline else self._pool(one, names)
                return (paired if common else unpaired)(first, second, pool)
            against = first if one.is_baseline else second
            return beside(first, second, self._pool_beside(one, other, common, names, against))

        return join

    def _pool_beside(
        self, one: Setting, other: Setting, common: Sequence[SeedPair], names: Sequence[NumberName], against: RunValues
    ) -> SpreadOfSeeds | None:
        """Return the spread between seeds of the private settings, each together with the baseline in these runs.

        One of the two settings is the baseline, whose numbers are ``against``. All of them hold its spread, and what
        it has in common with private runs of a seed. Two settings say too little beside a pair's own spread.
        """
        baseline = one if one.is_baseline else other
        asked = (baseline.name, one.is_baseline, *common, *names)
        if asked not in self._pools:
            trials = {_run(trial): trial for trial in baseline.trials}
            every = []
            for setting in self._private:
                own = {_run(trial): trial for trial in setting.trials}
                if not all(run in own and self._same_test(own[run], trials[run]) for run in common):
                    continue
                found = self._runs([own[run] for run in common], names)
                if found is not None and np.isfinite(found.values).all():
                    every.append(joined_runs(against, found) if one.is_baseline else joined_runs(found, against))
            self._pools[asked] = pooled(every) if len(every) > 2 else None
        return self._pools[asked]

    def _of_extremes(
        self,
        extreme: Extreme,
        trials: tuple[Sequence[PublishedTrial], Sequence[PublishedTrial]],
        join: Join,
        tail: float,
        value: float,
    ) -> ConfidenceInterval | None:
        """Return the difference of two extremes over those groups that both settings have."""
        common = set.intersection(*({*self._numbers[each.key].groups} for side in trials for each in side))
        sides = [self._cells(side, extreme, common) for side in trials]
        if sides[0] is None or sides[1] is None or sides[0][0] != sides[1][0]:
            return None
        (names, first), (_, second) = sides[0], sides[1]
        found, alone = join(first, second, names), [moments(first), moments(second)]
        low, high = extreme_difference_bounds(extreme, found, tail, alone)
        apart = corrected(extreme, alone[0]) - corrected(extreme, alone[1])
        return _finite(ConfidenceInterval(value, low, high, found.runs, found.covers, apart))

    def _same_test(self, one: PublishedTrial, other: PublishedTrial) -> bool:
        found = [self._numbers[trial.key].test_set for trial in (one, other) if trial.key in self._numbers]
        return len(found) == 2 and found[0] == found[1]

    def _cells(
        self, trials: Sequence[PublishedTrial], extreme: Extreme | None, groups: Set[str] | None = None
    ) -> tuple[tuple[NumberName, ...], RunValues] | None:
        """Return the numbers of groups that an extreme is of, with their names; None if too few have one.

        `groups`: groups to take, by default all that have a number in every trial.
        """
        if extreme is None or any(trial.key not in self._numbers for trial in trials):
            return None
        every = [self._numbers[trial.key] for trial in trials]
        shown = [name for name in every[0].groups if all(name in each.groups for each in every)]
        known = [
            group
            for group in shown
            if (groups is None or group in groups)
            and all(np.isfinite(each.values.get((group, name), [np.nan])[0]) for each in every for name in extreme.of)
        ]
        names = tuple((group, name) for name in extreme.of for group in known)
        runs = self._runs(trials, names) if len(known) > extreme.is_between_groups else None
        return None if runs is None else (names, runs)

    def _pool(self, setting: Setting, names: Sequence[NumberName]) -> SpreadOfSeeds | None:
        """Return the spread between seeds of the private settings, if the setting is one of them."""
        if setting.is_baseline:
            return None
        asked = tuple(names)
        if asked not in self._pools:
            self._pools[asked] = pooled(self._alike(names))
        return self._pools[asked]

    def _alike(self, names: Sequence[NumberName]) -> list[RunValues]:
        """Return the numbers of private settings with the most frequent seeds and splits, their runs in one order."""
        by_runs: dict[tuple[tuple[str, ...], ...], list[RunValues]] = {}
        for setting in self._private:
            trials = sorted(setting.trials, key=lambda trial: str(_run(trial)))
            found = self._runs(trials, names)
            if found is not None and np.isfinite(found.values).all():
                where = tuple((str(_run(trial)), self._numbers[trial.key].test_set) for trial in trials)
                by_runs.setdefault(where, []).append(found)
        return max(by_runs.values(), key=len, default=[])

    def _runs(self, trials: Sequence[PublishedTrial], names: Sequence[NumberName]) -> RunValues | None:
        if not trials or any(trial.key not in self._numbers for trial in trials):
            return None
        found = [self._numbers[trial.key] for trial in trials]
        if any(name not in each.values for each in found for name in names):
            return None
        stored = np.stack([np.stack([each.values[name] for name in names], axis=-1) for each in found])
        values = stored.astype(np.float64)
        sets = {test_set: place for place, test_set in enumerate(dict.fromkeys(each.test_set for each in found))}
        return RunValues(
            values[:, 0],
            values[:, 1:],
            np.array([sets[each.test_set] for each in found]),
            np.array([np.mean([each.units.get(name, 0.0) for each in found]) for name in names]),
            np.array([_reach(name) for name in names]),
            max(each.overlap for each in found),
        )


def _finite(found: ConfidenceInterval) -> ConfidenceInterval | None:
    return found if np.isfinite((found.value, found.low, found.high)).all() else None


def _varied(found: Moments, names: Sequence[NumberName]) -> Moments:
    return with_variance_of_shares(found, np.array([name == "balanced_accuracy" for _, name in names]))


def _run(trial: PublishedTrial) -> SeedPair:
    return tuple(trial.labels.get(name) for name in RUNS)


def _format(name: NumberName) -> Format:
    return (group_metric(name[1]) if name[0] else metric(name[1])).format


def _extreme(name: NumberName) -> Extreme | None:
    return None if name[0] else metric(name[1]).extreme


def _reach(name: NumberName) -> tuple[float, float]:
    least, most = _format(name).possible
    return (least, most) if np.isfinite((least, most)).all() else (0.0, 1.0)  # not asked for: it is no share


def gather(
    trials: Iterable[PublishedTrial], outcomes: Mapping[str, AnyOutcomes], resamples: int | None = None
) -> Evidence:
    """Resample the test examples of all finished trials, or their users if the data name them.

    `outcomes`: by the key of the trial. `resamples`: their number; by default as many as intervals need.
    """
    trials = tuple(trials)
    finished = {trial.key: _TestedTrial(trial, outcomes[trial.key]) for trial in trials if trial.key in outcomes}
    by_test: dict[str, list[_TestedTrial]] = {}
    for each in finished.values():
        by_test.setdefault(each.outcomes.test_set, []).append(each)
    usual = RESAMPLES if len(finished) <= _MANY_TRIALS else _FEWER_RESAMPLES
    numbers: dict[str, _Numbers] = {}
    for test_set, members in by_test.items():
        numbers |= _resampled(test_set, members, resamples or usual)
    private = [setting for setting in finished_settings(trials) if not setting.is_baseline]
    return Evidence(numbers, private)


def _resampled(test_set: str, members: Sequence[_TestedTrial], resamples: int) -> dict[str, _Numbers]:
    """Return the metrics, by key, of trials that were tested on the same examples."""
    first = members[0].outcomes
    of_group = first.num_classes**2 if isinstance(first, Outcomes) else first.kept.shape[1]
    cells = len(first.group_names) * of_group
    found: dict[str, list[dict[NumberName, Single]]] = {each.trial.key: [] for each in members}
    users = next((each.outcomes.users for each in members if each.outcomes.users is not None), None)
    owners = np.arange(len(first.groups)) if users is None else np.unique(users, return_inverse=True)[1]
    for draws in _draws(test_set, owners, resamples, max(1, _NUMBERS_AT_ONCE // max(cells, len(owners)))):
        seen: dict[str, Tested] = {}
        for each in sorted(members, key=lambda each: not each.trial.is_baseline):
            before = seen.get(each.trial.tags.get("baseline", ""))
            tested = _counted(each, draws, before)
            if each.trial.is_baseline:
                seen[each.trial.key] = tested
            found[each.trial.key].append(dict(_measured(each, tested)))
    return {
        each.trial.key: _Numbers(
            {name: np.concatenate([part[name] for part in found[each.trial.key]]) for name in found[each.trial.key][0]},
            _units(each, found[each.trial.key][0]),
            each.shown,
            test_set,
            "test example" if each.outcomes.users is None else TEST_USER,
            _overlap(each.trial),
        )
        for each in members
    }


def _units(each: _TestedTrial, names: Iterable[NumberName]) -> dict[NumberName, float]:
    """Return the number of independent units behind each number of a trial."""
    outcomes = each.outcomes
    of_group = {name: outcomes.groups == place for place, name in enumerate(outcomes.group_names)}
    everyone = np.ones(len(outcomes.groups), dtype=bool)
    return {
        (group, name): units_behind(
            outcomes, name, of_group[group] if group else everyone, _format((group, name)).is_share
        )
        for group, name in names
        if group or metric(name).extreme is None
    }


def _overlap(trial: PublishedTrial) -> float:
    """Return the number of test examples divided by number of training examples."""
    profile = trial.dataset.profile if trial.dataset else {}
    return float(profile.get("test_size", 0)) / float(profile.get("train_size", 1))


def _draws(test_set: str, owners: npt.NDArray[np.intp], resamples: int, at_once: int) -> Iterator[Array]:
    """Yield the number of times that each example is drawn, in parts [n, b] of at most ``at_once`` resamples.

    `owners`: [n], index of the unit that is drawn with all its examples: the example itself, or its user. The very
    first column is the original test set, which has each example once. Seeded by ``test_set``: the same in every
    process.
    """
    draw = np.random.default_rng(int.from_bytes(hashlib.sha256(test_set.encode()).digest()[:8], "big"))
    size = int(owners.max()) + 1
    first = np.ones((1, size), dtype=np.int32)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = draw.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.int32)
        parts = (first, counts) if start == 0 else (counts,)
        yield np.concatenate(parts).T[owners].astype(np.float64)


def _counted(each: _TestedTrial, draws: Array, baseline: Tested | None) -> Tested:
    found = each.outcomes
    everyone, groups = (
        _tallies(found, draws, each.shown) if isinstance(found, Outcomes) else _summed(found, draws, each.shown)
    )
    fairness = each.trial.quality.fairness if each.trial.quality else {}
    return Tested(
        everyone, groups, "equalized_odds_difference" in fairness, baseline, _by_user(found, draws, each.shown)
    )


def _by_user(found: AnyOutcomes, draws: Array, shown: Sequence[str]) -> Tested | None:
    """Return the totals where everybody counts once; None without users, and for tasks besides classification."""
    if found.users is None or not isinstance(found, Outcomes):
        return None
    once = rates.shares_of_users(found.users, np.zeros_like(found.users))
    once_in_group = rates.shares_of_users(found.users, found.groups)
    everyone, _ = _tallies(found, draws, shown, once)
    _, groups = _tallies(found, draws, shown, once_in_group)
    return Tested(everyone, groups, parity=False)


def _tallies(found: Outcomes, draws: Array, shown: Sequence[str], share: Array | float = 1.0) -> tuple[Seen, Seen]:
    """Return the tallies of all examples, and of each group that is shown, on every resample.

    share: [n], as how many examples each one counts.
    """
    size, classes, bins = len(found.group_names), found.num_classes, rates.CALIBRATION_BINS
    cells = rates.confusion_cells(found.labels, found.predicted, found.groups, classes)
    off = found.confidences - (found.predicted == found.labels)
    binned = found.groups * bins + rates.calibration_bins(found.confidences)
    counts = _sums(draws, np.ones(len(cells)) * share, cells, size * classes**2).reshape(-1, size, classes, classes)
    losses = _sums(draws, found.log_losses * share, found.groups, size)
    errors = _sums(draws, off * share, binned, size * bins).reshape(-1, size, bins)
    places = [found.group_names.index(name) for name in shown]
    return (
        _tally(counts.sum(1), losses.sum(1), errors.sum(1)),
        _tally(counts[:, places], losses[:, places], errors[:, places]),
    )


def _summed(found: ScoredOutcomes, draws: Array, shown: Sequence[str]) -> tuple[Seen, Seen]:
    """Return what `_tallies` does, for tasks whose scores follow from sums over examples."""
    sums = np.zeros((draws.shape[1], len(found.group_names), found.kept.shape[1]))
    for group in np.unique(found.groups):
        rows = np.flatnonzero(found.groups == group)
        with np.errstate(invalid="ignore", over="ignore"):  # a model that diverged
            sums[:, group] = draws[rows].T @ found.kept[rows]
    places = [found.group_names.index(name) for name in shown]
    return ScoreSums(sums.sum(1), found.task), ScoreSums(sums[:, places], found.task)


def _tally(counts: Array, losses: Array, errors: Array) -> Tally:
    """Return means from sums. counts: [..., K, K]. losses: [...]. errors: by bin of confidence, [..., bins]."""
    examples = counts.sum((-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may leave a group without examples
        return Tally(counts, losses / examples, np.abs(errors).sum(-1) / examples)


def _sums(draws: Array, values: Array, cells: npt.NDArray[np.int64], count: int) -> Array:
    """Return [b, count]: the sums of the values [n] of the examples in each cell, on every resample."""
    places = sparse.csc_array((values, cells, np.arange(len(cells) + 1)), shape=(count, len(cells)))
    return np.asarray((places @ draws).T)


def _measured(each: _TestedTrial, tested: Tested) -> Iterator[tuple[NumberName, Single]]:
    for one in METRICS:
        values = one.measure(tested) if one.measure else None
        if values is not None:
            yield ("", one.name), _stored(values)
    for of_group in GROUP_METRICS:
        values = of_group.measure(tested) if of_group.measure else None
        if values is not None:
            for place, group in enumerate(each.shown):
                yield (group, of_group.name), _stored(values[..., place])


def _stored(values: Array) -> Single:
    """Return the values rounded to single precision, so that comparing with 0 or 1 does not depend on rounding
    errors.
    """
    with np.errstate(over="ignore"):  # a model that diverged
        return values.astype(np.float32)


NO_EVIDENCE: Final = Evidence({})
"""The evidence of a sweep without stored outcomes: no interval is known."""
