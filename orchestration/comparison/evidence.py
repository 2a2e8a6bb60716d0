"""Metrics of finished trials on resampled test examples, which give intervals and paired differences."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from orchestration.comparison.formats import CHANGE, FIT, NUMBER, Format, possible
from orchestration.comparison.intervals import LEVEL, Array, ConfidenceInterval, RunValues, interval, unpaired
from orchestration.comparison.metrics import METRICS, metric
from orchestration.comparison.rate_metrics import GROUP_METRICS, group_metric
from orchestration.comparison.settings import Setting
from orchestration.comparison.tested import ScoreSums, Seen, Tally, Tested
from orchestration.records.published import RUNS, PublishedTrial
from workers import rates
from workers.outcomes import AnyOutcomes, Outcomes, ScoredOutcomes

RESAMPLES: Final = 1000
_FEWER_RESAMPLES: Final = 300
_MANY_TRIALS: Final = 100
"""Larger sweeps get `_FEWER_RESAMPLES` resamples: the ends of intervals vary more, their coverage is the same."""
_CELLS_AT_ONCE: Final = 2**24
_OF_EVERYONE: Final = ("accuracy", "accuracy_change")
"""Shares of all test examples; others depend on groups, or on fewer examples, such as those of one class."""
Name = tuple[str, str]
"""Name of a group, or "" for all test examples, and name of a metric."""


@dataclass(frozen=True)
class _TestedTrial:
    """A trial with the outcomes of its test examples."""

    trial: PublishedTrial
    outcomes: AnyOutcomes

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of groups that are large enough to be shown, in the order of the trial."""
        groups = self.trial.quality.groups if self.trial.quality else ()
        return tuple(group.name for group in groups if group.name in self.outcomes.group_names)


@dataclass(frozen=True)
class _Numbers:
    """Metrics of one trial on its test set and on B resamples of it.

    values: [1 + B] by name; the first entry is on the original test examples. test_set: identifies the test examples.
    sizes: number of examples of each group that is large enough to be shown. examples: number of all test examples.
    overlap: number of test examples divided by number of training examples.
    """

    values: Mapping[Name, Array]
    test_set: str
    sizes: Mapping[str, int]
    examples: int
    overlap: float


class Evidence:
    """Intervals and differences for trials with stored outcomes; trials of older versions have none."""

    def __init__(self, numbers: Mapping[str, _Numbers]) -> None:
        self._numbers = numbers
        self._intervals: dict[tuple[tuple[str, ...], Name], ConfidenceInterval | None] = {}
        """Cache of the intervals, because several tables and pages show the same ones."""

    def interval(self, setting: Setting, name: str, group: str = "") -> ConfidenceInterval | None:
        """Mean of a metric over the seeds and splits of a setting, with its 95% interval; None if unknown.

        group: name of a group, or "" for all test examples.
        """
        asked = tuple(trial.key for trial in setting.trials), (group, name)
        if asked not in self._intervals:
            self._intervals[asked] = self._interval(setting.trials, (group, name))
        return self._intervals[asked]

    def over_examples(self, setting: Setting, name: str) -> tuple[float, float] | None:
        """Ends of the 95% interval of the mean of these very models over other test examples; None if unknown.

        It says nothing of other seeds. Where there are two, `interval` is too wide to say anything.
        """
        runs = self._runs(setting.trials, ("", name))
        if runs is None or not np.isfinite(runs.resampled).all():
            return None
        low, high = np.percentile(runs.resampled.mean(0), [50.0 * (1.0 - LEVEL), 50.0 * (1.0 + LEVEL)])
        return float(low), float(high)

    def _interval(self, trials: Sequence[PublishedTrial], name: Name) -> ConfidenceInterval | None:
        runs = self._runs(trials, name)
        if runs is None:
            return None
        ends = possible(_format(name))
        found = interval(runs, examples=self._examples(trials, name), possible=ends)
        return found and found.within(*ends)

    def difference(
        self, one: Setting, other: Setting, name: str, group: str = "", comparisons: int = 1
    ) -> ConfidenceInterval | None:
        """A metric of ``one`` minus the metric of ``other``, paired by seed and split, with an interval.

        comparisons: number of differences that are looked at; all their intervals hold simultaneously with 95%
        (Bonferroni). Settings without common seeds are compared unpaired, on their common test examples; None if they
        have different test examples.
        """
        found = self._difference(one, other, (group, name), 1.0 - (1.0 - LEVEL) / comparisons)
        return found and found.within(*_possible_differences((group, name)))

    def _difference(self, one: Setting, other: Setting, name: Name, level: float) -> ConfidenceInterval | None:
        of_one, of_other = ({_run(trial): trial for trial in setting.trials} for setting in (one, other))
        common = [run for run in of_one if run in of_other and self._same_test(of_one[run], of_other[run])]
        ours, theirs = (
            [trials[run] for run in common] if common else list(setting.trials)
            for trials, setting in ((of_one, one), (of_other, other))
        )
        first, second = self._runs(ours, name), self._runs(theirs, name)
        if first is None or second is None:
            return None
        examples, ends = self._examples([*ours, *theirs], name), _possible_differences(name)
        if common:
            return interval(first.minus(second), level, examples, ends)
        sets = {self._numbers[trial.key].test_set for trial in (*ours, *theirs)}
        return unpaired(first, second, level, examples, ends) if len(sets) == 1 else None

    def _same_test(self, one: PublishedTrial, other: PublishedTrial) -> bool:
        found = [self._numbers[trial.key].test_set for trial in (one, other) if trial.key in self._numbers]
        return len(found) == 2 and found[0] == found[1]

    def _examples(self, trials: Iterable[PublishedTrial], name: Name) -> int:
        """Smallest number of test examples behind a share of a trial; 0 for numbers that are not shares."""
        if _format(name) in (NUMBER, FIT, CHANGE):
            return 0
        return min(_examples_behind(self._numbers[trial.key], name) for trial in trials)

    def _runs(self, trials: Sequence[PublishedTrial], name: Name) -> RunValues | None:
        if not trials or any(trial.key not in self._numbers for trial in trials):
            return None
        found = [self._numbers[trial.key] for trial in trials]
        if any(name not in each.values for each in found):
            return None
        values = np.stack([each.values[name] for each in found])
        sets = {test_set: place for place, test_set in enumerate(dict.fromkeys(each.test_set for each in found))}
        splits = np.array([sets[each.test_set] for each in found])
        return RunValues(values[:, 0], values[:, 1:], splits, max(each.overlap for each in found))


