"""Measures coverage of intervals and errors of verdicts in simulated sweeps whose truth is known.

    python -m benchmarks.coverage                  every case
    python -m benchmarks.coverage --case gap-10    one case
    python -m benchmarks.coverage --sweeps 600     more sweeps of each case; the standard error falls

A row shows shares of sweeps, or of settings in them, in percent, and mean widths of 95% intervals in points. ``cover``
should be 95 or more, ``false`` (sweeps with any wrong verdict) 5 or less, ``power`` high and ``width`` small. The
columns are those measured by the case; medians are beside means that a few sweeps decide. Some cases are followed by a
row for each method of `benchmarks.other_intervals`, for the first of these sweeps: ``told`` is how often a true
difference is found to differ from 0. Sweeps whose name begins with ``until`` add seeds as ``run --until told-apart``
does: ``false`` counts those with a wrong verdict at any look.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from benchmarks.other_intervals import METHODS, Ends, Sweep
from benchmarks.simulated import Population, compared, drawn, published, simulated
from dpsweep.orchestration.comparison.best import best
from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Findings, Verdict, findings
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.pipeline.run import more_seeds, told_apart
from dpsweep.workers.evaluation.outcomes import AnyOutcomes

Numbers = Iterator[tuple[str, float]]
Measured = Callable[[Population, Findings], Numbers]
TOLD: Final = ("better", "worse")
"""Verdicts that tell two settings apart."""


@dataclass(frozen=True)
class Case:
    """Simulated sweeps, and the functions that compare one of them with the truth."""

    population: Population
    measured: tuple[Measured, ...]


def private(found: Findings) -> list[Setting]:
    """Return the private settings in the order of the population."""
    return sorted((one for one in found.settings if not one.is_baseline), key=lambda one: int(one.clipping[1:]))


def covers(interval: ConfidenceInterval | None, truth: float) -> float:
    """1 if the interval contains the truth, 0 if not, NaN without an interval."""
    return math.nan if interval is None else float(interval.low - 1e-9 <= truth <= interval.high + 1e-9)


def width(interval: ConfidenceInterval | None) -> float:
    """Width of an interval in points (as a share), NaN without one."""
    return math.nan if interval is None else interval.high - interval.low


def of_each(metric: str, truth: Callable[[Population, int], float], suffix: str = "") -> Measured:
    """Coverage and width of a metric of every private setting, in columns that end with ``suffix``."""

    def measured(population: Population, found: Findings) -> Numbers:
        for place, setting in enumerate(private(found)):
            interval = found.interval(setting, metric)
            yield f"cover{suffix}", covers(interval, truth(population, place))
            yield f"width{suffix}", width(interval)

    return measured


means = of_each("accuracy", Population.accuracy)
worst_groups = of_each("worst_group_accuracy", Population.worst)
gaps = of_each("accuracy_gap", Population.gap)
positives = of_each("true_positive_rate", lambda population, place: population.right(place, 0))
balanced = of_each("balanced_accuracy", lambda population, place: population.right(place, 0))


def last_mean(population: Population, found: Findings) -> Numbers:
    """Coverage of the accuracy of the last setting, whose seeds may vary more than the other settings' seeds."""
    interval = found.interval(private(found)[-1], "accuracy")
    yield "cover_last", covers(interval, population.accuracy(len(population.logits) - 1))


def differences(population: Population, found: Findings) -> Numbers:
    """Coverage and width of every difference of accuracy, each at its own level of 95%."""
    for (i, one), (j, other) in combinations(enumerate(private(found)), 2):
        interval = found.evidence.difference(one, other, "accuracy")
        yield "cover_difference", covers(interval, population.accuracy(i) - population.accuracy(j))
        yield "width_difference", width(interval)


def changes(population: Population, found: Findings) -> Numbers:
    """Coverage and width of every difference from the baseline, in accuracy and for the worst-served group."""
    (baseline,) = (one for one in found.settings if one.is_baseline)
    without = population.without_privacy()  # of every group
    truths = population.accuracy, population.worst
    for place, setting in enumerate(private(found)):
        for name, truth in zip(found.headline, truths, strict=False):  # of one group there is no worst
            interval = found.evidence.difference(setting, baseline, name)
            suffix = "change" if name == found.main.name else "worst_change"
            yield f"cover_{suffix}", covers(interval, truth(place) - without)
            yield f"width_{suffix}", width(interval)


