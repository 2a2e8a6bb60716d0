"""The interactive chart of the page, whose axes and group a reader chooses: its controls and its script's data."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from dpsweep.orchestration.comparison.entries import Metric
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.formats import SHARES
from dpsweep.orchestration.comparison.metrics import METRICS
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS
from dpsweep.orchestration.comparison.settings import Setting, group_names, group_value
from dpsweep.orchestration.comparison.values import Value
from dpsweep.orchestration.report.figures import meta_of
from dpsweep.orchestration.report.style import Style


def explorer_data(found: Findings, style: Style) -> dict[str, Any]:
    """Return every setting with mean, low end and high end of every metric, overall and by group.

    The ends come from the 95% interval, or from the range over seeds if no interval is known.
    """
    names, shown = group_names([trial for setting in found.settings for trial in setting.trials]), _shown(found)
    return {
        "metrics": {
            metric.name: {"title": metric.heading.removesuffix(", points"), "share": metric.format in SHARES}
            for metric in shown
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
            for setting in found.settings
        ],
    }


def _shown(found: Findings) -> list[Metric]:
    """Metrics that at least two settings have."""
    return [each for each in METRICS if sum(bool(setting.over_seeds(each.value)) for setting in found.settings) > 1]


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
    names = group_names([trial for setting in found.settings for trial in setting.trials])
    axes = [(each.name, each.heading.removesuffix(", points")) for each in shown]
    controls = (
        _select("explore-x", "Across", axes, found.main.name),
        _select("explore-y", "Up", axes, found.worst_group.name),
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