def _run(trial: PublishedTrial) -> tuple[object, ...]:
    """Training seed and split seed, by which trials are paired."""
    return tuple(trial.labels.get(name) for name in RUNS)


def _format(name: Name) -> Format:
    return (group_metric(name[1]) if name[0] else metric(name[1])).format


def _possible_differences(name: Name) -> tuple[float, float]:
    least, most = possible(_format(name))
    return least - most, most - least


def _examples_behind(numbers: _Numbers, name: Name) -> int:
    """Number of test examples behind a share; of the smallest group unless the share is one of all test examples."""
    group, metric_name = name
    if group:
        return numbers.sizes[group]
    sizes = () if metric_name in _OF_EVERYONE else numbers.sizes.values()
    return min(sizes, default=numbers.examples)


def gather(trials: Iterable[PublishedTrial], outcomes: Mapping[str, AnyOutcomes]) -> Evidence:
    """Resample the test examples of all finished trials. outcomes: by the key of the trial."""
    finished = {trial.key: _TestedTrial(trial, outcomes[trial.key]) for trial in trials if trial.key in outcomes}
    by_test: dict[str, list[_TestedTrial]] = {}
    for each in finished.values():
        by_test.setdefault(each.outcomes.test_set, []).append(each)
    resamples = RESAMPLES if len(finished) <= _MANY_TRIALS else _FEWER_RESAMPLES
    numbers: dict[str, _Numbers] = {}
    for test_set, members in by_test.items():
        numbers |= _resampled(test_set, members, resamples)
    return Evidence(numbers)