def simultaneous(population: Population, found: Findings) -> Numbers:
    """Width of the differences that verdicts are made of, which hold simultaneously."""
    settings = private(found)
    yield "width_compared", width(found.difference(settings[0], settings[-1], found.main.name).interval)


def wrong_verdicts(population: Population, found: Findings) -> Numbers:
    """Return whether any verdict of the headline's metrics is wrong, and whether any setting is on the front by
    error.
    """
    settings, truths = private(found), dict(zip(found.headline, (population.accuracy, population.worst), strict=False))
    wrong = False
    for (i, one), (j, other) in combinations(enumerate(settings), 2):
        for name, truth in truths.items():
            ahead = truth(i) - truth(j)
            verdict = found.difference(one, other, name).verdict
            wrong |= (verdict == "better" and ahead <= 1e-9) or (verdict == "worse" and ahead >= -1e-9)
    yield "false", float(wrong)
    for i, one in enumerate(settings):
        if one in found.front:
            rivals = [j for j in range(len(settings)) if j != i]
            beaten = all(any(truth(i) > truth(j) + 1e-9 for truth in truths.values()) for j in rivals)
            yield "false_front", float(not beaten)
    if not any(one in found.front for one in settings):
        yield "false_front", 0.0


def told_first_from_last(metric: str, better: Verdict = "better") -> Measured:
    """Return whether the first setting differs from the last one, which it excels if ``better``; ``reversed`` if
    wrongly."""

    def measured(population: Population, found: Findings) -> Numbers:
        settings = private(found)
        difference = found.difference(settings[0], settings[-1], metric)
        yield "power", float(difference.verdict == better)
        yield "reversed", float(difference.verdict in TOLD and difference.verdict != better)

    return measured


def best_of_many(population: Population, found: Findings) -> Numbers:
    """Coverage of the interval of the best setting, as `dpsweep best` prints it, and of the report's other intervals of
    that setting: of its worst-served group, and of its change against the baseline.
    """
    chosen = best(found)
    place = private(found).index(chosen.setting)
    truth = population.accuracy(place)
    for name, interval, value in (
        ("", chosen.interval, truth),
        ("_worst", found.interval_of_chosen(chosen.setting, found.worst_group.name), population.worst(place)),
        ("_change", found.change_of_chosen(chosen.setting, chosen.by), truth - population.without_privacy()),
    ):
        yield f"cover{name}", covers(interval, value)
        yield f"width{name}", width(interval)


def at_looks(population: Population, outcomes: Mapping[str, AnyOutcomes]) -> Iterator[Findings]:
    """Yield the findings at each look of a sweep that adds seeds until its settings are told apart."""
    seeds, look = 2, 1
    while True:
        known = {key: each for key, each in outcomes.items() if int(key.rpartition("-")[2]) < seeds}
        data = replace(published(population, known), looks=look)
        found = findings(data, gather(data.trials, known, resamples=300))
        yield found
        if told_apart(found) or seeds >= population.runs:
            return
        seeds, look = more_seeds(seeds, population.runs), look + 1


def _equal(count: int, *logits: float) -> tuple[tuple[float, ...], ...]:
    return (logits,) * count


_COLLAPSE: Final = ((0.9, 0.0), (0.1, -4.0))
"""One run in ten learns hardly anything: `Population.modes`."""
_TWO_MODES: Final = ((0.5, -0.8), (0.5, 0.8))


