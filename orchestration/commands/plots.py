"""Plots of `dpsweep epsilon --plot`: epsilon over epochs and over group sizes, in one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.commands.output_files import write_file
from dpsweep.orchestration.comparison.group_sizes import VADHAN, GroupComparison, linear_heading

_POINTS = 20
_GROUP_SIZES = (1, 2, 4, 8)


def write_epsilon_plot(
    path: Path,
    trace: Trace,
    steps_per_epoch: int,
    delta: float,
    accountant: str,
    group_sizes: Sequence[int],
    compared: Mapping[int, GroupComparison],
) -> None:
    """Plot epsilon at up to 20 points of the run and, if the accountant covers groups, over the group size.

    `compared`: comparisons by group size, drawn as further lines; infinite values are left out.
    Raises: InvalidInput if ``path`` cannot be written.
    """
    import plotly.graph_objects as go  # late: no other command needs it
    from plotly.subplots import make_subplots

    by_epoch = epsilon_over_epochs(trace, steps_per_epoch, delta, accountant)
    by_size = epsilon_over_group_sizes(trace, delta, accountant, group_sizes)
    panels = (
        ("epoch", list(by_epoch), list(by_epoch.values())),
        ("group size k", list(by_size), list(by_size.values())),
    )
    figure = make_subplots(cols=len(panels), rows=1, horizontal_spacing=0.12)
    for column, (axis, x, y) in enumerate(panels, start=1):
        line = go.Scatter(x=x, y=y, mode="lines+markers", name=accountant, showlegend=column == len(panels))
        figure.add_trace(line, row=1, col=column)
        figure.update_xaxes(title_text=axis, row=1, col=column)
        figure.update_yaxes(title_text=f"epsilon at delta {delta:g}", rangemode="tozero", row=1, col=column)
    for name, values in _comparison_lines(compared).items():
        line = go.Scatter(x=list(values), y=list(values.values()), mode="lines", line={"dash": "dash"}, name=name)
        figure.add_trace(line, row=1, col=len(panels))
    figure.update_layout(
        template="simple_white", showlegend=bool(compared), title=f"Privacy by {accountant}, {trace.adjacency}"
    )
    write_file("--plot", path, figure.to_html(include_plotlyjs=True).encode(), private=False)


def _comparison_lines(compared: Mapping[int, GroupComparison]) -> dict[str, dict[int, float]]:
    """Return the finite values of each comparison line by group size; keys are names of lines."""
    if not compared:
        return {}
    is_bound = all(one.linear_is_bound for one in compared.values())
    return {
        VADHAN: {size: one.vadhan for size, one in compared.items() if math.isfinite(one.vadhan)},
        linear_heading(is_bound): {size: one.linear for size, one in compared.items() if math.isfinite(one.linear)},
    }


def epsilon_over_epochs(trace: Trace, steps_per_epoch: int, delta: float, accountant: str) -> dict[float, float]:
    """Return the epsilon after each of up to 20 evenly spaced steps, keyed by the (fractional) epoch."""
    steps = np.unique(np.linspace(1, trace.steps, _POINTS).round().astype(int))
    return {
        step / steps_per_epoch: account(trace.until(int(step)), delta, accountant).epsilon for step in steps.tolist()
    }


def epsilon_over_group_sizes(
    trace: Trace, delta: float, accountant: str, group_sizes: Sequence[int]
) -> dict[int, float]:
    """Return the epsilon by group size, for the given sizes and 1, 2, 4, 8; sizes that the accountant refuses are
    left out.
    """
    epsilons: dict[int, float] = {}
    for size in sorted({*group_sizes, *_GROUP_SIZES}):
        try:
            epsilons[size] = account(trace, delta, accountant, size).epsilon
        except UnsupportedMechanism:
            continue
    return epsilons
