"""The page of `dpsweep compare --html`: one table over several sweeps, without scripts. Pure."""

from __future__ import annotations

from html import escape

from dpsweep.orchestration.comparison.across_sweeps import Comparison, between_heads, cells, heads, shown_metrics
from dpsweep.orchestration.report.html import Cell, note, table
from dpsweep.orchestration.report.prose import SENSITIVE, together

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 sans-serif;margin:3rem auto;max-width:90rem;padding:0 1rem;color:#1d1f23}}
table{{border-collapse:collapse;font-size:.875rem;margin-bottom:1.5rem}}
th,td{{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top;border-bottom:1px solid #dcdcd6}}
.n{{text-align:right;font-variant-numeric:tabular-nums}}
.scroll{{overflow-x:auto}}.sensitive{{border-left:4px solid #D55E00;padding-left:1rem}}dt{{font-weight:600}}</style>
</head><body><h1>{title}</h1>{body}</body></html>
"""


def comparison_page(found: Comparison) -> str:
    """Return the comparison as one HTML document without references to other files."""
    rows: list[list[Cell]] = []
    for setting in found.settings:
        for line in setting.lines:
            sweep = f"{escape(found.sweeps[line.folder])}<br><small>{escape(line.folder)}</small>"
            numbers = ((escape(text), "n") for text in cells(line, found))
            rows.append([(escape(setting.short_name), ""), (sweep, ""), *numbers])
    columns = heads(found)
    looks = ("", "", *("n" for _ in columns[2:]))
    words = "".join(
        f"<dt>{escape(metric.heading)}</dt><dd>{escape(metric.meaning)}</dd>" for metric in shown_metrics(found)
    )
    body = (
        *([note(SENSITIVE, "sensitive")] if found.is_sensitive else []),
        *(note(sentence, "sensitive") for sentence in found.differences),
        *([_between(found)] if found.between else []),
        table(zip(columns, looks, strict=True), rows),
        *(f"<p>{escape(sentence)}</p>" for sentence in together(found.trials)),
        f"<h2>What the numbers mean</h2><dl>{words}</dl>",
    )
    title = escape(f"Comparison of {', '.join(dict.fromkeys(found.sweeps.values()))}")
    return _PAGE.format(title=title, body="".join(body))


def _between(found: Comparison) -> str:
    """Return the table of parameters in which whole sweeps differ."""
    rows = [[(escape(text), "") for text in each.cells()] for each in found.between]
    return table([(head, "") for head in between_heads(found)], rows)