def _cases() -> dict[str, Case]:
    six = Population((3000,), _equal(6, 1.7), 1, of_run=0.25)
    small = replace(six, sizes=(300,))
    rare = Population((300,), ((-2.9,),), 1, positives=3, of_run=0.3)
    ten = Population((30,) * 10, _equal(1, *(1.0,) * 10), 5)
    fair = (0.5,) * 10
    one_poor = (0.5, *(2.5,) * 9)
    far_poor = (-1.3, *(2.5,) * 9)
    users = Population((600,), _equal(2, 1.2), 5, of_user=1.2, of_example=0.6)
    apart = ((2.5,), (2.5,), (2.5,), (2.5,), (2.5,), (0.55,))
    return {
        "one-seed": Case(six, (wrong_verdicts,)),
        **{f"rare-r{r}": Case(replace(rare, runs=r), (positives,)) for r in (1, 3, 5)},
        **{
            f"means-r{r}": Case(replace(small, runs=r, baseline=2.2), (means, differences, changes, wrong_verdicts))
            for r in (2, 3, 5, 10)
        },
        **{f"gap-10-r{r}": Case(replace(ten, runs=r), (gaps,)) for r in (2, 5)},
        "worst-10": Case(ten, (worst_groups,)),
        "worst-2": Case(Population((400, 150), ((1.5, 0.3),), 5), (worst_groups,)),
        "gap-2": Case(Population((400, 150), ((1.5, 0.3),), 5), (gaps,)),
        **{
            f"fair-{size}": Case(
                Population((size,) * 10, (fair, one_poor), 10),
                (wrong_verdicts, told_first_from_last("worst_group_accuracy")),
            )
            for size in (30, 100)
        },
        **{
            f"poor-{size}": Case(
                Population((size,) * 10, (fair, far_poor), 10), (told_first_from_last("worst_group_accuracy"),)
            )
            for size in (30, 100)
        },
        **{
            f"best-{s}": Case(replace(small, logits=_equal(s, 1.7), runs=5, baseline=2.2), (best_of_many,))
            for s in (6, 20)
        },
        "best-10-groups": Case(Population((40,) * 10, _equal(6, *(1.2,) * 10), 3, baseline=2.2), (best_of_many,)),
        **{f"users-{rows}": Case(replace(users, rows=rows), (means, differences)) for rows in (10, 30)},
        "front": Case(Population((150, 150), ((0.8, 2.4), (1.9, 1.9), (2.4, 0.8), (1.2, 1.2)), 3), (wrong_verdicts,)),
        **{
            f"{task}-r{r}": Case(
                Population((400, 150), ((1.5, 0.3), (1.5, 0.3), (2.2, 0.3)), r, task=task),
                (
                    of_each(main, Population.accuracy),
                    of_each(f"worst_group_{main}", Population.worst, "_worst"),
                    of_each(f"{main}_gap", Population.gap, "_gap"),
                    wrong_verdicts,
                    told_first_from_last(main, "worse"),
                ),
            )
            for task, main in (("regression", "r2"), ("multi_label", "micro_f1"))
            for r in (2, 5)
        },
        **{
            f"change-10-r{r}": Case(
                Population((40,) * 10, _equal(6, *(1.2,) * 9, 0.6), r, of_run=0.2, baseline=2.2), (changes,)
            )
            for r in (2, 5)
        },
        **{
            f"splits-{s}x{r}": Case(
                replace(small, logits=_equal(4, 1.7), runs=r, splits=s, of_run=0.1, of_split=0.3),
                (means, differences, wrong_verdicts),
            )
            for s, r in ((2, 5), (3, 1), (3, 3), (5, 1))
        },
        "splits": Case(replace(small, logits=_equal(2, 1.7), runs=1, splits=5), (means, differences)),
        "power-r5": Case(
            replace(small, logits=(*_equal(5, 1.7), (1.2,)), runs=5), (simultaneous, told_first_from_last("accuracy"))
        ),
        "power-r2": Case(replace(small, logits=apart, runs=2), (simultaneous, told_first_from_last("accuracy"))),
        **{
            f"eightfold-r{r}": Case(
                replace(small, sizes=(300,), runs=r, of_run=(*(0.1,) * 5, 0.8)), (means, last_mean, wrong_verdicts)
            )
            for r in (2, 3, 5)
        },
        **{
            f"{name}-r{r}": Case(replace(small, runs=r, of_run=0.05, modes=modes), (means, differences, wrong_verdicts))
            for name, modes in (("collapse", _COLLAPSE), ("two-modes", _TWO_MODES))
            for r in (2, 3, 5)
        },
    }


CASES: Final = _cases()


LOOKS: Final = {
    "until-equal": Population((200,), _equal(3, 1.7), 20),
    "until-apart": Population((200,), ((2.7,), (1.7,), (1.7,)), 20),
    "until-two-modes": Population((200,), _equal(3, 1.7), 20, of_run=0.05, modes=_TWO_MODES),
}
"""Sweeps that add seeds until their settings are told apart; `runs` is the largest number of them."""


