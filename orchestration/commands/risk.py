"""Output of `dpsweep epsilon --risk` and `--curve`: a table of bounds on attacks, and the privacy curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES, CertifiedInterval, PrivacyCurve, attack_risk
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.orchestration.commands.output_files import write_file
from dpsweep.orchestration.comparison.formats import at_least_share, at_most_share

if TYPE_CHECKING:
    import plotly.graph_objects as go

RISK = (
    "no attack that sees every step and knows all other data exceeds these rates; in brackets, what some attack on the "
    "worst data set achieves, where that is known: not if batches may be cut or epochs are shuffled"
)
_COLOURS = ("#1f5fa8", "#b3541e", "#2e7d4f", "#7a3e9d", "#8a6d1b", "#4f5b66")
_POINTS = 120  # false positive rates per curve, on each of the two scales


def risk_of(curve: PrivacyCurve, prior: float | None) -> dict[str, Any]:
    """Return the bounds on attacks from a curve as plain values; reconstruction is None if no bound is proven."""
    found = attack_risk(curve).as_dict()
    if prior is not None:
        found |= {"prior": prior, "reconstruction": _reconstruction(curve, prior)}
    return found


def risk_table(curves: Sequence[PrivacyCurve], prior: float | None) -> Table:
    """Return one row for each curve: upper bounds on attacks, with certified lower bounds, where known, in brackets."""
    rates = [f"TPR at FPR {100 * rate:g}%" for rate in FALSE_POSITIVE_RATES]
    headings = [] if prior is None else [f"reconstruction at prior {prior:g}"]
    table = Table("unit", "advantage", *rates, *headings, "kind", title="attacks: at most (at least)")
    for curve in curves:
        found = attack_risk(curve)
        reconstruction = [] if prior is None else [at_most_share(_reconstruction(curve, prior))]
        numbers = map(_interval, (found.advantage, *found.true_positive_rates))
        table.add_row(found.unit, *numbers, *reconstruction, found.kind)
    return table


def curve_deltas(delta: float) -> tuple[float, ...]:
    """Return the deltas at which the drawn curve must be tight: from 1e-2 down to a hundredth of ``delta``."""
    lowest = max(delta / 100.0, 1e-240)
    return tuple(np.geomspace(1e-2, lowest, 2 + math.ceil(-math.log10(lowest) / 3.0)).tolist())


def write_curve_plot(path: Path, curves: Sequence[PrivacyCurve], delta: float) -> None:
    """Plot delta over epsilon, and the largest TPR over FPR, of each curve: upper bounds solid, lower bounds dashed.

    Raises: InvalidInput if ``path`` cannot be written.
    """
    import plotly.graph_objects as go  # late: no other command needs it
    from plotly.subplots import make_subplots

    titles = ("delta(epsilon)", "attacks (1 - trade-off function)", "the same at low false positive rates")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.08)
    scales = (np.linspace(0.0, 1.0, _POINTS), np.geomspace(1e-4, 1.0, _POINTS))
    for place, curve in enumerate(curves):
        colour = _COLOURS[place % len(_COLOURS)]
        profile = curve.profile
        least = None if profile.lower is None else profile.lower.max(axis=0)
        lower = None if least is None else np.where(least > 0.0, least, np.nan)
        _lines(figure, 1, curve.unit, colour, profile.epsilons, profile.upper, lower)
        for column, rates in enumerate(scales, start=2):
            missed, missed_at_most = curve.trade_off(rates)
            achieved = None if missed_at_most is None else 1.0 - missed_at_most
            _lines(figure, column, curve.unit, colour, rates, 1.0 - missed, achieved)
    for column, rates in enumerate(scales, start=2):
        guess = go.Scatter(x=rates, y=rates, mode="lines", line={"color": "#888", "dash": "dot"}, name="guessing")
        figure.add_trace(guess.update(showlegend=column == 2), row=1, col=column)
        figure.update_xaxes(title_text="false positive rate", row=1, col=column)
        figure.update_yaxes(title_text="true positive rate", row=1, col=column)
    figure.update_xaxes(title_text="epsilon", row=1, col=1)
    figure.update_yaxes(title_text="delta", type="log", exponentformat="power", row=1, col=1)
    lowest = math.log10(max(delta / 100.0, 1e-240))
    figure.update_yaxes(range=[lowest, 0.0], row=1, col=1)
    figure.update_xaxes(type="log", row=1, col=3)
    figure.update_yaxes(type="log", row=1, col=3)
    figure.add_hline(delta, line={"color": "#888", "dash": "dot"}, row=1, col=1)
    claims = ", ".join(dict.fromkeys(f"{curve.kind}, {curve.adjacency}" for curve in curves))
    known = any(curve.profile.lower is not None for curve in curves)
    title = f"What no attack exceeds (solid; {claims}){' and what some attack achieves (dashed)' if known else ''}"
    figure.update_layout(template="simple_white", title=title)
    write_file("--curve", path, figure.to_html(include_plotlyjs=True).encode(), private=False)


def _lines(
    figure: go.Figure, column: int, name: str, colour: str, x: np.ndarray, upper: np.ndarray, lower: np.ndarray | None
) -> None:
    import plotly.graph_objects as go

    for values, dash, label in ((upper, "solid", name), (lower, "dash", f"{name}, at least")):
        if values is None:
            continue
        line = go.Scatter(x=x, y=values, mode="lines", name=label, legendgroup=label, showlegend=column == 1)
        figure.add_trace(line.update(line={"color": colour, "dash": dash}), row=1, col=column)


def _reconstruction(curve: PrivacyCurve, prior: float) -> float | None:
    try:
        return curve.reconstruction(prior)
    except UnsupportedMechanism:
        return None


def _interval(found: CertifiedInterval) -> str:
    upper = at_most_share(found.upper)
    return upper if found.lower is None else f"{upper} ({at_least_share(found.lower)})"
