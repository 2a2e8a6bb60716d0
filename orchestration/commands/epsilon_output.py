"""The output of `dpsweep epsilon`: JSON, or tables with notes, and the files of --plot, --risk and --curve."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.parameter_search import round_up
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import in_words, union
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.commands.epsilon_answers import RISK, EpsilonAnswers, risk_table, write_curve_plot
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.commands.run_flags import SELECTION, naive_note
from dpsweep.orchestration.commands.run_shape import strategy_notes
from dpsweep.orchestration.commands.stored_trial import PRIVATE, QUANTILES, EpsilonSpread, steps_per_epoch
from dpsweep.orchestration.comparison.group_sizes import COMPARISON, VADHAN, GroupComparison, linear_heading


def write_plots(found: EpsilonAnswers) -> None:
    """Write the files that --curve and --plot name. Raises: InvalidInput if one cannot be written."""
    request = found.request
    if request.curve is not None:
        write_curve_plot(request.curve, found.curves, request.delta)
    if request.plot is not None:
        write_epsilon_plot(
            request.plot,
            found.run.trace,
            steps_per_epoch(found.run.trace),
            request.delta,
            request.accountant,
            [estimate.group_size for estimate in found.estimates],
            found.compared,
        )


def print_answers_as_json(found: EpsilonAnswers) -> None:
    """Print one object, or a list of objects for several answers."""
    objects = _objects(found)
    typer.echo(json.dumps(objects if len(objects) > 1 else objects[0]))


def print_tables(found: EpsilonAnswers) -> None:
    """Print the tables, the notes below them, and which files were written."""
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=160)
    for table in _tables(found):
        console.print(table)
    for note in _notes(found):
        typer.echo(f"note: {note}")
    if found.request.plot is not None:
        typer.echo(f"plot: {found.request.plot}")
    if found.request.curve is not None:
        typer.echo(f"curve: {found.request.curve}")


def _objects(found: EpsilonAnswers) -> list[dict[str, Any]]:
    """Return each answer with its risk and the fields of the run, as plain values."""
    compared = {size: comparison.as_dict() for size, comparison in found.compared.items()}
    answers = [estimate.as_dict() | compared.get(estimate.group_size, {}) for estimate in found.estimates]
    if found.together is not None:
        answers.append(found.together.as_dict() | {"sensitive": PRIVATE})
    if found.spread is not None:
        answers.append(found.spread.as_dict())
    for answer, risk in zip(answers, found.risks, strict=False):  # the spread has no risk
        answer["risk"] = risk
    return [answer | found.run.fields | found.selection for answer in answers]


def _tables(found: EpsilonAnswers) -> Iterator[Table]:
    together = [] if found.together is None else [found.together]
    yield _estimates_table([*found.estimates, *together], found.compared)
    if found.spread is not None:
        yield _spread_table(found.spread)
    if found.risks:
        yield risk_table(found.curves, found.request.prior)


def _notes(found: EpsilonAnswers) -> Iterator[str]:
    together, spread = [found.together] * (found.together is not None), [found.spread] * (found.spread is not None)
    yield from in_words(union(each.reasons for each in (*found.estimates, *together, *spread) if each is not None))
    yield from strategy_notes(found.run.fields)
    if found.compared:
        yield COMPARISON
    if found.selection:
        yield SELECTION
        yield naive_note(found.selection)
    if found.spread is not None and found.spread.caution:
        yield found.spread.caution
    if found.risks:
        yield RISK
    if found.together is not None or found.spread is not None:
        yield PRIVATE


def _estimates_table(estimates: Sequence[PrivacyEstimate], compared: Mapping[int, GroupComparison]) -> Table:
    """Return one row per estimate; rows of groups also show the comparison for their size, if given."""
    headings = [VADHAN, linear_heading(all(one.linear_is_bound for one in compared.values()))] if compared else []
    table = Table("unit", "epsilon", "at least", *headings, "delta", "accountant", "adjacency", "kind")
    for estimate in estimates:
        lower = estimate.lower_epsilon
        beside = compared.get(estimate.group_size) if not estimate.unit.startswith("examples") else None
        comparison = ["", ""] if beside is None else [_shown(beside.vadhan), _shown_down(beside.linear)]
        table.add_row(
            estimate.unit,
            _shown(estimate.epsilon),
            f"{lower:.4f}" if lower is not None and estimate.is_private else "unknown",
            *comparison[: len(headings)],
            f"{estimate.delta:g}",
            estimate.accountant,
            estimate.adjacency,
            estimate.kind,
        )
    return table


def _spread_table(spread: EpsilonSpread) -> Table:
    names = {0.0: "smallest", 0.5: "median", 1.0: "largest"}
    title = f"{spread.examples} single examples, by individual {spread.method}: {spread.kind}, {spread.adjacency}"
    table = Table("statistic", "epsilon", title=title, title_justify="left")
    for level, value in zip(QUANTILES, spread.quantiles, strict=True):
        table.add_row(names.get(level, f"{level:.0%} quantile"), _shown(value))
    table.add_row("mean", _shown(spread.mean))
    return table


def _shown_down(epsilon: float) -> str:
    """Return the epsilon with four decimals, rounded down."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "infinite"


def _shown(epsilon: float) -> str:
    """Return the epsilon with four decimals, rounded up."""
    if not epsilon < float("inf"):
        return "infinite"
    return f"{round_up(epsilon, 4) if epsilon > 0.0 else 0.0:.4f}"


_STEPS_DRAWN = 20
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
    steps = np.unique(np.linspace(1, trace.steps, _STEPS_DRAWN).round().astype(int))
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