def measure_looks(population: Population, sweeps: int, seed: int = 0) -> dict[str, float]:
    """Return the share of sweeps with a wrong verdict at any look, the share told apart, and the mean number of looks,
    in hundredths.
    """
    rows = []
    for number in range(sweeps):
        looks = list(at_looks(population, drawn(population, np.random.default_rng((seed, number)))))
        wrong = [dict(wrong_verdicts(population, found))["false"] for found in looks]
        rows.append((max(wrong), float(told_apart(looks[-1])), len(looks) / 100.0))
    return dict(zip(("false", "told", "looks"), map(float, np.mean(rows, axis=0)), strict=True))


_LONG_TAILED: Final = ("width_compared", "width_change", "width_worst_change")
"""Widths that are very large in a few sweeps: where two or three seeds of a setting spread more than all others do."""


def measure(case: Case, sweeps: int, seed: int = 0) -> dict[str, float]:
    """Return the means of a case's measures over simulated sweeps, and medians where few sweeps decide the mean. A
    number that is not defined in a sweep is left out.
    """
    found: dict[str, list[float]] = {}
    for sweep in simulated(case.population, sweeps, seed):
        for each in case.measured:
            for name, value in each(case.population, sweep):
                found.setdefault(name, []).append(value)
    means = {name: float(np.nanmean(values)) for name, values in found.items()}
    medians = {f"median_{name}": float(np.nanmedian(found[name])) for name in found if name.startswith(_LONG_TAILED)}
    return means | medians


BESIDE: Final = ("means-r2", "means-r5", "power-r2", "gap-10-r5", "users-10", "eightfold-r3")
"""Cases in which other methods are measured too."""


def measure_others(population: Population, sweeps: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Coverage and width of every method in simulated sweeps, and how often it tells true differences from 0."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(sweeps):
        outcomes = drawn(population, np.random.default_rng((seed, number)))
        ours = compared(population, outcomes)
        sweep = Sweep.of(population, ours, private(ours), outcomes)
        for method in METHODS:
            for name, value in _judged(method, sweep):
                found.setdefault((method, name), []).append(value)
    names = dict.fromkeys(name for _, name in found)
    return {
        method: {name: float(np.mean(found[method, name])) for name in names if (method, name) in found}
        for method in METHODS
    }


def _judged(name: str, sweep: Sweep) -> Numbers:
    method, population = METHODS[name], sweep.population
    last = len(population.logits) - 1
    yield from _against("mean", method.mean(sweep, 0), population.accuracy(0))
    if len(population.sizes) > 1:
        yield from _against("gap", method.gap(sweep, 0), population.gap(0))
    if last:
        truth = population.accuracy(0) - population.accuracy(last)
        ends = method.difference(sweep, 0, last)
        yield from _against("difference", ends, truth)
        if ends is not None and abs(truth) > 1e-9:
            yield "told", float(not ends[0] <= 0.0 <= ends[1])


def _against(name: str, ends: Ends, truth: float) -> Numbers:
    if ends is not None:
        yield f"cover_{name}", float(ends[0] - 1e-9 <= truth <= ends[1] + 1e-9)
        yield f"width_{name}", ends[1] - ends[0]


def _shown(row: Mapping[str, float]) -> str:
    return "".join(f"  {name} {100 * value:.1f}" for name, value in row.items())


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=120, help="simulated sweeps of each case")
    parser.add_argument("--others", type=int, default=20, help="simulated sweeps in which other methods are measured")
    parser.add_argument("--case", action="append", choices=[*CASES, *LOOKS], help="only this case (may be repeated)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulation")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    for name in options.case or [*CASES, *LOOKS]:
        row = (
            measure_looks(LOOKS[name], options.sweeps, options.seed)
            if name in LOOKS
            else measure(CASES[name], options.sweeps, options.seed)
        )
        print(json.dumps({"case": name, **row}) if options.json else f"{name:<18}{_shown(row)}", flush=True)
        others = measure_others(CASES[name].population, options.others, options.seed) if name in BESIDE else {}
        for method, found in others.items():
            line = {"case": name, "method": method, **found}
            print(json.dumps(line) if options.json else f"  {method:<16}{_shown(found)}", flush=True)


if __name__ == "__main__":
    main()
