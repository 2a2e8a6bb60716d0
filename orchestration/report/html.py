"""HTML elements of the report. Arguments called ``html`` are inserted unescaped; all other text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from dpsweep.orchestration.comparison.metrics import meanings_of
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.report.figures import meta_of
from dpsweep.orchestration.report.plot import INK, Style

_SHAPES = {
    "circle": '<circle cx="6" cy="6" r="4.6"/>',
    "circle-open": '<circle cx="6" cy="6" r="4" fill="none" stroke-width="2"/>',
    "diamond": '<path d="M6 .4 11.6 6 6 11.6.4 6Z"/>',
    "square": '<path d="M1.5 1.5h9v9h-9Z"/>',
    "triangle-up": '<path d="M6 1 11.4 10.5H.6Z"/>',
    "triangle-down": '<path d="M6 11 11.4 1.5H.6Z"/>',
    "cross": '<path d="M4 .8h4V4h3.2v4H8v3.2H4V8H.8V4H4Z"/>',
    "x": '<path d="M6 4 9 1l2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3-3-3 2-2Z"/>',
    "star": '<path d="M6 .4 7.6 4.3l4.1.3-3.2 2.7 1 4.1L6 9.2l-3.5 2.2 1-4.1L.3 4.6l4.1-.3Z"/>',
    "hexagon": '<path d="M6 .6 10.7 3.3v5.4L6 11.4 1.3 8.7V3.3Z"/>',
    "pentagon": '<path d="M6 .6 11.4 4.6 9.3 11H2.7L.6 4.6Z"/>',
}
_DASHES = {"solid": "", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2", "longdash": "9 3", "longdashdot": "9 2 2 2"}


def sentence(text: str) -> str:
    """Return the text as HTML in which no line ends inside an interval, or between ε or δ and its number."""
    kept = r"[εδ] (=|≤|≥|&lt;|&gt;) (?=\S)|\[[^\]]{1,24}\]"
    return re.sub(kept, lambda found: found[0].replace(" ", "\u00a0"), escape(text))


def section(title: str, *html: str) -> str:
    """Return a section of the page under its heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(html)}</section>"


def boxed(text: str, look: str = "withheld") -> str:
    """Return a paragraph in a box; ``look`` is its CSS class."""
    return f'<div class="{look}"><p>{escape(text)}</p></div>'


def panel(name: str, title: str, height: int) -> str:
    """Return the element that the page's script draws the figure called ``name`` into; height in pixels."""
    return (
        f'<div>{_plot_title(title)}<div class="plot" role="img" aria-label="{escape(title)}: a chart" '
        f'data-figure="{escape(name)}" style="height:{height}px"></div></div>'
    )


def missing_panel(title: str, reason: str) -> str:
    """Return the title of a missing figure with the reason; "" without a reason."""
    return f"<div>{_plot_title(title)}{boxed(reason)}</div>" if reason else ""


def _plot_title(title: str) -> str:
    return f'<p class="plot-title">{escape(title)}</p>' if title else ""


_OF_EVERY_TASK: Final = meanings_of(None)


def html_table(
    words: Iterable[str],
    numbers: Iterable[str],
    html: Iterable[Sequence[str]],
    *,
    remarks: Iterable[str] = (),
    looks: Sequence[str] = (),
    marks: Sequence[Mapping[str, str]] = (),
    meanings: Mapping[str, str] = _OF_EVERY_TASK,
) -> str:
    """Return a table with the cells ``html``, row by row.

    `words`, `numbers`, `remarks`: headings of columns of text, of numbers, and of text again. `looks`: CSS class of
    each row. `marks`: data attributes of each row, by which buttons of the page show and hide it. `meanings`:
    definitions of headings, shown as tooltips (`meanings_of`).
    """
    columns = [(text, look) for look, texts in (("", words), ("n", numbers), ("", remarks)) for text in texts]
    head = "".join(
        f'<th scope="col" class="{look}"{_tooltip(meanings.get(text, ""))}>{escape(text)}</th>'
        for text, look in columns
    )
    body = []
    for place, row in enumerate(html):
        cells = "".join(f'<td class="{look}">{cell}</td>' for cell, (_, look) in zip(row, columns, strict=False))
        data = "".join(f' data-{name}="{escape(value)}"' for name, value in (marks[place] if marks else {}).items())
        body.append(f'<tr class="{looks[place] if looks else ""}"{data}>{cells}</tr>')
    rows_shown = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{rows_shown}</table></div>'


def _tooltip(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def marked_name(setting: Setting, style: Style) -> str:
    """Return the setting's marker and name."""
    return f'<span class="name">{_marker(style.colour(setting), style.symbol(setting))}{escape(setting.name)}</span>'


def key(settings: Iterable[Setting], style: Style) -> str:
    """Return the legend of colours, symbols and dashes; its buttons show and hide settings in the figures."""
    drawn = list(settings)
    clippings = {each.clipping: style.symbol(each) if each.is_baseline else "circle" for each in drawn}
    schedules = dict.fromkeys(setting.schedule for setting in drawn if setting.schedule)
    colours = [
        _button("clipping", name, _marker(style.colours[name], symbol), name or "all")
        for name, symbol in clippings.items()
    ]
    symbols = [_button("schedule", name, _line(*style.looks[name]), name) for name in schedules]
    levels = dict.fromkeys(level for setting in drawn if (level := meta_of(setting)["epsilon"]))
    costs = [_button("epsilon", level, "", f"ε {level}") for level in levels] if len(levels) > 1 else []
    groups = '<span class="divider"></span>'.join("".join(each) for each in (colours, symbols, costs) if each)
    return f'<div class="key" role="group" aria-label="Key">{groups}</div>'


def _button(kind: str, value: str, picture: str, text: str) -> str:
    return (
        f'<button type="button" aria-pressed="true" data-kind="{kind}" data-value="{escape(value)}" '
        f'title="show or hide">{picture}{escape(text)}</button>'
    )


def _marker(colour: str, symbol: str) -> str:
    shape = _SHAPES.get(symbol) or _SHAPES.get(symbol.removesuffix("-open"), _SHAPES["circle"])
    is_hollow = symbol not in _SHAPES and symbol.endswith("-open")
    return _swatch(12, colour, f'<g fill="none" stroke-width="1.6">{shape}</g>' if is_hollow else shape)


def _line(symbol: str, dash: str) -> str:
    stroke = f'<path d="M16 6H40" stroke-width="2" stroke-dasharray="{_DASHES[dash]}"/>'
    return _swatch(40, INK, _SHAPES.get(symbol, _SHAPES["circle"]) + stroke)


def _swatch(width: int, colour: str, shapes: str) -> str:
    """Return an inline SVG, hidden from screen readers because the text beside it says the same."""
    return (
        f'<svg class="swatch" aria-hidden="true" width="{width}" height="12" fill="{colour}" stroke="{colour}" '
        f'stroke-width="0">{shapes}</svg>'
    )
