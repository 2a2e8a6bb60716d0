"""The HTML report of a sweep: one self-contained page from a `PublishedSweep`. Pure.

The page needs neither network nor server: it contains plotly.js and the figures as JSON. Names and messages of users
are escaped. Tables repeat the numbers of the figures, so the page can be printed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from dpsweep.orchestration.comparison.across_sweeps import (
    Comparison,
    between_heads,
    headings,
    heads,
    row_cells,
    shown_metrics,
)
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE, Evidence
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.comparison.formats import KINDS, at_most, first_few, sentence_start, without_unit
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.metrics import METRICS
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS, group_metric, spoken
from dpsweep.orchestration.comparison.sanity import with_known_changes
from dpsweep.orchestration.comparison.settings import Setting, group_names, group_value
from dpsweep.orchestration.comparison.values import Value
from dpsweep.orchestration.report.catalogue import (
    FIGURES,
    DrawnFigure,
    Section,
    drawn_figures,
    titled,
    why_examples_are_missing,
)
from dpsweep.orchestration.report.figures import drawable, meta_of
from dpsweep.orchestration.report.first_screen import Tile, decision, tiles
from dpsweep.orchestration.report.html import boxed, html_table, key, missing_panel, panel, section, sentence
from dpsweep.orchestration.report.plot import Style, compressed, packed_plotly, script_safe, style_of
from dpsweep.orchestration.report.prose import SENSITIVE, cautions, composed_cost, meanings, sentences
from dpsweep.orchestration.report.tables import (
    accounts_section,
    attacks_section,
    audits_section,
    by_group_table,
    classes_table,
    comparison_table,
    estimates_table,
    exposures_section,
    fairness_table,
    group_sizes_table,
    losses_table,
    memberships_section,
    parts_table,
    settings_table,
    training_scores_section,
    trials_table,
)
from dpsweep.orchestration.store.published import PublishedSweep, TrialState
from dpsweep.orchestration.store.release_modes import release_mode

_EPSILON_I: Final = re.compile(r'="[^"]*"|εᵢ')
"""The letters of an individual epsilon, or an attribute, in which they stay letters."""
_LARGE: Final = 500_000
"""Characters of data above which they are compressed, so that a page of many trials stays small."""


def _lowered(found: re.Match[str]) -> str:
    return "ε<sub>i</sub>" if found[0] == "εᵢ" else found[0]


def render(data: PublishedSweep, evidence: Evidence = NO_EVIDENCE) -> str:
    """Return the page as one HTML document without references to other files. evidence: gives intervals."""
    found = findings(data, evidence)
    data = with_known_changes(data, found.unknown_cost)
    settings = found.settings
    style = style_of(settings)
    drawn = drawn_figures(data, found.useless)
    panels = _panels(data, found, drawn)
    answers = tiles(data, found, style)
    sections = (
        _opening(data, found, answers),
        _in_words(data, found),
        _results(found, style, panels, {each.name for each in drawn}),
        _groups(found, style, panels, {each.name for each in drawn}),
        _individuals(data, settings, style, panels),
        attacks_section(settings, style),
        training_scores_section(settings, style, data.task),
        memberships_section(data.trials),
        exposures_section(data.trials),
        audits_section(data.trials),
        _over_time(settings, style, panels),
        section("All trials", trials_table(data.trials, found.worst_group.name)),
        accounts_section(data.trials),
        _meanings(data),
    )
    body, rows = _without_rows(_EPSILON_I.sub(_lowered, "\n".join(filter(None, sections))))
    template = Template(files("dpsweep.orchestration.report").joinpath("template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{data.name} – dpsweep report"),
        body=body,
        rows=_embedded("rows", rows),
        plotly=packed_plotly(),
        settings=_embedded("settings", explorer_data(found, style)),
        figures=_embedded(
            "figures",
            {each.name: each.figure.plain() for each in drawn}
            | {answer.name: answer.picture.plain() for answer in answers if answer.picture},
        ),
    )


def renewed(page: str, period: float) -> str:
    """Return the page of a running sweep: it says that the sweep runs, and a browser reloads it every ``period``
    seconds.
    """
    again = f'<meta http-equiv="refresh" content="{math.ceil(period)}">'
    said = boxed("The sweep is running. This page shows the trials that are over, and renews itself.")
    return page.replace("<head>", f"<head>\n{again}", 1).replace("</header>", f"{said}</header>", 1)


def _without_rows(body: str) -> tuple[str, list[str]]:
    """Cut the rows of long tables out of a large page; return the body and the rows that its script inserts again."""
    rows: list[str] = []

    def cut(found: re.Match[str]) -> str:
        if len(found[1]) < _LARGE // 10:
            return found[0]
        rows.append(found[1])
        return f'<tbody data-rows="{len(rows) - 1}"></tbody>'

    return (re.sub("(?s)<tbody>(.*?)</tbody>", cut, body) if len(body) > _LARGE else body), rows


def _embedded(name: str, value: Any) -> str:
    """Return data for the page's script as JSON, compressed if they are large, as for a thousand trials."""
    text = script_safe(value)
    if len(text) > _LARGE:
        return compressed(name, text)
    return f'<script id="{name}" type="application/json">{text}</script>'


