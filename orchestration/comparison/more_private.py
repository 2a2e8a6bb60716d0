"""The setting that costs less privacy than the best one and may be as good, in the words of report and `dpsweep best`.

Pure; every result is plain text.
"""

from __future__ import annotations

from collections.abc import Collection

from dpsweep.orchestration.comparison.findings import Difference, Findings
from dpsweep.orchestration.comparison.formats import number
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.rate_metrics import group_metric, spoken, spoken_worst
from dpsweep.orchestration.comparison.settings import Setting, called, whose
from dpsweep.orchestration.comparison.values import epsilon


def more_private(found: Findings, best: Setting, name: str, undecided: Collection[Difference]) -> Setting | None:
    """Return the cheapest method that is not distinguishable from ``best`` in a metric, if it costs less; else None.

    undecided: differences of ``best`` to others in that metric. Of equally cheap methods the best one is returned.
    """
    alike = {each.other for each in undecided if each.verdict == "not distinguishable"}
    cheaper = [each for each in found.methods if each.name in alike and _cost(each) < _cost(best)]
    least = min(map(_cost, cheaper), default=0.0)
    return found.best(name, [each for each in cheaper if _cost(each) == least])


def said_of(found: Findings, setting: Setting, name: str) -> str:
    """Return the sentence on a setting that `more_private` has found, and on whom it serves worst.

    A score of all examples hardly shows what becomes of a rare class.
    """
    of, cost = metric(name), setting.over_seeds(epsilon)
    mean = setting.over_seeds(of.value)
    word = spoken(group_metric(name)) if name == found.main.name else name
    reached = of.format.one(mean.mean if mean else None)
    served = _serves_worst(found, setting) if name == found.main.name else ""
    return (
        f"More private, and cannot be told from it in {word}: {setting.name}, {reached} "
        f"at ε = {number(cost.high if cost else None)}{served}."
    )


def _serves_worst(found: Findings, setting: Setting) -> str:
    worst = found.worst_group
    mean, groups = setting.over_seeds(worst.value), whose(worst, setting)
    if mean is None or not groups:
        return ""
    by = spoken_worst(worst)
    word = "" if by == spoken(group_metric(found.main.name)) else f" {by}"
    who = " or ".join(map(called, sorted(groups)))
    return f", which serves {who} worst, with{word} {worst.format.one(mean.mean)}"


def _cost(setting: Setting) -> float:
    """Return the epsilon of a setting as it is shown, so that rounding makes none cheaper."""
    cost = setting.over_seeds(epsilon)
    return float(f"{cost.high:.2g}") if cost else float("inf")
