"""Sentences that compare settings, with their intervals. Pure; every string is plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpsweep.orchestration.comparison.entries import by_selection
from dpsweep.orchestration.comparison.findings import Difference, Findings
from dpsweep.orchestration.comparison.formats import (
    SHARES,
    Format,
    amount,
    at_most,
    first_few,
    is_shown,
    listed,
    number,
)
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.sanity import best_constant, constant_of
from dpsweep.orchestration.comparison.settings import Setting, whose
from dpsweep.orchestration.comparison.spoken import between, difference_between, says_nothing, unknown_of_one_seed
from dpsweep.orchestration.comparison.values import epsilon


def decisions(found: Findings, delta: float) -> list[str]:
    """Return sentences on the best accuracy, the best-served worst group, and which settings are not
    distinguishable.
    """
    main = found.main.name
    best = found.best(main)
    if best is None:
        return [nothing_to_take(found)]
    worst = found.worst_group.name
    fairest = found.best(worst, [best, *found.useful]) if found.has_groups else None
    if fairest is not None and _shown(fairest, worst) == _shown(best, worst):
        fairest = best  # a difference that is not shown is no rank
    sentences = [_most_accurate(found, best, delta), *_distinguished(found, best, main, f"in {found.word}")]
    if fairest is not None:
        sentences += [_fairest(found, fairest, best)]
        by = found.worst_word_unless_main
        where = f"in the{by} of the worst-served group" if by else "for the worst-served group"
        sentences += _distinguished(found, fairest, worst, where)
    return [*sentences, *_could_show(found), *_looks(found), *_caveats(found, best)]


def nothing_to_take(found: Findings) -> str:
    """Return the sentence in place of all comparisons where no private setting has finished, or learnt anything."""
    if not found.private:
        return f"No private trial has finished, so there is no trade-off to show{_without_privacy(found)}."
    if not found.useless:
        return f"No private setting has {found.word} to compare."
    if found.too_few_to_test:
        return f"Nothing trained here can be judged: {found.too_few_to_test}."
    shown = found.best(found.main.name, found.private) or found.private[0]
    name, why = shown.name, found.useless[shown.name]
    others = len(found.useless) - 1
    more = f", and nothing shows that {others} other setting{'s' * (others > 1)} learnt more" if others else ""
    return f"Nothing trained here with privacy is of use: {name} {why}{more}."


def _without_privacy(found: Findings) -> str:
    """Return what the best baseline reaches, as a clause; "" without one."""
    if not found.baselines:
        return ""
    return f"; without privacy, {found.word} is {_shown(found.baselines[0], found.main.name)}"


def _most_accurate(found: Findings, best: Setting, delta: float) -> str:
    most = "most accurate" if found.main.name == "accuracy" else "best"
    which = "private" if len(found.private) == 1 else f"{most} private"
    word = "" if found.main.name == "accuracy" else f"{found.word} "
    reached = f"{word}{_with_interval(found, best, found.main.name)}"
    paid = f"ε = {at_most(best.mean(epsilon))}{best.per_unit}, δ = {delta:g}{_seeds(best)}"
    return (
        f"The {which} setting, {best.name}, reaches {reached} on test data{_against_baseline(found, best)}, at {paid}."
    )


def _shown(setting: Setting, name: str) -> str:
    return metric(name).format.one(setting.mean(metric(name).value))


def _with_interval(found: Findings, setting: Setting, name: str) -> str:
    """Return a metric of a setting that results have chosen, with its interval."""
    of, text = metric(name), _shown(setting, name)
    interval = found.interval_of_chosen(setting, name)
    if interval is None:
        return text
    over = " over test examples alone" if interval.is_of_one_seed else ""
    words = by_selection(of, setting.mean(of.value), interval)
    without = f"{words}; " if words else ""
    if says_nothing(interval, of.format):
        return f"{text} ({without}{between(interval, of.format)} anything else)"
    return f"{text} ({without}95% interval{over} {between(interval, of.format)})"


def _against_baseline(found: Findings, best: Setting) -> str:
    change, shown = best.mean(metric(f"{found.main.name}_change").value), found.main.format
    if found.unknown_cost:
        text = ""
    elif interval := found.change_of_chosen(best, found.main.name):
        over = "over test examples alone " if interval.is_of_one_seed else ""
        ends = f"{over}{difference_between(interval, shown)}"
        text = f", {below(interval.value, shown, 'the best non-private setting')} ({ends})"
    else:
        text = "" if change is None else f", {below(change, shown, 'the non-private baseline')}"
    constant = constant_of(best)
    always = f", where always predicting {best_constant(found.main)} reaches"
    return text if constant is None or found.main.task == "regression" else f"{text}{always} {shown.one(constant)}"


def below(change: float, shown: Format, other: str) -> str:
    """Return how far a number lies below or above another one, which ``other`` names.

    >>> from dpsweep.orchestration.comparison.formats import PERCENT
    >>> below(-0.021, PERCENT, "no privacy"), below(-0.0002, PERCENT, "no privacy")
    ('2.1 points below no privacy', 'as shown no different from no privacy')
    """
    if not is_shown(change, shown):
        return f"as shown no different from {other}"
    return f"{amount(change, shown)} {'below' if change < 0 else 'above'} {other}"


def _seeds(setting: Setting) -> str:
    """Return the text that follows the epsilon of one seed: the composed epsilon of all seeds; "" if there is one
    seed.
    """
    found = setting.composition
    if len(setting.trials) < 2 or found is None or found.epsilon is None:
        return ""
    return f" for each of {len(setting.trials)} seeds, ε = {at_most(found.epsilon)} for all of them together"


def _fairest(found: Findings, fairest: Setting, best: Setting) -> str:
    worst, by = found.worst_group, found.worst_word
    low, high = ("lowest", "highest") if worst.better == "higher" else ("highest", "lowest")
    groups = " or ".join(sorted(whose(worst, fairest)))
    whom = f"group {groups} gets {_with_interval(found, fairest, worst.name)}"
    if len(found.private) == 1:
        return f"Of all groups, {whom}, the {low} {by}."
    if fairest is best:
        return f"It also has the {high} {by} of a worst-served group: {whom}."
    other = _with_interval(found, best, worst.name)
    total = _with_interval(found, fairest, found.main.name)
    return (
        f"The {high} {by} of a worst-served group is that of {fairest.name}: {whom}, against {other} under "
        f"{best.name}; its {found.word} is {total} overall."
    )


def _distinguished(found: Findings, best: Setting, name: str, where: str) -> list[str]:
    """Sentences on which other methods are not distinguishable from ``best``, and which ones it beats."""
    others = found.rivals(best)
    differences = [found.difference(best, other, name) for other in others]
    alike = [each.other for each in differences if each.verdict == "not distinguishable"]
    beaten = [each for each in differences if each.verdict == "better"]
    sentences = []
    if alike:
        cheapest = _cheapest([best, *(other for other in others if other.name in alike)])
        named = alike
        if len(alike) > _NAMED + 1:
            near = sorted(
                (abs(each.interval.value), each.other) for each in differences if each.other in alike and each.interval
            )
            named = [*(name for _, name in near[:_NAMED]), f"{len(alike) - _NAMED} other settings"]
        sentences.append(f"{listed([best.name, *named])} cannot be told apart {where}{cheapest}.")
    if beaten:
        who = (
            f"Both {best.name} and {alike[0]} beat"
            if len(alike) == 1 and _beats_too(found, alike[0], beaten, name)
            else f"{best.name} beats"
        )
        each = first_few([f"{one.other} by {_range([one])}" for one in beaten])
        sentences.append(f"{who} {each}{' points' * (metric(name).format in SHARES)} {where}.")
    return [*sentences, *_unordered(found, best, differences, where)]


def _unordered(found: Findings, best: Setting, differences: Sequence[Difference], where: str) -> list[str]:
    """Sentences on methods that cannot be compared with ``best``; sentences on the whole sweep are elsewhere."""
    single = [each.other for each in differences if each.verdict == "unknown (one seed)"]
    apart = [each.other for each in differences if each.verdict == "unknown"]
    said = []
    if single and not unknown_of_one_seed(found.settings):
        said += [f"Whether {best.name} is better than {first_few(single)} {where} is unknown (one common seed)."]
    if apart and found.interval(best, found.main.name):
        said += [
            f"{best.name} cannot be compared with {first_few(apart)} {where}: no test examples are common to both, or "
            "a run has no finite score."
        ]
    return said


_NAMED = 3
"""Number of indistinguishable settings that a sentence names, the nearest first."""


def _cheapest(settings: Sequence[Setting]) -> str:
    """Return which of the settings have the least worst-case epsilon (two significant digits); "" where all cost the
    same, or have several adjacencies.
    """
    costs = {setting.name: cost.mean for setting in settings if (cost := setting.over_seeds(epsilon))}
    rounded = {name: float(f"{cost:.2g}") for name, cost in costs.items()}
    if len(set(rounded.values())) < 2 or len({setting.neighbours for setting in settings}) > 1:
        return ""
    least = [name for name, cost in rounded.items() if cost == min(rounded.values())]
    verb = "cost" if len(least) > 1 else "costs"
    return f"; of these, {first_few(least)} {verb} least, ε = {at_most(max(costs[name] for name in least))}"


def _beats_too(found: Findings, name: str, beaten: Iterable[Difference], by: str) -> bool:
    settings = {setting.name: setting for setting in found.useful}
    return all(found.difference(settings[name], settings[each.other], by).verdict == "better" for each in beaten)


def _range(differences: Sequence[Difference]) -> str:
    """Smallest and largest end of the intervals of the differences, without sign; percentage points for shares."""
    ends = [abs(end) for each in differences if each.interval for end in (each.interval.low, each.interval.high)]
    if metric(differences[0].metric).format in SHARES:
        return f"{100 * min(ends):.1f} to {100 * max(ends):.1f}"
    return f"{number(min(ends))} to {number(max(ends))}"


def _could_show(found: Findings) -> list[str]:
    """Return a sentence on the smallest differences that the sweep could have shown; none where nothing is compared."""
    known = [(name, size) for name in found.headline if (size := found.detectable(name)) is not None]
    if not known:
        return []
    sizes, hidden = [], []
    for name, size in known:
        where = found.word if name == found.main.name else f"the {found.worst_word} of the worst group"
        found_in_most = reliable(size, metric(name).format)
        if found_in_most:
            sizes.append(f"{found_in_most} in {where}")
        else:
            hidden.append(where)
    counts = {len(setting.trials) for pair in found.pairs for setting in pair}
    runs = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    said = []
    if sizes:
        said += [
            f"With {runs} runs of each setting, differences of {listed(sizes)} are found in 4 of 5 sweeps; smaller "
            "ones often stay hidden."
        ]
    if hidden:
        said += [f"With {runs} runs of each setting, no difference in {listed(hidden)} can be found reliably."]
    return said


def reliable(size: float, shown: Format) -> str:
    """Return the smallest difference that is found in four of five sweeps; "" for shares of which none is."""
    if shown in SHARES:
        return "" if size >= 1.0 else amount(size, shown)
    return number(size)


def _looks(found: Findings) -> list[str]:
    """Return a sentence on seeds that were added by results; none if that was not asked."""
    if not found.looks:
        return []
    return [
        f"Seeds were added until settings are told apart, and verdicts were read {_times(found.looks)}: all hold "
        f"together with {100 * found.level:.2f}%, so that any at any time is wrong in at most 5 of 100 sweeps."
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _caveats(found: Findings, best: Setting) -> list[str]:
    interval = found.interval(best, found.main.name)
    if interval is None:
        if len(found.private) < 2:
            return []
        return [
            "Whether differences exceed chance cannot be told: what the models predict of single test examples is not "
            "stored beside this sweep."
        ]
    if interval.is_of_one_seed:
        return [
            "Each setting has one seed: intervals are of the choice of test examples alone, not of the seed.",
            *unknown_of_one_seed(found.settings),
        ]
    return []
