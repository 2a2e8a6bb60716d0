"""The first screen of the report: the decision, then three answers as tiles with a number, an interval and a picture.

The three questions are those that people bring: how private is it, for whom, and at what cost. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dpsweep.accounting.errors import count_of
from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.orchestration.comparison.best import more_private, said_of, unsure
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.formats import (
    Format,
    amount,
    at_most,
    first_few,
    in_one_word,
    is_shown,
    listed,
    number,
    per_unit,
    sentence_start,
)
from dpsweep.orchestration.comparison.intervals import ConfidenceInterval
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.rate_metrics import group_metric
from dpsweep.orchestration.comparison.sanity import best_constant, constant_of
from dpsweep.orchestration.comparison.settings import (
    Setting,
    called,
    class_names,
    group_names,
    group_value,
    levels,
    served_worst,
    whose,
)
from dpsweep.orchestration.comparison.values import median_epsilon
from dpsweep.orchestration.comparison.wording import NEIGHBOURS, between, by_selection, of_runs, unknown_of_one_seed
from dpsweep.orchestration.report.figures import add_trace, blank, look_of, whiskers, without_markup
from dpsweep.orchestration.report.plot import INK, MUTED, PAPER, Plot, Style
from dpsweep.orchestration.store.published import NON_PRIVATE, PublishedPrivacy, PublishedSweep
from dpsweep.workers.dataset_description import NO_GROUPS

_MOST_ROWS: Final = 7
"""Most rows of a picture; more would not fit on the first screen."""
_ROW_HEIGHT: Final = 34
_FAR: Final = 0.3
"""A constant prediction that is worse by more is not drawn: differences between methods could not be seen beside it."""
_MEDIAN: Final = "the median example, one model"
_GAPS: Final = (
    ("accuracy_gap", "accuracy"),
    ("demographic_parity_difference", "selection_rate"),
    ("false_positive_rate_difference", "false_positive_rate"),
    ("equal_opportunity_difference", "false_negative_rate"),
)
"""Gaps between groups of the first screen, by metric, and the rate of a group behind each."""


@dataclass(frozen=True)
class Tile:
    """One answer. name: of its picture. big: the number. words: sentences below it, the picture's title last."""

    name: str
    question: str
    big: str
    words: tuple[str, ...]
    picture: Plot | None = None
    title: str = ""


def tiles(data: PublishedSweep, found: Findings, style: Style) -> tuple[Tile, ...]:
    """Return the three answers for the setting to take; none as long as no private trial has finished."""
    if not found.private:
        return ()
    best = found.best(found.main.name)
    shown = best or _nearest_to_use(found)
    groups = _for_nobody(found, shown) if best is None else _for_whom(found, best)
    picture = _by_group(found, shown, style)
    return (
        _how_private(data, shown),
        replace(groups, picture=picture, title=_groups_title(found)),
        _at_what_cost(found, best, style),
    )


def decision(found: Findings, delta: float) -> list[str]:
    """Return the sentences to act on: which setting to take, how good it is, what privacy costs, who is served worst.

    They recommend nothing where no private setting has learnt anything, or the best one is not told from all others:
    of equal settings chance puts one ahead. They state no cost without a usable baseline.
    """
    best = found.best(found.main.name)
    if best is None:
        return [_nothing_to_take(found)]
    shown = found.main.format
    interval = found.interval_of_best(best, found.main.name)
    within = f" [{between(interval, shown)}{found.after_choice}]" if interval else ""
    claim = "" if not best.reasons else ", an estimate and no guarantee"
    doubts, is_alone = unsure(found, best), min(len(found.private), len(best.trials)) == 1
    is_ahead = all(found.difference(best, each, found.main.name).verdict == "better" for each in found.rivals(best))
    taken = f"Take {best.name}:" if is_ahead and not is_alone and not doubts else f"{best.name} reaches"
    sentences = [
        f"{taken} {found.word} {shown.one(best.mean(found.main.value))}"
        f"{within} at ε = {at_most(best.highest_epsilon)}{found.per_unit(best)} (δ = {delta:g}{claim}), "
        f"{_compared(found, best)}{_served_worst(found, best)}."
    ]
    sentences += [*doubts, *unknown_of_one_seed(best, found.private), *_alike(found, best)]
    return [*sentences, *_by_level(found)]


