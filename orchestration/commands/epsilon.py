"""`dpsweep epsilon`: the accountants as a calculator: the question, the answers, and how they are printed and drawn.

It raises `InvalidInput` or `UnsupportedMechanism`, which `dpsweep.orchestration.commands.main.main` prints as one line.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import (
    FALSE_POSITIVE_RATES,
    CertifiedInterval,
    PrivacyCurve,
    attack_risk,
    curve_of_examples,
    privacy_curve,
)
from dpsweep.accounting.calibration.parameter_search import epsilon_text
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.reasons import Reason, in_words, union, weakened
from dpsweep.accounting.mechanism.schedules import parse_schedule
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.options import show, whole_numbers, write_file
from dpsweep.orchestration.commands.run_flags import (
    SELECTION,
    AccountantName,
    Json,
    RunFlags,
    SelectionShape,
    SelectionTrials,
    accounted,
    compared_with_naive,
    naive_note,
    random_trials,
    strategy_notes,
    warn_of_delta,
    with_run_flags,
)
from dpsweep.orchestration.commands.stored_trial import (
    INDIVIDUAL,
    PRIVATE,
    QUANTILES,
    EpsilonSpread,
    contributions_of,
    estimate_of_examples,
    spread_of_epsilons,
    stored_reasons,
    stored_trace,
)
from dpsweep.orchestration.comparison.formats import at_least_share, at_most_share
from dpsweep.orchestration.comparison.group_references import (
    COMPARISON,
    VADHAN,
    GroupComparison,
    compare_groups,
    linear_heading,
)
from dpsweep.orchestration.store.layout import file_at, trial_at

if TYPE_CHECKING:
    import plotly.graph_objects as go

    IndividualMethod = str
else:  # the choices that typer shows and accepts
    IndividualMethod = Literal[tuple(INDIVIDUAL)]

RISK = (
    "no attack that sees every step and knows all other data exceeds these rates, unless their kind is estimate; in "
    "brackets, what some attack on the worst data set achieves, where that is known: not if batches may be cut or "
    "epochs are shuffled, nor of groups with allocated batches or turns"
)
_COLOURS = ("#1f5fa8", "#b3541e", "#2e7d4f", "#7a3e9d", "#8a6d1b", "#4f5b66")
_POINTS = 120  # false positive rates per curve, on each of the two scales


@with_run_flags
def epsilon(
    flags: RunFlags,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee, well below 1/n.")],
    accountant: AccountantName = "auto",
    group_size: Annotated[str, typer.Option(help="Size of the protected group, or several: 1,2,4 or 1..64.")] = "1",
    compare: Annotated[
        bool, typer.Option("--compare", help="Show Vadhan's bound for groups, and linear growth, beside each epsilon.")
    ] = False,
    trial: Annotated[str | None, typer.Option(help="Folder or URI of a trial: account for what was run.")] = None,
    trace: Annotated[str | None, typer.Option(help="The same from a trace.arrow alone.")] = None,
    individual: Annotated[
        IndividualMethod | None, typer.Option(help="With --trial: how the epsilons of single examples spread.")
    ] = None,
    examples: Annotated[
        str | None, typer.Option(help="With --trial: ids of records, such as 3,17, to account for together.")
    ] = None,
    risk: Annotated[
        bool, typer.Option("--risk", help="What no attack exceeds: membership advantage, TPR at low FPRs.")
    ] = False,
    prior: Annotated[
        float | None, typer.Option(help="With --risk: probability of guessing the record right; bounds reconstruction.")
    ] = None,
    selection_trials: SelectionTrials = None,
    selection_shape: SelectionShape = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write epsilon over epochs and group sizes to this HTML.")] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Write delta over epsilon and the trade-off function to this HTML.")
    ] = None,
) -> None:
    """Print the privacy cost of a run, planned or stored: for one example, for groups, for given examples."""
    trials = random_trials(selection_trials, selection_shape)
    request = EpsilonRequest(
        delta, accountant, group_size, compare, individual, examples, risk, prior, trials, plot, curve
    )
    run = _planned(flags) if trial is None and trace is None else _stored(trial, trace)
    warn_of_delta(delta, run.dataset_size)
    found = answer(run, request)
    if curve is not None:
        _write_curve_plot(curve, found.curves, delta)
    if plot is not None:
        _write_epsilon_plot(plot, found)
    if as_json:
        objects = _objects(found)
        typer.echo(json.dumps(objects if len(objects) > 1 else objects[0]))
    else:
        _print_tables(found)


@dataclass(frozen=True)
class AccountedRun:
    """A run, planned or stored.

    `fields`: what the JSON output says of it.
    `dataset_size`: None if unknown.
    `files`: None unless a trial is named.
    `reasons`: why every epsilon of the named trial is an estimate; empty where no trial is named, and only the
    mechanism is accounted for.
    """

    trace: Trace
    fields: dict[str, Any]
    dataset_size: int | None
    files: TrialFiles | None = None
    reasons: tuple[Reason, ...] = ()


def _stored(trial: str | None, trace: str | None) -> AccountedRun:
    """Return the run of a stored trial, or of a trace alone.

    Raises: InvalidInput for a missing file; DataCorruption for a damaged one.
    """
    files = None if trial is None else trial_at(trial)
    found = stored_trace(file_at(str(trace)) if files is None else files.trace)
    fields: dict[str, Any] = {"trial": trial, "trace": trace, "steps": found.steps}
    return AccountedRun(found, fields, found.dataset_size, files, () if files is None else stored_reasons(files))


def _planned(flags: RunFlags) -> AccountedRun:
    trace = flags.trace(parse_schedule(flags.schedule, flags.required_noise()))
    fields = {
        **flags.sampling_fields(trace),
        "schedule": flags.schedule,
        "noise_multiplier": flags.noise_multiplier,
        "steps": trace.steps,
        **flags.strategy_fields(trace),
    }
    return AccountedRun(trace, fields, flags.dataset_size)


@dataclass(frozen=True)
class EpsilonRequest:
    """The question about a run: the options of `dpsweep epsilon` of the same names.

    trials: number of runs if only the best of them is released, else None.
    """

    delta: float
    accountant: str
    group_size: str
    compare: bool
    individual: str | None
    examples: str | None
    risk: bool
    prior: float | None
    trials: RandomTrials | None
    plot: Path | None
    curve: Path | None


@dataclass(frozen=True)
class EpsilonAnswers:
    """The answers to a request about a run; those that were not asked for are None or empty.

    `estimates`: one for each group size.
    `compared`: reference values by group size.
    `selection`: by group size, the number of runs, and epsilons without the selection.
    `together`: epsilon of the given examples.
    `spread`: epsilons of single examples.
    `curves`: one for each group size, then that of the given examples.
    `risks`: bounds on attacks, one for each curve.
    """

    run: AccountedRun
    request: EpsilonRequest
    estimates: Sequence[PrivacyEstimate]
    compared: Mapping[int, GroupComparison]
    selection: dict[int, dict[str, Any]]
    together: PrivacyEstimate | None
    spread: EpsilonSpread | None
    curves: Sequence[PrivacyCurve]
    risks: Sequence[dict[str, Any]]


def answer(run: AccountedRun, request: EpsilonRequest) -> EpsilonAnswers:
    """Account for the run as asked.

    Raises: InvalidInput or UnsupportedMechanism for a run that cannot be accounted, DataCorruption for damaged norm
    shards.
    """
    trace, files, delta, trials = run.trace, run.files, request.delta, request.trials
    sizes = whole_numbers("--group-size", request.group_size, 1)
    estimates = [accounted(trace, delta, request.accountant, size, trials) for size in sizes]
    compared = compare_groups(trace, delta, sizes) if request.compare else {}
    asked = sizes if request.risk or request.curve is not None else []
    curves = [privacy_curve(trace, size, _deltas(request)) for size in asked]
    selection = {size: compared_with_naive(trace, delta, trials, size) for size in sizes} if trials else {}
    together = spread = None
    if files is not None and request.examples is not None:
        group = contributions_of(files, trace, whole_numbers("--examples", request.examples, 0))
        together = estimate_of_examples(group, trace, delta)
        if curves:
            curves.append(curve_of_examples(trace, group.steps, group.contributions, _deltas(request)))
    if files is not None and request.individual is not None:
        spread = spread_of_epsilons(files, trace, delta, request.individual)
    estimates = [weakened(each, run.reasons) for each in estimates]
    curves = [weakened(each, run.reasons) for each in curves]
    together, spread = together and weakened(together, run.reasons), spread and weakened(spread, run.reasons)
    risks = [_risk_of(curve, request.prior) for curve in curves] if request.risk else []
    return EpsilonAnswers(run, request, estimates, compared, selection, together, spread, curves, risks)


def _deltas(request: EpsilonRequest) -> tuple[float, ...]:
    """Return the deltas at which the drawn curves must be tight, from 1e-2 down to a hundredth of --delta; none if no
    curve is drawn.
    """
    if request.curve is None:
        return ()
    lowest = max(request.delta / 100.0, 1e-240)
    return tuple(np.geomspace(1e-2, lowest, 2 + math.ceil(-math.log10(lowest) / 3.0)).tolist())


def _print_tables(found: EpsilonAnswers) -> None:
    """Print the tables, the notes below them, and which files were written."""
    for table in _tables(found):
        show(table)
    for note in _notes(found):
        typer.echo(f"note: {note}")
    if found.request.plot is not None:
        typer.echo(f"plot: {found.request.plot}")
    if found.request.curve is not None:
        typer.echo(f"curve: {found.request.curve}")


def _objects(found: EpsilonAnswers) -> list[dict[str, Any]]:
    """Return each answer with its risk and the fields of the run, as plain values."""
    compared = {size: comparison.as_dict() for size, comparison in found.compared.items()} | found.selection
    answers = [estimate.as_dict() | compared.get(estimate.group_size, {}) for estimate in found.estimates]
    if found.together is not None:
        answers.append(found.together.as_dict() | {"sensitive": PRIVATE})
    if found.spread is not None:
        answers.append(found.spread.as_dict())
    for answer, risk in zip(answers, found.risks, strict=False):  # the spread has no risk
        answer["risk"] = risk
    return [answer | found.run.fields for answer in answers]


def _tables(found: EpsilonAnswers) -> Iterator[Table]:
    together = [] if found.together is None else [found.together]
    yield _estimates_table([*found.estimates, *together], found.compared)
    if found.spread is not None:
        yield _spread_table(found.spread)
    if found.risks:
        yield _risk_table(found.curves, found.request.prior)


def _notes(found: EpsilonAnswers) -> Iterator[str]:
    together, spread = [found.together] * (found.together is not None), [found.spread] * (found.spread is not None)
    yield from in_words(union(each.reasons for each in (*found.estimates, *together, *spread) if each is not None))
    yield from strategy_notes(found.run.fields)
    if found.compared:
        yield COMPARISON
    if found.selection:
        yield SELECTION
        yield from (naive_note(each.unit, found.selection[each.group_size]) for each in found.estimates)
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
        comparison = ["", ""] if beside is None else [epsilon_text(beside.vadhan), _shown_down(beside.linear)]
        table.add_row(
            estimate.unit,
            epsilon_text(estimate.epsilon),
            _shown_down(lower) if lower is not None and estimate.is_private else "unknown",
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
        table.add_row(names.get(level, f"{level:.0%} quantile"), epsilon_text(value))
    table.add_row("mean", epsilon_text(spread.mean))
    return table


def _shown_down(epsilon: float) -> str:
    """Return the epsilon with four decimals, rounded down."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "infinite"