def _panels(data: PublishedSweep, found: Findings, drawn: Sequence[DrawnFigure]) -> dict[Section, str]:
    """Return the HTML of each section's figures, with the reasons why others are missing."""
    panels: dict[Section, str] = {}
    for kind in FIGURES:
        own = [each for each in drawn if each.kind is kind]
        html = "".join(panel(each.name, each.title, each.figure.height) for each in own)
        panels[kind.section] = panels.get(kind.section, "") + (
            html or missing_panel(titled(kind, data.task), kind.missing(data, found))
        )
    return panels


def _opening(data: PublishedSweep, found: Findings, answers: Sequence[Tile]) -> str:
    """Return the first screen: what to decide, the three answers, and below them what to know before quoting a
    number.
    """
    done = sum(trial.state is TrialState.FINISHED for trial in data.trials)
    byline = [f"{done} of {len(data.trials)} trials finished", f"δ = {data.delta:g}", _date(data.created)]
    decided = decision(found, data.delta) if data.trials else ["This sweep has no trials."]
    warning = boxed(SENSITIVE, "withheld sensitive") if release_mode(data.disclosure).is_sensitive else ""
    return (
        f'<header><p class="eyebrow">{" · ".join(escape(part) for part in byline if part)}</p>'
        f"<h1>{escape(data.name)}</h1>{warning}"
        f'<p class="lead">{sentence(" ".join(decided))}</p>'
        f'<div class="tiles">{"".join(map(_tile, answers))}</div>{_cautions(data, found)}</header>'
    )


def _tile(answer: Tile) -> str:
    words = "".join(f"<li>{sentence(said)}</li>" for said in answer.words)
    drawn = panel(answer.name, answer.title, answer.picture.height) if answer.picture else ""
    return (
        f'<section class="tile"><h2>{escape(answer.question)}</h2><p class="big">{sentence(answer.big)}</p>'
        f"<ul>{words}</ul>{drawn}</section>"
    )


def _cautions(data: PublishedSweep, found: Findings) -> str:
    """Return what to know before a number is quoted; "" if there is nothing."""
    known = cautions(data, found)
    if not known:
        return ""
    items = "".join(f"<li>{sentence(sentence_start(said))}</li>" for said in known)
    return f'<div class="withheld cautions"><p>Before you quote a number</p><ul>{items}</ul></div>'


def _in_words(data: PublishedSweep, found: Findings) -> str:
    """Return every finding as a sentence, with its interval."""
    items = "".join(f"<li>{sentence(said)}</li>" for said in sentences(data, found))
    return section("The findings in words", f"<ul>{items}</ul>") if items else ""