def _nothing_to_take(found: Findings) -> str:
    """Return the sentence in place of a decision where no private setting has finished, or learnt anything."""
    main = found.main
    if not found.private:
        reached = [main.format.one(each.mean(main.value)) for each in found.baselines[:1]]
        without = f"; without privacy, {found.word} is {reached[0]}" if reached else ""
        return f"No private trial has finished, so there is no trade-off to show{without}."
    if not found.useless:
        return f"No private setting has {found.word} to compare."
    if found.too_few_to_test:
        return f"Nothing trained here can be judged: {found.too_few_to_test}."
    shown = _nearest_to_use(found)
    name, why = shown.name, found.useless[shown.name]
    others = len(found.useless) - 1
    more = f", and nothing shows that {count_of(others, 'other setting')} learnt more" if others else ""
    nothing = "Nothing" if found.main.name == "accuracy" else f"By {found.word}, nothing"
    return f"{nothing} trained here with privacy is of use: {name} {why}{more}."


def _nearest_to_use(found: Findings) -> Setting:
    """Return the private setting that is shown where none has learnt anything."""
    return found.best(found.main.name, found.private) or found.private[0]


def _compared(found: Findings, best: Setting) -> str:
    """Return what privacy costs the setting, as a clause."""
    if found.unknown_cost:
        return f"what privacy costs is unknown, because {found.no_reference.because}"
    if not found.baselines:
        return "what privacy costs is unknown, because no baseline was trained"
    change, interval = _against_baseline(found, best)
    within = f"{_in_common(found, best, found.main, interval)}{_ends(interval, found.main.format)}"
    if change is None:
        return "what privacy costs is unknown"
    if not is_shown(change, found.main.format):
        return f"as shown no different from no privacy{within}"
    chance = ", which may be chance" * _may_be_chance(interval)
    return f"{amount(change, found.main.format)} {'below' if change < 0.0 else 'above'} no privacy{within}{chance}"


def _ends(interval: ConfidenceInterval | None, shown: Format, remark: str = "") -> str:
    """Return the interval of a difference in brackets after its value, with a remark; nothing without an interval."""
    return f" [{between(interval, shown.of_differences)}{remark}]" if interval else ""


def _against_baseline(
    found: Findings, setting: Setting, name: str = ""
) -> tuple[float | None, ConfidenceInterval | None]:
    """Return the difference of the setting to take to the best non-private one, by default in the main metric, with
    its interval.
    """
    of = name or found.main.name
    interval = found.change_of_chosen(setting, of)
    if interval is not None:
        return interval.value, interval
    own, other = (each.mean(metric(of).value) for each in (setting, found.baselines[0]))
    return (None if own is None or other is None else own - other), None


def _in_common(found: Findings, setting: Setting, of: Metric, interval: ConfidenceInterval | None) -> str:
    """Return in which runs a change was measured, where it is not the difference of the means over all of them.

    A setting or the baseline then lacks a seed that the other has.
    """
    own, other = (each.mean(of.value) for each in (setting, found.baselines[0]))
    shown = of.format.of_differences.one  # of numbers, is_shown takes the least rounding error for a difference
    if interval is None or own is None or other is None or shown(interval.value) == shown(own - other):
        return ""
    return f" in the {of_runs(interval)} that both have"


def _may_be_chance(interval: ConfidenceInterval | None) -> bool:
    return interval is not None and interval.low <= 0.0 <= interval.high


def _served_worst(found: Findings, best: Setting) -> str:
    worst, mean = found.worst_group, best.mean(found.worst_group.value)
    if mean is None:
        return "; no group is large enough to be shown"
    if not found.has_groups:
        return ""
    reached = f"{worst.format.one(mean)}{_around(found, best, worst)}"
    return f"; worst served: {served_worst(worst, best)} with{found.worst_word_unless_main} {reached}"


def _around(found: Findings, setting: Setting, extreme: Metric) -> str:
    """Return what stands behind an extreme over groups: its value without the bias of choosing it, and its interval,
    each in brackets where it is known.
    """
    interval = found.interval_of_chosen(setting, extreme.name)
    words = by_selection(extreme, setting.mean(extreme.value), interval)
    return (f" ({words})" if words else "") + (f" [{between(interval, extreme.format)}]" if interval else "")