def _resampled(test_set: str, members: Sequence[_TestedTrial], resamples: int) -> dict[str, _Numbers]:
    """The metrics, by key, of trials that were tested on the same examples."""
    first = members[0].outcomes
    of_group = first.num_classes**2 if isinstance(first, Outcomes) else first.kept.shape[1]
    cells = len(first.group_names) * of_group
    found: dict[str, list[dict[Name, Array]]] = {each.trial.key: [] for each in members}
    for weights in _weights(test_set, len(first.groups), resamples, max(1, _CELLS_AT_ONCE // cells)):
        seen: dict[str, Tested] = {}
        for each in sorted(members, key=lambda each: not each.trial.is_baseline):
            before = seen.get(each.trial.tags.get("baseline", ""))
            tested = _counted(each, weights, before)
            if each.trial.is_baseline:
                seen[each.trial.key] = tested
            found[each.trial.key].append(dict(_measured(each, tested)))
    return {
        each.trial.key: _Numbers(
            {name: np.concatenate([part[name] for part in found[each.trial.key]]) for name in found[each.trial.key][0]},
            test_set,
            {group.name: group.test_examples for group in each.trial.quality.groups} if each.trial.quality else {},
            len(first.groups),
            _overlap(each.trial),
        )
        for each in members
    }


def _overlap(trial: PublishedTrial) -> float:
    """Number of test examples divided by number of training examples."""
    profile = trial.dataset.profile if trial.dataset else {}
    return float(profile.get("test_size", 0)) / float(profile.get("train_size", 1))


def _weights(test_set: str, size: int, resamples: int, at_once: int) -> Iterator[npt.NDArray[np.int32]]:
    """Number of times that each example is drawn, in parts [b, n] of at most ``at_once`` resamples.

    The very first row is the original test set, which has each example once. Seeded by ``test_set``: the same in every
    process.
    """
    draw = np.random.default_rng(int.from_bytes(hashlib.sha256(test_set.encode()).digest()[:8], "big"))
    first = np.ones((1, size), dtype=np.int32)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = draw.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.int32)
        yield np.concatenate((first, counts)) if start == 0 else counts


def _counted(each: _TestedTrial, weights: npt.NDArray[np.int32], baseline: Tested | None) -> Tested:
    found = each.outcomes
    everyone, groups = (
        _tallies(found, weights, each.shown) if isinstance(found, Outcomes) else _summed(found, weights, each.shown)
    )
    fairness = each.trial.quality.fairness if each.trial.quality else {}
    return Tested(everyone, groups, "equalized_odds_difference" in fairness, baseline)


def _tallies(found: Outcomes, weights: npt.NDArray[np.int32], shown: Sequence[str]) -> tuple[Seen, Seen]:
    """Tallies of all examples, and of each group that is shown, on every resample."""
    size, classes, bins = len(found.group_names), found.num_classes, rates.CALIBRATION_BINS
    cells = rates.confusion_cells(found.labels, found.predicted, found.groups, classes)
    counts = _sums(weights, cells, size * classes**2).reshape(-1, size, classes, classes)
    losses = _sums(weights * found.log_losses, found.groups, size)
    off = found.confidences - (found.predicted == found.labels)
    binned = found.groups * bins + rates.calibration_bins(found.confidences)
    errors = _sums(weights * off, binned, size * bins).reshape(-1, size, bins)
    places = [found.group_names.index(name) for name in shown]
    return (
        _tally(counts.sum(1), losses.sum(1), errors.sum(1)),
        _tally(counts[:, places], losses[:, places], errors[:, places]),
    )


def _summed(found: ScoredOutcomes, weights: npt.NDArray[np.int32], shown: Sequence[str]) -> tuple[Seen, Seen]:
    """As `_tallies`, for tasks whose scores follow from sums over examples."""
    sums = np.zeros((len(weights), len(found.group_names), found.kept.shape[1]))
    for group in np.unique(found.groups):
        rows = np.flatnonzero(found.groups == group)
        with np.errstate(invalid="ignore", over="ignore"):  # a model that diverged
            sums[:, group] = weights[:, rows].astype(np.float64) @ found.kept[rows]
    places = [found.group_names.index(name) for name in shown]
    return ScoreSums(sums.sum(1), found.task), ScoreSums(sums[:, places], found.task)


def _tally(counts: Array, losses: Array, errors: Array) -> Tally:
    """counts: [..., K, K]. losses: summed, [...]. errors: summed by bin of confidence, [..., bins]."""
    examples = counts.sum((-2, -1))
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may leave a group without examples
        return Tally(counts, losses / examples, np.abs(errors).sum(-1) / examples)


def _sums(weights: npt.NDArray[np.int32] | Array, cells: npt.NDArray[np.int64], count: int) -> Array:
    """[b, count]: sums of the weights [b, n] of the examples in each cell."""
    order = np.argsort(cells, kind="stable")
    present, starts = np.unique(cells[order], return_index=True)
    found = np.zeros((len(weights), count))
    found[:, present] = np.add.reduceat(weights[:, order], starts, axis=1)
    return found


def _measured(each: _TestedTrial, tested: Tested) -> Iterator[tuple[Name, Array]]:
    for one in METRICS:
        values = one.measure(tested) if one.measure else None
        if values is not None:
            yield ("", one.name), _stored(values)
    for of_group in GROUP_METRICS:
        values = of_group.measure(tested) if of_group.measure else None
        if values is not None:
            for place, group in enumerate(each.shown):
                yield (group, of_group.name), _stored(values[..., place])


def _stored(values: Array) -> Array:
    """The values rounded to single precision, so that comparing with 0 or 1 does not depend on rounding errors."""
    with np.errstate(over="ignore"):  # a model that diverged
        return values.astype(np.float32).astype(np.float64)


NO_EVIDENCE: Final = Evidence({})
"""The evidence of a sweep without stored outcomes: no interval is known."""
