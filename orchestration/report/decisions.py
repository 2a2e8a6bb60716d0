"""The sentences of the headline that compare settings, each with its interval. Pure; every string is plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestration.comparison.findings import Difference, Findings
from orchestration.comparison.formats import listed, number, percent, points
from orchestration.comparison.intervals import Interval
from orchestration.comparison.metrics import metric
from orchestration.comparison.settings import Setting, whose
from orchestration.comparison.values import accuracy_change, epsilon


def decisions(found: Findings, delta: float) -> list[str]:
    """What can be told of accuracy and of the worst-served group, and which settings cannot be told apart."""
    best = found.best("accuracy")
    if best is None:
        return ["No private trial has finished, so there is no trade-off to show yet."]
    fairest = found.best("worst_group_accuracy", [best, *found.private])
    sentences = [_most_accurate(found, best, delta), *_told_apart(found, best, "accuracy", "in accuracy")]
    if fairest is not None:
        sentences += [_fairest(found, fairest, best)]
        sentences += _told_apart(found, fairest, "worst_group_accuracy", "for its worst-served group")
    return [*sentences, *_limits(found, best)]


def _most_accurate(found: Findings, best: Setting, delta: float) -> str:
    cost = best.over_seeds(epsilon)
    which = "private" if len(found.private) == 1 else "most accurate private"
    return (
        f"The {which} setting, {best.name}, reaches {_with_interval(found, best, 'accuracy')} on test data"
        f"{_against_baseline(found, best)}, at ε = {number(cost.mean if cost else None)}, δ = {delta:g}{_seeds(best)}."
    )


def _with_interval(found: Findings, setting: Setting, name: str) -> str:
    mean, interval = setting.over_seeds(metric(name).value), found.interval(setting, name)
    text = percent(mean.mean if mean else None)
    return text if interval is None else f"{text} (95% interval {100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _against_baseline(found: Findings, best: Setting) -> str:
    change = best.over_seeds(accuracy_change)
    if found.baselines and (interval := found.evidence.difference(best, found.baselines[0], "accuracy")):
        text = f", {_below(interval.value)} the best non-private setting ({_signed(interval)})"
    else:
        text = f", {_below(change.mean)} the non-private baseline" if change else ""
    constant = best.over_seeds(metric("majority_class_rate").value)
    return text + (f", where always predicting one class reaches {percent(constant.mean)}" if constant else "")


def _below(change: float) -> str:
    return f"{abs(100 * change):.1f} points {'below' if change < 0 else 'above'}"


def _signed(interval: Interval) -> str:
    return f"{points(interval.low)} to {points(interval.high)}"


def _seeds(setting: Setting) -> str:
    """What a mean over seeds costs, behind what each of them does."""
    found = setting.composition
    if len(setting.trials) < 2 or found is None or found.epsilon is None:
        return ""
    return f" for each of {len(setting.trials)} seeds, ε = {number(found.epsilon)} for all of them together"


def _fairest(found: Findings, fairest: Setting, best: Setting) -> str:
    groups = " or ".join(sorted(whose(metric("worst_group_accuracy"), fairest)))
    whom = f"group {groups} gets {_with_interval(found, fairest, 'worst_group_accuracy')}"
    if len(found.private) == 1:
        return f"Of all groups, {whom}, the lowest accuracy."
    if fairest is best:
        return f"It also has the highest accuracy of a worst-served group: {whom}."
    other = _with_interval(found, best, "worst_group_accuracy")
    total = _with_interval(found, fairest, "accuracy")
    return (
        f"The highest accuracy of a worst-served group is that of {fairest.name}: {whom}, against {other} under "
        f"{best.name}; its accuracy is {total} overall."
    )


def _told_apart(found: Findings, best: Setting, name: str, where: str) -> list[str]:
    """Which of the other methods, each at its best, cannot be told from ``best``, and which it beats."""
    others = [setting for setting in found.methods if setting is not best]
    differences = [found.difference(best, other, name) for other in others]
    alike = [each.other for each in differences if each.verdict == "not distinguishable"]
    beaten = [each for each in differences if each.verdict == "better"]
    sentences = []
    if alike:
        sentences.append(f"{listed([best.name, *alike])} cannot be told apart {where}.")
    if beaten:
        who = (
            f"Both {best.name} and {alike[0]} beat"
            if len(alike) == 1 and _beats_too(found, alike[0], beaten, name)
            else f"{best.name} beats"
        )
        each = listed([f"{one.other} by {_reach([one])}" for one in beaten])
        sentences.append(f"{who} {each} points {where}.")
    return sentences


def _beats_too(found: Findings, name: str, beaten: Iterable[Difference], by: str) -> bool:
    settings = {setting.name: setting for setting in found.methods}
    return all(found.difference(settings[name], settings[each.other], by).verdict == "better" for each in beaten)


def _reach(differences: Sequence[Difference]) -> str:
    known = [each.interval for each in differences if each.interval]
    return f"{100 * min(each.low for each in known):.1f} to {100 * max(each.high for each in known):.1f}"


def _limits(found: Findings, best: Setting) -> list[str]:
    interval = found.interval(best, "accuracy")
    if interval is None:
        if len(found.private) < 2:
            return []
        return [
            "Whether differences exceed chance cannot be told: what the models predict of single test examples is not "
            "stored beside this sweep."
        ]
    if interval.covers == "test examples":
        return ["Each setting has one seed: intervals are of the choice of test examples alone, not of the seed."]
    return []