def _alike(found: Findings, best: Setting) -> list[str]:
    """Return sentences on the settings that cannot be told from the best one: the cheapest, if it costs less, and the
    others, nearest first.
    """
    alike = found.alike(best, found.main.name)
    cheaper = more_private(found, best, found.main.name, alike)
    names = [each.other for each in alike if cheaper is None or each.other != cheaper.name]
    sentences = [said_of(found, cheaper, found.main.name)] if cheaper else []
    if names:
        also = " either" if cheaper else f" in {found.word}"
        sentences.append(f"{first_few(names)} cannot be told from it{also}.")
    return sentences


def _by_level(found: Findings) -> list[str]:
    """Return a sentence on the best setting at each of several epsilons of one adjacency, ascending; else nothing."""
    of, costs = found.main, levels(found.useful)
    if len(costs) < 2 or len({each.neighbours for each in found.useful}) > 1:
        return []
    best = [found.best(of.name, [each for each in found.useful if each.level == level]) for level in costs]
    reached = [f"ε = {at_most(one.highest_epsilon)}: {of.format.one(one.mean(of.value))}" for one in best if one]
    return [f"The best at {listed(reached)}."]


def _how_private(data: PublishedSweep, setting: Setting) -> Tile:
    cost = setting.highest_epsilon
    privacy = next((trial.privacy for trial in setting.trials if trial.privacy), None)
    whole, seeds = composed(data.trials), setting.composition
    rows: list[tuple[str, float]] = []
    kinds = [trial.individuals.kind for trial in setting.trials if trial.individuals]
    whom = "any record" if privacy is None or privacy.unit == EXAMPLE.name else "anybody"
    median = setting.mean(median_epsilon)
    if median is not None:
        rows.append((_MEDIAN + _unless_guaranteed(*kinds), median))
    if cost is not None:
        rows.append((f"{whom}, one model", cost))
    sizes = [size for size in (privacy.group_epsilons if privacy else {}) if size > 1]
    if sizes and privacy:
        of_groups = _unless_guaranteed(privacy.group_kinds.get(max(sizes), privacy.kind))
        cost_of_most = privacy.group_epsilons[max(sizes)]
        rows.append((f"any {max(sizes)} records together, one model{of_groups}", cost_of_most))
    if seeds and seeds.estimate and len(setting.trials) > 1:
        every = "both" if len(setting.trials) == 2 else f"all {len(setting.trials)}"
        told = f"{every} seeds of it{_unless_guaranteed(seeds.estimate.kind)}"
        rows.append((f"{whom}, {told}", seeds.estimate.epsilon))
    if whole and whole.estimate and whole.trials > len(setting.trials):
        told = f"{whole.trials} private models of this page{_unless_guaranteed(whole.estimate.kind)}"
        rows.append((f"{whom}, all {told}", whole.estimate.epsilon))
    words = []
    if privacy:
        claim = _claimed("estimate" if setting.reasons else privacy.kind)
        words.append(
            f"Worst case{per_unit(privacy.unit)} of one model at δ = {privacy.delta:g}, for "
            f"{_neighbours(privacy)}, by {privacy.accountant}: {claim}."
        )
    if whole and whole.estimate and whole.trials > 1:
        cost_of_all = f"ε = {at_most(whole.estimate.epsilon)}, {_claimed(whole.estimate.kind)}"
        words.append(f"Whoever sees this page sees all {whole.trials} private models at work: {cost_of_all}.")
    big = "unknown" if cost is None else f"ε = {at_most(cost)}"
    finite = [(name, value) for name, value in rows if value < float("inf")]
    return Tile("first-privacy", "How private?", big, tuple(words), _bars(finite), "ε by what somebody sees")


def _claimed(kind: Kind) -> str:
    return "a guarantee" if kind == "guarantee" else "an estimate, no guarantee"


def _unless_guaranteed(*kinds: Kind) -> str:
    """Return the kinds in brackets that are no guarantees; "" if there are none."""
    weaker = sorted({in_one_word(kind) for kind in kinds if kind != "guarantee"})
    return f" ({', '.join(weaker)})" if weaker else ""


def _neighbours(privacy: PublishedPrivacy) -> str:
    """Return in words which data sets cannot be told apart, and the noise strategy unless noise is independent."""
    one = "one record" if privacy.unit == EXAMPLE.name else f"the records of one {privacy.unit}"
    correlated = "" if privacy.noise_strategy == "independent" else f", noise {privacy.noise_strategy}"
    return f"{one} {NEIGHBOURS[privacy.adjacency].changed}{correlated}"