def _date(created: str) -> str:
    """Return an ISO 8601 date as ``YYYY-MM-DD hh:mm UTC``; any other text unchanged."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[:.\d]*(\+00:00|Z)$", r"\1 \2 UTC", created)


def _results(found: Findings, style: Style, panels: Mapping[Section, str], drawn: Collection[str]) -> str:
    settings = found.settings
    if not settings:
        return ""
    caption = (
        "Each marker is a setting, averaged over its seeds (faint dots); whiskers span the seeds. Grey is without "
        "privacy."
    )
    if any(not setting.is_baseline for setting in settings):
        caption += " A dark ring marks the Pareto front of the private settings."
    if any(style.places.values()):
        caption += " Shades and open markers tell settings of one method apart: point at one for its name."
    if "group-size" in drawn:
        caption += (
            " Of any k records together, ε is the solid line; dotted is what the generic conversion from one record "
            "(Vadhan 2017) would claim; dashed is k times the ε of one record: a lower bound where nothing is "
            "sampled, else only a reference, because members of a group are rarely in the same batch."
        )
    if hidden := [each.name for each in settings if each not in drawable(settings)]:
        caption += f" Not drawn, as {found.word} of a run is below −1: {escape(first_few(hidden))}."
    elif "privacy-utility" not in drawn and any(not setting.is_baseline for setting in settings):
        caption += " All private settings cost the same worst-case ε, so privacy needs no axis."
    return section(
        "Privacy, utility, fairness",
        key(settings, style),
        _figures(panels["results"], caption),
        explorer(found),
        settings_table(found, style),
        comparison_table(found, style),
        _tuning(panels, drawn),
        group_sizes_table(settings, style),
    )


def _tuning(panels: Mapping[Section, str], drawn: Collection[str]) -> str:
    """Return the subsection of curves over hyperparameters; "" if the sweep neither varies nor tunes any."""
    if not panels["tuning"]:
        return ""
    captions = {
        "tuning: ": "Lines join the settings of one method, model and ε; whiskers span the seeds.",
        "tried: ": "As tuned: each dot is a candidate, its line joins the best at each value, and the large marker is "
        "what the setting was then trained with; one at an end of its line asks for a wider range.",
    }
    shown = (caption for kind, caption in captions.items() if any(name.startswith(kind) for name in drawn))
    caption = " ".join([*shown, "Methods compare at their best values."])
    return f"<h3>Method or tuning?</h3>{_figures(panels['tuning'], caption, 'panels wide')}"


def _figures(html: str, caption: str, look: str = "panels") -> str:
    return f'<figure><div class="{look}">{html}</div><figcaption>{caption}</figcaption></figure>'


def _groups(found: Findings, style: Style, panels: Mapping[Section, str], drawn: Collection[str]) -> str:
    settings = found.settings
    if "group-accuracy" not in drawn:
        return ""
    whiskers = "Markers are means over seeds; whiskers span them, and for εᵢ at least a standard error."
    return section(
        "Who is served, who pays",
        "<p>Groups from worst to best served. The same settings side by side: how well each group is served, what "
        f"privacy cost it in {spoken(group_metric(found.main.name))}, and what its training examples paid in "
        "privacy.</p>",
        key(settings, style),
        _figures(panels["groups"], f"{whiskers} {_release_words(settings)}"),
        panels["who pays"],
        fairness_table(found, style),
        by_group_table(found, style),
        classes_table(settings, style),
        parts_table(settings, style),
    )


def _individuals(data: PublishedSweep, settings: Sequence[Setting], style: Style, panels: Mapping[Section, str]) -> str:
    if not any(not setting.is_baseline for setting in settings):
        return ""
    if not panels["single examples"]:
        return section("What single examples paid", boxed(why_examples_are_missing(data)))
    return section(
        "What single examples paid",
        "<p>Histograms of εᵢ over all training examples, one line per setting. The vertical line is the worst-case ε, "
        "which is claimed for everybody. Where exact statistics are shown, εᵢ against the loss of the example, and as "
        "estimated against exact: the darker a cell, the more examples of the first seed are in it.</p>",
        key([setting for setting in settings if not setting.is_baseline], style),
        _figures(panels["single examples"], _release_words(settings)),
        losses_table(settings, style),
        estimates_table(settings, style),
    )


def _release_words(settings: Sequence[Setting]) -> str:
    """Return whether the shown statistics of εᵢ are exact or released with DP, and whether the εᵢ are guarantees."""
    shown = [(setting.method[0], trial.individuals) for setting in settings for trial in setting.trials]
    found = [individuals for _, individuals in shown if individuals]
    if not found:
        return ""
    of_kinds: dict[str, set[str]] = {}
    for clipping, individuals in shown:
        if individuals:
            of_kinds.setdefault(KINDS[individuals.kind], set()).add(clipping)
    kinds = " and ".join(
        f"{kind} ({', '.join(sorted(each))})" if len(of_kinds) > 1 else kind for kind, each in sorted(of_kinds.items())
    )
    costs = sorted({individuals.release_epsilon for individuals in found if individuals.release_epsilon is not None})
    cost = f" at ε = {', '.join(at_most(cost) for cost in costs)}, inside each trial's total" if costs else ""
    modes = [release_mode(name) for name in sorted({individuals.disclosure for individuals in found})]
    ways = " and ".join(mode.origin + (cost if mode.statistics == "released" else "") for mode in modes)
    return f"Statistics of εᵢ are {ways}; the εᵢ themselves are {kinds}."


def _over_time(settings: Sequence[Setting], style: Style, panels: Mapping[Section, str]) -> str:
    if not panels["over time"]:
        return ""
    return section(
        "Over the epochs",
        key(settings, style),
        _figures(
            panels["over time"],
            "First seed of each setting. Bounds are shown where they are public: configured, or derived from noisy "
            "counts. Methods that clip groups apart have a line per group; individual thresholds are private. "
            "Accountants are compared on the first setting of each schedule.",
            "panels wide",
        ),
    )


def _meanings(data: PublishedSweep) -> str:
    facts = _terms(data.provenance.items())
    provenance = f"<h3>Where the numbers come from</h3><dl>{facts}</dl>" if facts else ""
    return section("What the numbers mean", f'<dl class="prose">{_terms(meanings(data))}</dl>', provenance)


def _terms(meanings: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in meanings)


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body{{font:16px/1.5 sans-serif;margin:3rem auto;max-width:90rem;padding:0 1rem;color:#1d1f23}}
table{{border-collapse:collapse;font-size:.875rem;margin-bottom:1.5rem}}
th,td{{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top;border-bottom:1px solid #dcdcd6}}
.n{{text-align:right;font-variant-numeric:tabular-nums}}
.scroll{{overflow-x:auto}}.sensitive{{border-left:4px solid #D55E00;padding-left:1rem}}dt{{font-weight:600}}</style>
</head><body><h1>{title}</h1>{body}</body></html>
"""


