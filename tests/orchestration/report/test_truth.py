"""No sentence of a report, or line of `dpsweep best`, is false: simulated sweeps whose true scores are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest

from benchmarks.simulated import Population, drawn, published
from dpsweep.orchestration.comparison.best import best, best_lines
from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.report.prose import headline

_SMALL: Final = Population((300,), ((1.7,),) * 6, 3, baseline=2.2)
_APART: Final = ((2.5, 2.2), (2.4, 2.4), (1.2, 1.0), (1.9, 0.2))
_TEN: Final = Population((40,) * 10, ((0.5,) * 10, (0.5, *(2.5,) * 9), (1.5,) * 10), 3)
SWEEPS: Final[Mapping[str, Population]] = {
    "equal": replace(_SMALL, runs=5),
    "two seeds": replace(_SMALL, runs=2),
    "one seed": replace(_SMALL, runs=1),
    "one far below": replace(_SMALL, logits=((2.5,),) * 4 + ((0.5,),), baseline=3.0),
    "two groups": Population((200, 100), _APART, 5, baseline=3.0),
    "ten groups": _TEN,
    "users": Population((600,), ((1.2,), (1.2,), (0.2,)), 5, of_user=1.2, of_example=0.6, rows=10),
    "eightfold": replace(_SMALL, of_run=(*(0.1,) * 5, 0.8)),
    "regression": Population((300, 150), ((1.5, 0.3), (1.5, 0.3), (2.8, 1.5)), 5, task="regression"),
    "many labels": Population((200, 150), ((1.5, 0.3), (1.5, 0.3), (2.4, 1.4)), 3, task="multi_label"),
}
"""Ten kinds of sweeps."""
_METRIC: Final = r"(?:accuracy|R²|micro F1)"
_NAME: Final = r"([mM]\d) · constant"


@dataclass(frozen=True)
class Stated:
    """One statement about the truth. sentence: where it stands. holds: whether it is true. is_verdict: of order."""

    sentence: str
    holds: bool
    is_verdict: bool


@dataclass(frozen=True)
class Report:
    """What a user reads of one simulated sweep, beside the truth."""

    population: Population
    found: Findings
    sentences: Sequence[str]

    def total(self, name: str) -> float:
        return self.population.accuracy(int(name[1]))

    def worst(self, name: str) -> float:
        return self.population.worst(int(name[1]))

    def difference(self, one: str, other: str, sentence: str) -> float:
        """The true difference of two settings in the metric of a sentence on total or worst group."""
        of = self.worst if "worst-served" in sentence else self.total
        return of(one) - of(other)

    def covers(self, sentence: str, ends: str, truth: float) -> Iterator[Stated]:
        """The statement that a printed interval contains the truth. ends: as printed, such as "75.3 to 95.3%"."""
        if "cannot tell" in ends or "spans the whole range" in ends or "over test examples alone" in sentence:
            return
        low, high = (float(end.replace("−", "-").rstrip("%")) for end in ends.split(" to "))
        scale, off = (100.0, 0.05) if self.population.task != "regression" else (1.0, 0.0005)
        yield Stated(sentence, low - off <= scale * truth <= high + off, is_verdict=False)


def read(population: Population, seed: int) -> Report:
    """Draw a sweep and write its report, and what `dpsweep best` prints by two metrics."""
    outcomes = drawn(population, np.random.default_rng(seed))
    data = published(population, outcomes)
    found = findings(data, gather(data.trials, outcomes, resamples=200))
    lines = [f"best: {line}" for by in (None, "worst_group") for line in best_lines(best(found, by), "here", True)]
    return Report(population, found, [*headline(data, found), *lines])


def _decided(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    name = match[1]
    if report.population.runs > 1 or report.population.splits > 1:
        yield from report.covers(sentence, match[2], report.total(name))
        if change := re.search(r"(?:below|above) no privacy \[(.+?)\]", sentence):
            yield from report.covers(sentence, change[1], report.total(name) - report.population.without_privacy())
        if worst := re.search(r"worst served: .+? \[(.+?)\]\.$", sentence):
            yield from report.covers(sentence, worst[1], report.worst(name))


def _chosen(sentence: str) -> str:
    found = re.match(rf"(?:Take )?{_NAME}(?::| reaches)", sentence)
    return found[1] if found else ""


def _worst_of_other(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    fairest, ours, theirs, best_, total = match.groups()
    yield from report.covers(sentence, ours, report.worst(fairest))
    yield from report.covers(sentence, theirs, report.worst(best_))
    yield from report.covers(sentence, total, report.total(fairest))


def _beats(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    for loser, ends in re.findall(rf"{_NAME} by ([\d.]+ to [\d.]+)", sentence):
        apart = report.difference(match[1], loser, sentence)
        yield from report.covers(sentence, ends, apart)
        yield Stated(sentence, apart > 0.0, is_verdict=True)


def _alike(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """That settings cannot be told apart is a statement on the evidence: no verdict of theirs contradicts it."""
    named = [name.lower() for name in re.findall(_NAME, sentence)]
    first = next(filter(None, map(_chosen, report.sentences))) if "from it" in sentence else named.pop()
    name = report.found.headline["worst-served" in sentence]
    settings = {setting.clipping: setting for setting in report.found.settings}
    for other in named:
        verdict = report.found.difference(settings[first], settings[other], name).verdict
        yield Stated(sentence, verdict == "not distinguishable", is_verdict=True)


def _best(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    truth = report.worst(match[1]) if match[2].startswith("worst_group") else report.total(match[1])
    if report.population.runs > 1 and (interval := re.search(r"95% interval (.+?)\)", sentence)):
        yield from report.covers(sentence, interval[1], truth)


def _differs(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """A line of `dpsweep best` on another setting; it follows the line on the best one."""
    before = report.sentences[: report.sentences.index(sentence)]
    chosen = next(found for line in reversed(before) if (found := re.match(rf"best: {_NAME}: (\S+)", line)))
    if "by test examples alone" not in sentence:
        of = report.worst if chosen[2].startswith("worst_group") else report.total
        yield from report.covers(sentence, match[2].removesuffix(" points"), of(match[1]) - of(chosen[1]))


def _above(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    if "beyond" in sentence:
        yield Stated(sentence, report.total(match[1]) > report.population.without_privacy(), is_verdict=True)


def _useless(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """That a setting cannot be told from a constant prediction: its interval reaches down to half of the examples."""
    setting = next(each for each in report.found.private if each.clipping == match[1])
    interval = report.found.interval(setting, report.found.main.name)
    yield Stated(sentence, interval is not None and interval.low <= 0.5, is_verdict=True)


def _unsure(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """That the interval of the best setting, which allows for its choice, reaches down to half of the examples."""
    setting = next(each for each in report.found.private if each.clipping == match[1])
    interval = report.found.interval_of_best(setting, report.found.main.name)
    yield Stated(sentence, interval is not None and interval.low <= 0.5, is_verdict=True)


def _beats_constant(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """That a setting finds the rarer class too; both classes are as frequent in every population."""
    yield Stated(sentence, report.total(match[1]) > 0.5, is_verdict=True)


def _true(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    """A sentence that is true of every simulated sweep, or of how it was made."""
    yield Stated(sentence, True, is_verdict=False)


def _of_one_seed(report: Report, sentence: str, match: re.Match[str]) -> Iterator[Stated]:
    yield Stated(sentence, report.population.runs == 1, is_verdict=True)


Rule = Callable[[Report, str, re.Match[str]], Iterator[Stated]]
RULES: Final[Sequence[tuple[str, Rule]]] = (
    (rf"(?:Take )?{_NAME}(?::| reaches) {_METRIC} \S+ \[(.+?)(?: after choosing among \d+)?\] at ε", _decided),
    (rf"{_NAME} also has the highest .+ of a worst-served group\.", _true),
    (r"The .+ of the worst-served group is \S+ in each of", _true),
    (r"Always predicting .+ reaches", _true),
    (
        rf"The highest {_METRIC} of a worst-served group is that of {_NAME}: .*?interval (.+?)\), against .*?interval "
        rf"(.+?)\) under {_NAME}; its .*interval (.+?)\) overall",
        _worst_of_other,
    ),
    (rf"(?:best: )?{_NAME} beats always predicting .* by balanced accuracy alone", _beats_constant),
    (rf"{_NAME} beats ", _beats),
    (rf"{_NAME}.* cannot be told from ", _alike),
    (rf"best: {_NAME}: (\S+) ", _best),
    (
        rf"best: (?:cannot be told from it|order unknown \(one common seed\)): {_NAME} \(differs by (.+?)"
        r"(?:, by test examples alone)?\)",
        _differs,
    ),
    (rf"best: (?:cannot be told from it|order unknown \(one common seed\)): {_NAME} \(measured", _true),
    (rf"(?:best: )?Warning: {_NAME} is .* above the best non-private setting", _above),
    (rf"(?:best: )?Not recommended: {_NAME} cannot be told from always predicting", _useless),
    (rf"(?:best: )?\S+ seeds? cannot show that another run of {_NAME} beats always predicting", _unsure),
    (r"Whether one setting is better than another is unknown \(one seed\)", _of_one_seed),
    (r"best: the interval is of the choice of test examples alone", _of_one_seed),
    (r"(?:best: )?Warning: no clipping method was tuned", _true),
    (r"(?:best: )?Warning: every ε is that of one row, and protects nobody who owns several as much", _true),
    (r"What single training examples paid is withheld|best: model: here", _true),
)
"""What each sentence states, by a pattern. A sentence without one fails the test: nothing goes unread."""


def stated(report: Report) -> Iterator[Stated]:
    """Every statement of a report about the truth."""
    for sentence in report.sentences:
        read_as = next(((rule, found) for pattern, rule in RULES if (found := re.match(pattern, sentence))), None)
        assert read_as, f"nothing says whether this is true: {sentence}"
        rule, match = read_as
        yield from rule(report, sentence, match)


def false(kind: str, seeds: Sequence[int]) -> tuple[list[str], list[str], int]:
    """Sentences with a false verdict, those with an interval that misses the truth, and the number of intervals."""
    every = [each for seed in seeds for each in stated(read(SWEEPS[kind], seed))]
    verdicts = [each.sentence for each in every if each.is_verdict and not each.holds]
    intervals = [each for each in every if not each.is_verdict]
    return verdicts, [each.sentence for each in intervals if not each.holds], len(intervals)


@pytest.mark.parametrize("kind", ["one seed", "two groups", "regression"])
def test_no_sentence_of_a_simulated_sweep_is_false(kind: str) -> None:
    verdicts, missed, _ = false(kind, [0])
    assert not verdicts
    assert not missed


def test_no_sentence_of_ten_kinds_of_sweeps_is_false_more_often_than_said() -> None:
    """Of ten reports of each kind: wrong verdicts in 5%, and 5% of the intervals, within two standard errors."""
    reports = 10
    wrong, missed, count = 0, [], 0
    for kind in SWEEPS:
        for seed in range(reports):
            verdicts, beyond, intervals = false(kind, [seed])
            wrong += bool(verdicts)
            missed += [(kind, seed, each) for each in beyond]
            count += intervals
    every = reports * len(SWEEPS)
    assert wrong <= 0.05 * every + 2.0 * (0.05 * 0.95 * every) ** 0.5
    assert len(missed) <= 0.05 * count, missed