def _bars(rows: Sequence[tuple[str, float]]) -> Plot | None:
    if not rows:
        return None
    figure = _picture(len(rows))
    most = max(value for _, value in rows)
    figure.data.append(
        {
            "type": "bar",
            "orientation": "h",
            "x": [value for _, value in rows],
            "y": list(range(len(rows))),
            "width": 0.36,
            "text": [number(value) if name.startswith(_MEDIAN) else at_most(value) for name, value in rows],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": ["#9aa0a8" if name.startswith(_MEDIAN) else "#0072B2" for name, _ in rows]},
            "hovertemplate": "%{text}<extra></extra>",
        }
    )
    for row, (name, _) in enumerate(rows):
        _label(figure, row, name)
    figure.update_xaxes(range=[0.0, 1.15 * most], showgrid=False, showticklabels=False)
    return figure


def _for_nobody(found: Findings, setting: Setting) -> Tile:
    """Return the answer where nothing was learnt, or too few were tested, without its picture."""
    if found.too_few_to_test:
        return _of_groups("unknown", "Too few were held out to judge any group.")
    return _of_groups(
        "nobody", f"nothing shows that {setting.name} has learnt, so its gaps between groups say nothing."
    )


def _for_whom(found: Findings, best: Setting) -> Tile:
    """Return the answer without its picture."""
    worst, mean = found.worst_group, best.mean(found.worst_group.value)
    if mean is None:
        return _of_groups("unknown", "No group of the test data is large enough to be shown.")
    if not found.has_groups:
        return _of_groups("not compared", _only(*group_names(best)))
    big = f"{served_worst(worst, best)}: {worst.format.one(mean)}"
    return _of_groups(big, _worst_words(found, best), *_gap_words(found, best))


def _only(name: str) -> str:
    if (name,) == NO_GROUPS:
        return "The data name no groups; with data.group, those of a column are compared."
    return f"{called(name)} is the only group that is shown."


def _of_groups(big: str, *words: str) -> Tile:
    return Tile("first-groups", "For whom?", big, words)


def _groups_title(found: Findings) -> str:
    beside = " (grey: without privacy)" if found.baselines else ""
    return f"{sentence_start(found.word)} by group{_with_intervals(found)}{beside}"


def _with_intervals(found: Findings) -> str:
    known = any(found.interval(setting, found.main.name) for setting in found.settings)
    return ", with 95% intervals" if known else ""


def _worst_words(found: Findings, setting: Setting) -> str:
    worst = found.worst_group
    each = " of each run" if min(len(setting.trials), len(whose(worst, setting))) > 1 else ""
    whom = f"{sentence_start(found.worst_word)} of the worst-served group{each}"
    text = f"{whom}{_around(found, setting, worst)}"
    if found.baselines and not found.unknown_cost:
        change, against = _against_baseline(found, setting, worst.name)
        if change is not None:
            ends = f"{_in_common(found, setting, worst, against)}{_ends(against, worst.format)}"
            text += f", {_signed(change, worst.format)} against no privacy{ends}"
    return f"{text}."


def _signed(change: float, shown: Format) -> str:
    if not is_shown(change, shown):
        return amount(0.0, shown)
    return f"{shown.of_differences.one(change)}{shown.points}"


def _gap_words(found: Findings, setting: Setting) -> Iterator[str]:
    """Yield a sentence for each gap that people ask for, with the two groups between which it is the largest."""
    for name, rate in _GAPS:
        of = metric(name)
        mean = setting.over_seeds(of.value)
        between_groups = _ends_of_gap(setting, rate)
        if mean is None or between_groups is None:
            continue
        (low_group, low), (high_group, high) = between_groups
        ends = f"{called(high_group)} {100 * high:.0f}%, {called(low_group)} {100 * low:.0f}%"
        alike = f"{100 * low:.0f}% in every group"
        of_class = "" if rate == "accuracy" else f" (class {class_names(setting.trials, 2)[1]})"
        # Where the ends differ between runs, the mean of their gaps is larger than the gap between means.
        overall = " in each run; over all," if mean.mean - (high - low) > 0.005 else ","
        gap = f"gap {of.format.one(mean.mean)} points{_around(found, setting, of)}{overall}"
        yield f"{sentence_start(rate.replace('_', ' '))}{of_class}: {gap} {alike if low == high else ends}."


