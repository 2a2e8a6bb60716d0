"""`dpsweep best`: the best setting of a sweep by one metric, under conditions, and the settings that may equal it.

Also the setting that costs less privacy than the best one and may be as good, in words that the report shows too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from dpsweep.accounting.errors import InvalidInput, count_of, require_finite
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.reasons import Reason, in_words, union
from dpsweep.accounting.mechanism.units import UnitName
from dpsweep.accounting.registry import nearest
from dpsweep.orchestration.comparison.findings import Difference, Findings, mean_of, warnings
from dpsweep.orchestration.comparison.formats import Format, at_most, per_unit, sentence_start
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.metrics import METRICS, metric
from dpsweep.orchestration.comparison.sanity import best_constant, constant_of, cure_of_rare_classes, finds_rare_classes
from dpsweep.orchestration.comparison.settings import Setting, served_worst, whose
from dpsweep.orchestration.comparison.wording import between, by_selection, in_brackets, of_runs, says_nothing
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial


def more_private(found: Findings, best: Setting, name: str, undecided: Collection[Difference]) -> Setting | None:
    """Return the cheapest method that is not distinguishable from ``best`` in a metric, if it costs less under the same
    adjacency; else None.

    undecided: differences of ``best`` to others in that metric. Of equally cheap methods the best one is returned.
    """
    alike = {each.other for each in undecided if each.verdict == "not distinguishable"}
    same = [each for each in found.methods if each.name in alike and each.neighbours == best.neighbours]
    cheaper = [each for each in same if _cost(each) < _cost(best)]
    least = min(map(_cost, cheaper), default=0.0)
    return found.best(name, [each for each in cheaper if _cost(each) == least])


def unsure(found: Findings, best: Setting) -> list[str]:
    """Return a sentence if the interval of the best setting holds a constant prediction; else nothing.

    `sanity.why_useless` judges one or two seeds by test examples alone, which says nothing of the next seed, and a
    setting by itself; rare classes that are found suffice for it. The interval here allows for the choice among all
    private settings: of twenty that have learnt nothing, one looks useful in a quarter of sweeps.
    """
    constant, interval = constant_of(best), found.interval_of_best(best, found.main.name)
    if constant is None or interval is None or interval.low > constant:
        return []
    beats = f"beats always predicting {best_constant(found.main)}, which reaches {found.main.format.one(constant)}"
    if finds_rare_classes(best, found.evidence, found.main, found.choice(found.main.name)):
        return [f"{best.name} {beats}, by balanced accuracy alone: compare settings by that, or by recall."]
    return [
        f"{sentence_start(of_runs(interval))} cannot show that another run of {best.name} "
        f"{beats}: add {'splits' if interval.is_of_splits else 'seeds'}."
    ]


def said_of(found: Findings, setting: Setting, name: str) -> str:
    """Return the sentence on a setting that `more_private` has found, and on whom it serves worst.

    A score of all examples hardly shows what becomes of a rare class.
    """
    of = metric(name)
    word = found.word if name == found.main.name else name
    reached = of.format.one(setting.mean(of.value))
    served = _serves_worst(found, setting) if name == found.main.name else ""
    return (
        f"More private, and cannot be told from it in {word}: {setting.name}, {reached} "
        f"at ε = {at_most(setting.highest_epsilon)}{found.per_unit(setting)}{served}."
    )


def _serves_worst(found: Findings, setting: Setting) -> str:
    worst = found.worst_group
    mean = setting.mean(worst.value)
    if mean is None or not whose(worst, setting) or not found.has_groups:
        return ""
    reached = f"{found.worst_word_unless_main} {worst.format.one(mean)}"
    return f", which serves {served_worst(worst, setting)} worst, with{reached}"


def _cost(setting: Setting) -> float:
    """Return the epsilon of a setting as it is shown, so that rounding makes none cheaper."""
    cost = setting.highest_epsilon
    return math.inf if cost is None else float(f"{cost:.2g}")


WORST_GROUP: Final = "worst_group"
"""Short name for the worst-group metric by which the sweep compares settings."""

_NEAREST: Final = 3
"""Number of settings shown of those that cannot be told from the best."""


@dataclass(frozen=True)
class Best:
    """The private setting with the best mean of a metric.

    `by`: name of the metric.
    `value`: the mean over runs; for an extreme over groups, settings are ordered by ``interval.corrected``.
    `interval`: allows for the choice; None if it is unknown.
    `alike`: differences to other settings that are not distinguishable from it.
    `unordered`: differences that are unknown, with one common seed or none.
    `more_private`: the report's sentence on a setting that costs less and may be as good; "" if none does.
    `unknown_cost`: as in `Findings`.
    `warnings`: the others of the report's headline.
    `reasons`: why its epsilon is an estimate, by its trials and by the choice itself.
    """

    setting: Setting
    by: str
    value: float
    interval: ConfidenceInterval | None
    alike: tuple[Difference, ...]
    unordered: tuple[Difference, ...]
    warnings: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()
    unknown_cost: str = ""
    more_private: str = ""

    def __repr__(self) -> str:
        cost = self.setting.highest_epsilon
        spent = "" if cost is None else f", ε{per_unit(self.unit)} {at_most(cost, 4)} ({self.kind})"
        return f"<Best {self.name}: {self.by} {self.value:.4g}{spent}, trial {self.trial.key}>"

    def _repr_html_(self) -> str:
        lines = (*_lines(self, _NEAREST, ""), f"trial: {self.trial.key}", *self.warnings)
        return "".join(f"<p>{html.escape(each)}</p>" for each in lines)

    @property
    def kind(self) -> Claim:
        """Return whether the epsilon of each of its trials is a guarantee."""
        return "estimate" if self.reasons else "guarantee"

    @property
    def privacy(self) -> PublishedPrivacy:
        """Return the claim of `trial`; delta, adjacency and unit are those of every run of the setting."""
        assert self.trial.privacy is not None, "only private settings are chosen"
        return self.trial.privacy

    @property
    def unit(self) -> UnitName:
        """Return whose privacy its epsilon is."""
        return self.privacy.unit

    @property
    def name(self) -> str:
        """Return the name of the setting."""
        return self.setting.name

    @property
    def trial(self) -> PublishedTrial:
        """Return the run whose model represents the setting: `Setting.first_seed`."""
        return self.setting.first_seed

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "setting": self.name,
            "by": self.by,
            "value": self.value,
            "interval": self.interval and asdict(self.interval),
            "epsilon": self.setting.highest_epsilon,
            "delta": self.privacy.delta,
            "adjacency": self.privacy.adjacency,
            "kind": self.kind,
            "unit": self.unit,
            "reasons": list(self.reasons),
            "trial": self.trial.key,
            "trials": [trial.key for trial in self.setting.trials],
            "more_private": self.more_private,
            "not_distinguishable": [each.as_dict() for each in self.alike],
            "unknown_order": [each.as_dict() for each in self.unordered],
            "unknown_cost": self.unknown_cost,
            "warnings": list(self.warnings),
        }


def best(
    found: Findings, by: str | None = None, max_epsilon: float = math.inf, at_least: Mapping[str, float] | None = None
) -> Best:
    """Return the best private setting of a sweep by the mean of a metric over its runs.

    `by`: a metric of results.json that is better when higher or lower, or ``worst_group``; by default accuracy, or the
    main score of another task. `max_epsilon`: maximum epsilon of any run of the setting, at the delta of the sweep.
    `at_least`: by metric, the mean that the setting must reach; it is a maximum for metrics where lower is better.
    Choosing by results on private data costs privacy beyond the epsilon of the chosen model, which is then an estimate;
    choosing by test data does not.

    A setting that has learnt nothing is never chosen (`sanity.why_useless`).

    Raises: InvalidInput for an unknown metric, a metric without a direction, and a max_epsilon or condition that is no
    number in its range. Also if no setting that has learnt something fulfils the conditions.
    """
    if not found.private:
        raise InvalidInput(
            "no private trial of this sweep has finished; resume it, or add a clipping method besides none"
        )
    name = _name(found, by or found.main.name)
    least = {
        _name(found, each): require_finite(f"at_least[{each!r}]", value) for each, value in (at_least or {}).items()
    }
    if max_epsilon != math.inf:
        require_finite("max_epsilon", max_epsilon, above=0.0)
    fulfilling = [setting for setting in found.private if _fulfils(setting, max_epsilon, least)]
    allowed = [setting for setting in fulfilling if setting.name not in found.useless]
    winner = found.best(name, allowed)
    if winner is None and (useless := found.best(name, fulfilling)):
        raise InvalidInput(_not_of_use(found, useless))
    if winner is None:
        raise InvalidInput(_nothing(found, name, max_epsilon, least))
    value = mean_of(winner, name)
    undecided = found.undecided(winner, name, allowed)
    alike = tuple(each for each in undecided if each.verdict == "not distinguishable")
    unordered = tuple(each for each in undecided if each not in alike)
    chosen: tuple[Reason, ...] = ("chosen_by_private_results",) if any(metric(n).exact for n in (name, *least)) else ()
    reasons = union((winner.reasons, chosen))
    doubts = unsure(found, winner) if name == found.main.name else []
    warned = (*in_words(reasons), *doubts, *(each for each in warnings(found) if each != found.unknown_cost))
    # conditions on results choose too: of all settings that cost so little, whatever they reached
    candidates = [setting for setting in found.private if _fulfils(setting, max_epsilon, {})]
    chosen_interval = found.interval_of_chosen if least else found.interval_of_best
    interval = chosen_interval(winner, name, candidates)
    cheaper = more_private(found, winner, name, alike)
    said = said_of(found, cheaper, name) if cheaper else ""
    return Best(winner, name, value, interval, alike, unordered, warned, reasons, found.unknown_cost, said)


def _not_of_use(found: Findings, setting: Setting) -> str:
    """Return why the best setting under the conditions is not recommended, and which ones are."""
    if found.too_few_to_test:
        return f"no setting can be recommended: {found.too_few_to_test}, by data.test_fraction or with more data"
    others = ", ".join(each.name for each in found.useful[:3])
    rare = cure_of_rare_classes(constant_of(setting), found.main)
    alone = f"train longer, tune the bound, allow more epsilon{', or ' * bool(rare)}{rare}"
    step = f"relax a condition: {others} learnt more" if others else alone
    return f"no setting under these conditions is of use: {setting.name} {found.useless[setting.name]}; {step}"


def _name(found: Findings, name: str) -> str:
    known = [each for each in METRICS if each.better]
    full = found.worst_group.name if name == WORST_GROUP else name
    if any(each.name == full and each.task in (None, found.task) for each in known):
        return full
    has = [each.name for each in known if any(setting.mean(each.value) is not None for setting in found.private)]
    is_of_another = any(each.name == full for each in known)
    which = f"{name!r} is no metric of {found.task}" if is_of_another else f"unknown metric {name!r} to choose by"
    raise InvalidInput(f"{which}; {nearest(str(name), [*has, WORST_GROUP])}")


def _fulfils(setting: Setting, max_epsilon: float, least: Mapping[str, float]) -> bool:
    cost = setting.highest_epsilon
    is_cheap = cost is not None and cost <= max_epsilon
    return is_cheap and all(_reaches(name, mean_of(setting, name), value) for name, value in least.items())


def _reaches(name: str, mean: float, value: float) -> bool:
    """Return whether a mean is as good as a value; an unknown one (NaN) is not."""
    return mean >= value if metric(name).better == "higher" else mean <= value


def _nothing(found: Findings, name: str, max_epsilon: float, least: Mapping[str, float]) -> str:
    conditions = [f"epsilon at most {max_epsilon:g}"] if math.isfinite(max_epsilon) else []
    limits = {"higher": ("at least", "most"), "lower": ("at most", "least")}
    conditions += [f"{each} {limits[metric(each).better][0]} {value:g}" for each, value in least.items()]
    changes = any(each.endswith("_change") for each in (name, *least))
    why = f". {found.unknown_cost}" if found.unknown_cost and changes else ""
    if not why and changes and not found.baselines:
        why = ". No baseline was trained: add none to clipping"
    if not conditions:
        return f"no private setting of this sweep has {name}; choose by another metric{why}"
    reached = {each: found.best(each) for each in least}
    tops = [
        f"the {limits[metric(each).better][1]} of {each} is {mean_of(setting, each):.4g}"
        for each, setting in reached.items()
        if setting
    ]
    costs = [cost for setting in found.private if (cost := setting.highest_epsilon) is not None]
    tops += [f"the least epsilon is {at_most(min(costs), 4)}"] if costs and math.isfinite(max_epsilon) else []
    step = f"{', '.join(tops)}: relax a condition" if tops else "relax a condition"
    return f"no private setting has {' and '.join(conditions)}; {step}{why}"


def parse_conditions(texts: Sequence[str]) -> dict[str, float]:
    """Return conditions such as ``worst_group=0.7`` by the name of the metric. Raises: InvalidInput for other texts."""
    found: dict[str, float] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            sign = ""
        if not sign or not math.isfinite(found.get(name, math.nan)):
            raise InvalidInput(f"condition {text!r} must be METRIC=NUMBER, such as worst_group=0.7")
    return found


def best_lines(found: Best, model: str, show_all: bool = False) -> Iterator[str]:
    """Yield the lines that ``dpsweep best`` prints: the setting, those that may equal it, its model, and warnings.

    show_all: show every setting that may equal it, not only the nearest.
    """
    yield from _lines(found, None if show_all else _NEAREST, " (--all shows the rest)")
    yield f"model: {model}"
    yield from found.warnings


def _lines(found: Best, most: int | None, how_to_see_more: str) -> Iterator[str]:
    """Yield the lines on a setting and on those near it, at most so many of each kind."""
    shown, interval = metric(found.by).format, found.interval
    if found.unknown_cost:
        yield found.unknown_cost
    within = in_brackets(interval, shown, by_selection(metric(found.by), found.value, interval))
    cost, of = found.setting.highest_epsilon, found.privacy
    claim = f"epsilon{per_unit(of.unit)} {at_most(cost)} at delta {of.delta:g} ({found.kind}, {of.adjacency})"
    yield f"{found.name}: {found.by} {shown.one(found.value)}{within}, {claim}"
    if found.more_private:
        yield found.more_private
    if interval is None:
        yield "no interval is known: what its models predict of single test examples is not stored"
    elif interval.is_of_one_seed:
        yield "the interval is of the choice of test examples alone; whether it is the best is unknown (one seed)"
    yield from _nearest("cannot be told from it", found.alike, shown, most, how_to_see_more)
    yield from _nearest("order unknown (one common seed)", found.unordered, shown, most, how_to_see_more)
    if interval is not None:
        unknown = [each.other for each in found.unordered if each.interval is None]
        named = unknown[:most]
        more = f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
        if unknown:
            why = "without common test examples, or with a run that has no finite score"
            yield f"cannot be compared with it, {why}: {', '.join(named)}{more}"


def _nearest(
    words: str, differences: Sequence[Difference], shown: Format, most: int | None, how_to_see_more: str
) -> Iterator[str]:
    """Yield the settings of these differences, which ``words`` are about: how many, and the nearest as measured."""
    known = [(each, each.interval) for each in differences if each.interval is not None]
    by_distance = sorted(known, key=lambda pair: abs(pair[1].value))
    listed = by_distance[:most]
    if len(known) > len(listed):
        yield f"{words}: {count_of(len(known), 'setting')}; the nearest {len(listed)}{how_to_see_more}:"
    for each, interval in listed:
        yield f"{words}: {_difference(each, interval, shown)}"


def _difference(each: Difference, interval: ConfidenceInterval, shown: Format) -> str:
    of_other = replace(interval, value=-interval.value, low=-interval.high, high=-interval.low)
    signed = shown.of_differences
    if says_nothing(of_other, signed):
        measured = f"{signed.one(of_other.value)}{shown.points}"
        return f"{each.other} (measured {measured}, but {of_runs(interval)} cannot tell: any difference is possible)"
    alone = ", by test examples alone" * interval.is_of_one_seed
    return f"{each.other} (differs by {between(of_other, signed)}{shown.points}{alone})"