_STEPS_DRAWN = 20
_GROUP_SIZES = (1, 2, 4, 8)


def _write_epsilon_plot(path: Path, found: EpsilonAnswers) -> None:
    """Plot epsilon at up to 20 points of the run and, if the accountant covers groups, over the group size.

    Comparisons by group size are further lines; infinite values are left out.
    """
    import plotly.graph_objects as go  # late: no other command needs it
    from plotly.subplots import make_subplots

    accountant, delta = found.request.accountant, found.request.delta
    figure = make_subplots(cols=2, rows=1, horizontal_spacing=0.12)
    panels: tuple[tuple[str, Mapping[float, float]], ...] = (
        ("epoch", _epsilon_over_epochs(found)),
        ("group size k", _epsilon_over_group_sizes(found)),
    )
    for column, (axis, epsilons) in enumerate(panels, start=1):
        line = go.Scatter(
            x=list(epsilons), y=list(epsilons.values()), mode="lines+markers", name=accountant, showlegend=column == 2
        )
        figure.add_trace(line, row=1, col=column)
        figure.update_xaxes(title_text=axis, row=1, col=column)
        figure.update_yaxes(title_text=f"epsilon at delta {delta:g}", rangemode="tozero", row=1, col=column)
    for name, values in _comparison_lines(found.compared).items():
        line = go.Scatter(x=list(values), y=list(values.values()), mode="lines", line={"dash": "dash"}, name=name)
        figure.add_trace(line, row=1, col=2)
    title = f"Privacy by {accountant}, {found.run.trace.adjacency}"
    figure.update_layout(template="simple_white", showlegend=bool(found.compared), title=title)
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