def _ends_of_gap(setting: Setting, rate: str) -> tuple[tuple[str, float], tuple[str, float]] | None:
    """Return the groups with the lowest and the highest rate, by the means over the seeds; None for fewer than two
    groups.
    """
    complement = rate == "false_negative_rate"
    value = group_metric("true_positive_rate" if complement else rate).value
    known = [
        (name, 1.0 - mean.mean if complement else mean.mean)
        for name in group_names(setting)
        if (mean := setting.over_seeds(group_value(name, value)))
    ]
    if len(known) < 2:
        return None
    return min(known, key=lambda pair: pair[1]), max(known, key=lambda pair: pair[1])


def _by_group(found: Findings, setting: Setting, style: Style) -> Plot | None:
    """Return a row per group: the setting with its interval, and the best baseline; of many groups the ends."""
    of = group_metric(found.main.name)
    names = [name for name in group_names(setting) if setting.over_seeds(group_value(name, of.value))]
    if not names:
        return None
    half = _MOST_ROWS // 2
    rows: list[str | None] = [*names]
    if len(names) > _MOST_ROWS:
        rows = [*names[: half + 1], None, *names[len(names) - half + 1 :]]
    figure = _picture(len(rows))
    for row, name in enumerate(rows):
        _label(figure, row, f"{count_of(len(names) - len(rows) + 1, 'group')} between" if name is None else name)
    drawn = [*found.baselines[:1], setting] if not found.unknown_cost else [setting]
    for each in drawn:
        points = []
        for row, name in enumerate(rows):
            mean = each.over_seeds(group_value(name, of.value)) if name is not None else None
            if name is not None and mean:
                interval = found.evidence.interval(each, of.name, name)
                points.append((row, name, mean.mean, interval))
        _dots(figure, each, style, points, of.format)
    figure.update_xaxes(**look_of(of.format))
    return figure


def _at_what_cost(found: Findings, best: Setting | None, style: Style) -> Tile:
    of, word = found.main, found.word
    words: list[str] = []
    if found.too_few_to_test:
        big = "unknown"
        words.append(f"{sentence_start(found.too_few_to_test)}.")
    elif best is None:
        big = "of no use"
        words.append(f"Nothing shows that a private setting is better than a constant prediction, by {word}.")
    elif found.unknown_cost:
        big = "unknown"
        words.append(sentence_start(found.unknown_cost.removeprefix("No use as a reference: ")))
    elif not found.baselines:
        big = "unknown"
        words.append("No baseline was trained: add none to the clipping methods of the sweep.")
    else:
        change, interval = _against_baseline(found, best)
        big = "unknown" if change is None else _signed(change, of.format)
        own, other = (of.format.one(each.mean(of.value)) for each in (best, found.baselines[0]))
        common, ends = _in_common(found, best, of, interval), _ends(interval, of.format, found.after_choice)
        chance = change is not None and is_shown(change, of.format) and _may_be_chance(interval)
        words.append(
            f"{sentence_start(word)} against the best training without privacy{common}{ends}: "
            f"{own} with privacy, {other} without{' over all seeds' * bool(common)}."
            f"{' The difference may be chance.' * chance}"
        )
    if best is not None:
        words += _seeds_words(found, best)
    title = f"{sentence_start(word)} of each method{_with_intervals(found)}"
    return Tile("first-cost", "At what cost?", big, tuple(words), _by_method(found, style), title)


def _seeds_words(found: Findings, best: Setting) -> list[str]:
    """Return a sentence on the smallest differences that the sweep could have shown; none where nothing is compared.

    With one seed it says that none is shown."""
    known = {name: size for name in found.headline if (size := found.detectable(name)) is not None}
    if len(best.trials) == 1:
        return ["One seed: another may turn this around."] if found.baselines else []
    if not known:
        return []
    sizes, hidden = [], []
    for name, size in known.items():
        shown = metric(name).format
        where = found.word if name == found.main.name else f"the {found.worst_word} of the worst group"
        if shown.is_share and size >= 1.0:
            hidden.append(where)
        else:
            sizes.append(f"{amount(size, shown) if shown.is_share else number(size)} in {where}")
    told = [f"differences between methods of {listed(sizes)} in 4 of 5 sweeps"] if sizes else []
    if hidden:
        told.append(f"none in {listed(hidden)} reliably" if sizes else "no difference between methods reliably")
    return [f"{sentence_start(of_runs(best))} find {', and '.join(told)}."]