def comparison_page(found: Comparison) -> str:
    """Return the comparison as one HTML document without references to other files."""
    rows = [
        (
            escape(setting.short_name),
            f"{escape(found.sweeps[line.folder])}<br><small>{escape(line.folder)}</small>",
            *map(escape, row_cells(line, found)),
        )
        for setting in found.settings
        for line in setting.lines
    ]
    columns = heads(found)
    defined = {heading: each.meaning for heading, each in zip(headings(found), shown_metrics(found), strict=True)}
    body = (
        *([boxed(SENSITIVE, "sensitive")] if found.is_sensitive else []),
        *(boxed(sentence, "sensitive") for sentence in found.differences),
        *([_between(found)] if found.between else []),
        html_table(columns[:2], columns[2:], rows, meanings=defined),
        *(f"<p>{escape(sentence)}</p>" for sentence in composed_cost(found.trials)),
        f"<h2>What the numbers mean</h2><dl>{_terms(defined.items())}</dl>",
    )
    title = escape(f"Comparison of {', '.join(dict.fromkeys(found.sweeps.values()))}")
    return _PAGE.format(title=title, body="".join(body))


def _between(found: Comparison) -> str:
    """Return the table of parameters in which whole sweeps differ."""
    return html_table(between_heads(found), (), [[*map(escape, each.cells())] for each in found.between])


def explorer_data(found: Findings, style: Style) -> dict[str, Any]:
    """Return every setting with mean, low end and high end of every metric, overall and by group.

    The ends come from the 95% interval, or from the range over seeds if no interval is known.
    """
    names, shown = group_names(*found.settings), _shown(found)
    return {
        "metrics": {
            metric.name: {"title": without_unit(metric.heading), "share": metric.format.is_share} for metric in shown
        },
        "settings": [
            {
                "name": setting.name,
                "colour": style.colour(setting),
                "symbol": style.symbol(setting),
                "meta": meta_of(setting),
                "values": {each.name: _ends(found, setting, each.value, each.name, "") for each in shown},
                "groups": {
                    name: {
                        each.name: _ends(found, setting, group_value(name, each.value), each.name, name)
                        for each in GROUP_METRICS
                        if each.task in (None, found.task)
                    }
                    for name in names
                },
            }
            for setting in drawable(found.settings)
        ],
    }


def _shown(found: Findings) -> list[Metric]:
    """Return the metrics that at least two settings have; of one group, no extreme over groups."""
    of_groups = METRICS if found.has_groups else [each for each in METRICS if each.extreme is None]
    return [each for each in of_groups if sum(bool(setting.over_seeds(each.value)) for setting in found.settings) > 1]


def _ends(found: Findings, setting: Setting, value: Value, name: str, group: str) -> list[float] | None:
    mean = setting.over_seeds(value)
    if mean is None:
        return None
    interval = found.evidence.interval(setting, name, group)
    low, high = (interval.low, interval.high) if interval else (mean.low, mean.high)
    return [float(f"{number:.6g}") for number in (mean.mean, low, high)]


def explorer(found: Findings) -> str:
    """Return the controls, and the element that the page's script draws into; "" for fewer than two settings."""
    shown = _shown(found)
    if len(found.settings) < 2 or not shown:
        return ""
    names = group_names(*found.settings)
    axes = [(each.name, without_unit(each.heading)) for each in shown]
    controls = (
        _select("explore-x", "Across", axes, found.main.name),
        _select("explore-y", "Up", axes, found.worst_group.name if found.has_groups else "epsilon"),
        _select("explore-group", "Group", [("", "all test examples"), *((name, name) for name in names)], ""),
    )
    return (
        f'<h3>Any two numbers</h3><div class="controls">{"".join(controls)}</div>'
        '<div id="explore" class="chart" role="img" aria-label="Two chosen metrics of every setting: a chart" '
        'style="height:430px"></div><p><small>Means over seeds, with 95% intervals, or the range over seeds where none '
        "is known. A group replaces those numbers that are known of groups.</small></p>"
    )


def _select(name: str, label: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    def option(value: str, text: str) -> str:
        mark = " selected" if value == chosen else ""
        return f'<option value="{escape(value)}"{mark}>{escape(text)}</option>'

    inner = "".join(option(*each) for each in options)
    return f'<label>{escape(label)} <select id="{name}">{inner}</select></label>'