def _epsilon_over_epochs(found: EpsilonAnswers) -> dict[float, float]:
    """Return the epsilon after each of up to 20 evenly spaced steps, keyed by the (fractional) epoch."""
    trace, asked = found.run.trace, found.request
    epoch = trace.segments[0].sampling.steps_per_epoch if trace.segments else 1
    steps = np.unique(np.linspace(1, trace.steps, _STEPS_DRAWN).round().astype(int)).tolist()
    return {step / epoch: account(trace.until(step), asked.delta, asked.accountant).epsilon for step in steps}


def _epsilon_over_group_sizes(found: EpsilonAnswers) -> dict[float, float]:
    """Return the epsilon by group size, for the sizes asked for and 1, 2, 4, 8, except those that the accountant
    refuses.
    """
    epsilons: dict[float, float] = {}
    for size in sorted({*(estimate.group_size for estimate in found.estimates), *_GROUP_SIZES}):
        with contextlib.suppress(UnsupportedMechanism):
            epsilons[size] = account(found.run.trace, found.request.delta, found.request.accountant, size).epsilon
    return epsilons


def _risk_of(curve: PrivacyCurve, prior: float | None) -> dict[str, Any]:
    """Return the bounds on attacks from a curve as plain values; reconstruction is None if no bound is proven."""
    found = attack_risk(curve).as_dict()
    if prior is not None:
        found |= {"prior": prior, "reconstruction": _reconstruction(curve, prior)}
    return found


def _risk_table(curves: Sequence[PrivacyCurve], prior: float | None) -> Table:
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


def _write_curve_plot(path: Path, curves: Sequence[PrivacyCurve], delta: float) -> None:
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
        _lines(figure, 1, curve.unit, colour, profile.epsilons, profile.worst, lower)
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