def _by_method(found: Findings, style: Style) -> Plot | None:
    """Return a row per method, the best first, below the baseline; a line marks the best constant prediction."""
    of = found.main
    private = sorted(found.methods or found.private, key=lambda each: -each.rank(of.value))
    baselines = [*(found.baselines or [each for each in found.settings if each.is_baseline])][:1]
    rows = [*baselines, *private][: _MOST_ROWS + 1]
    rows = [each for each in rows if each.over_seeds(of.value)]
    if not rows:
        return None
    figure = _picture(len(rows))
    names = distinctive([each.name for each in rows])
    for row, each in enumerate(rows):
        mean = each.over_seeds(of.value)
        _label(figure, row, names[row])
        interval = found.interval(each, of.name)
        _dots(figure, each, style, [(row, each.name, mean.mean if mean else 0.0, interval)], of.format)
    left_out = len(baselines) + len(private) - len(rows)
    constant = constant_of(rows[0])
    lowest = min(trace["x"][0] - trace["error_x"]["arrayminus"][0] for trace in figure.data)
    if constant is not None and constant > lowest - _FAR:
        figure.add_vline(constant, line={"color": MUTED, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=constant,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=f"always {best_constant(of)}",
            font={"size": 11, "color": MUTED},
        )
    if left_out > 0:
        figure.add_annotation(
            x=1, xref="paper", xanchor="right", y=0, yref="paper", yanchor="top", yshift=-16,
            text=f"{left_out} more below", font={"size": 11, "color": MUTED},
        )  # fmt: skip
    figure.update_xaxes(**look_of(of.format))
    return figure


def _picture(rows: int) -> Plot:
    """Return an empty picture of ``rows`` rows, the first on top."""
    figure = blank(height=44 + _ROW_HEIGHT * rows)
    figure.update_yaxes(range=[rows - 0.5, -0.75], showgrid=False, showticklabels=False, fixedrange=True)
    return figure


_LETTERS = 46
"""Letters of a label that fit into a picture."""


def distinctive(names: Sequence[str]) -> list[str]:
    """Return the names of settings; if one is too long, without the parts common to all private settings.

    >>> distinctive(["non-private", "flat · constant · rows 1", "flat · constant · rows 2"])
    ['non-private', 'flat · constant · rows 1', 'flat · constant · rows 2']
    >>> distinctive(["non-private", *(f"flat · constant · user sampling els · most records {most}" for most in (1, 2))])
    ['non-private', 'most records 1', 'most records 2']
    >>> distinctive(["non-private · model mlp", *(f"flat (b 3.5) · exponential · level {n} · model mlp" for n in "12")])
    ['non-private · model mlp', 'level 1', 'level 2']
    """
    parts = [name.split(" · ") for name in names]
    of_methods = [set(each) for each in parts if each[0] != NON_PRIVATE]
    if not of_methods or all(len(name) <= _LETTERS for name in names):
        return list(names)
    shared = set.intersection(*of_methods)
    return [
        " · ".join(part for part in each if each[0] == NON_PRIVATE or part not in shared) or " · ".join(each)
        for each in parts
    ]


def _label(figure: Plot, row: int, text: str) -> None:
    """Write the name of a row above it, from the left edge, so that long names take no width from the picture."""
    half = _LETTERS // 2  # names differ at their ends, too
    short = text if len(text) <= _LETTERS else f"{text[: half - 1]}…{text[-half:]}"
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=row - 0.42, yanchor="middle",
        text=without_markup(short), font={"size": 11.5, "color": INK}, bgcolor=PAPER, borderpad=1,
    )  # fmt: skip


def _dots(
    figure: Plot,
    setting: Setting,
    style: Style,
    points: Sequence[tuple[int, str, float, ConfidenceInterval | None]],
    shown: Format,
) -> None:
    """Add the values of a setting, one in each row, with their intervals."""
    bars = whiskers(
        [max(interval.high - value, 0.0) if interval else 0.0 for *_, value, interval in points],
        [max(value - interval.low, 0.0) if interval else 0.0 for *_, value, interval in points],
        color=style.colour(setting),
    )
    add_trace(
        figure,
        setting,
        "%{text}",
        x=[value for _, _, value, _ in points],
        y=[row for row, *_ in points],
        error_x=bars,
        mode="markers",
        cliponaxis=False,
        marker=style.marker(setting, 9),
        text=[f"{without_markup(name)}: {shown.one(value)}" for _, name, value, _ in points],
    )
