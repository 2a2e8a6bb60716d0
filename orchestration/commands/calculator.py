"""`dpsweep epsilon` and `dpsweep calibrate`: the accountants as calculators.

Both raise `InvalidInput`, `UnsupportedMechanism` or `Unreachable`, which `orchestration.commands.main.main` prints as
one line. The flags that describe a run are shared: `RunFlags`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from accounting.accountants import ACCOUNTANTS
from accounting.budgets import Budget
from accounting.calibration import (
    calibrate_decay,
    decay_parameter,
    length_within_budget,
    noise_multiplier_within_budget,
    round_up,
)
from accounting.curves import curve_of_examples, privacy_curve
from accounting.errors import InvalidInput
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import Trace
from accounting.records import TrialFiles
from accounting.registry import one_of
from accounting.schedules import (
    LARGEST_EPOCHS,
    NoiseSchedule,
    make_schedule,
    parse_schedule,
    split_schedule,
    with_initial,
)
from orchestration.commands import panels
from orchestration.commands.plots import write_epsilon_plot
from orchestration.commands.risk import RISK, curve_deltas, risk_of, risk_table, write_curve_plot
from orchestration.commands.run_flags import RunFlags, with_run_flags
from orchestration.commands.run_shape import RunShape, delta_warning
from orchestration.commands.selection import (
    SELECTION,
    SelectionShape,
    SelectionTrials,
    accounted,
    compared_with_naive,
    naive_note,
    random_trials,
)
from orchestration.commands.stored_trial import (
    INDIVIDUAL,
    PRIVATE,
    QUANTILES,
    EpsilonSpread,
    contributions_of,
    estimate_of_examples,
    spread_of_epsilons,
    steps_per_epoch,
    stored_trace,
)
from orchestration.commands.targets import Target
from orchestration.comparison.group_sizes import COMPARISON, VADHAN, GroupComparison, compare_groups, linear_heading

if TYPE_CHECKING:
    IndividualMethod = str
else:  # the choices that typer shows and accepts
    IndividualMethod = Literal[tuple(INDIVIDUAL)]

Method = Annotated[str, typer.Option(help=f"{one_of(ACCOUNTANTS)}.")]
_MOST_NUMBERS = 10_000
"""Longest list of numbers in a flag such as --group-size."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@with_run_flags
def epsilon(
    flags: RunFlags,
    delta: Annotated[float, typer.Option(help="Failure probability of the guarantee, well below 1/n.")],
    accountant: Method = "auto",
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
    """What a run, planned or stored, costs in privacy: for one example, for groups, for given examples."""
    trials = random_trials(selection_trials, selection_shape)
    if trials is not None and (compare or individual or examples or risk or plot or curve):
        raise InvalidInput(
            "--selection-trials gives the epsilon of the released run alone: drop --compare, --individual, --examples, "
            "--risk, --plot and --curve"
        )
    ran = _stored_run(trial, trace, flags, individual or examples)
    if ran is None:
        schedule = parse_schedule(flags.schedule, flags.required_noise())
        ran = flags.shape().trace(schedule, epochs=flags.epochs, steps=flags.steps)
        run = {
            "sampling": flags.sampling,
            "schedule": flags.schedule,
            "noise_multiplier": flags.noise_multiplier,
            "steps": ran.steps,
        }
        _warn(delta_warning(delta, flags.dataset_size))
    else:
        run = {"trial": trial, "trace": trace, "steps": ran.steps}
        _warn(delta_warning(delta, ran.dataset_size))
    sizes = whole_numbers("--group-size", group_size, 1)
    estimates = [accounted(ran, delta, accountant, size, trials) for size in sizes]
    compared = compare_groups(ran, delta, sizes) if compare else {}
    answers = [
        estimate.as_dict() | (compared[estimate.group_size].as_dict() if compare else {}) for estimate in estimates
    ]
    if prior is not None and not risk:
        raise InvalidInput("--prior needs --risk, which shows the bound on reconstruction")
    deltas = curve_deltas(delta) if curve is not None else ()
    curves = [privacy_curve(ran, size, deltas) for size in sizes] if risk or curve is not None else []
    tables, cautions = [_table(estimates, compared)], [] if trials is None else [SELECTION]
    if trials is not None:
        beside = compared_with_naive(ran, delta, trials)
        run |= beside
        cautions.append(naive_note(beside))
    if trial is not None and examples is not None:
        group = contributions_of(TrialFiles(trial), ran, whole_numbers("--examples", examples, 0))
        together = estimate_of_examples(group, ran, delta)
        answers.append(together.as_dict() | {"sensitive": PRIVATE})
        tables = [_table([*estimates, together], compared)]
        if curves:
            curves.append(curve_of_examples(ran, group.steps, group.contributions, deltas))
    if trial is not None and individual is not None:
        spread = spread_of_epsilons(TrialFiles(trial), ran, delta, individual)
        answers.append(spread.as_dict())
        tables.append(_spread_table(spread))
        cautions += [spread.caution] if spread.caution else []
    if risk:
        for place, each in enumerate(curves):
            answers[place] |= {"risk": risk_of(each, prior)}
        tables.append(risk_table(curves, prior))
        cautions.append(RISK)
    if curve is not None:
        write_curve_plot(curve, curves, delta)
    if plot is not None:
        write_epsilon_plot(plot, ran, steps_per_epoch(ran), delta, accountant, sizes, compared)
    if as_json:
        objects = [answer | run for answer in answers]
        typer.echo(json.dumps(objects if len(objects) > 1 else objects[0]))
        return
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=160)
    for shown in tables:
        console.print(shown)
    if compared:
        typer.echo(f"note: {COMPARISON}")
    for caution in cautions:
        typer.echo(f"note: {caution}")
    if individual or examples:
        typer.echo(f"note: {PRIVATE}")
    if plot is not None:
        typer.echo(f"plot: {plot}")
    if curve is not None:
        typer.echo(f"curve: {curve}")


def _stored_run(trial: str | None, trace: str | None, flags: RunFlags, of_examples: str | None) -> Trace | None:
    """The stored trace, or None if the flags describe a run instead.

    of_examples: value of --individual or --examples. Raises: InvalidInput for flags that contradict each other.
    """
    if of_examples and trial is None:
        raise InvalidInput("--individual and --examples need --trial: they read its recorded contributions")
    if trial is None and trace is None:
        return None
    if trial is not None and trace is not None:
        raise InvalidInput("give either --trial or --trace, not both")
    if flags.describe_a_run:
        raise InvalidInput(
            "--trial and --trace say what was run: drop the flags that describe noise, batches and length"
        )
    return stored_trace(TrialFiles(trial).trace if trial is not None else str(trace))


@with_run_flags
def calibrate(
    flags: RunFlags,
    solve: Annotated[
        Literal["noise-multiplier", "decay", "epochs", "steps"], typer.Option(help="The quantity to solve for.")
    ] = "noise-multiplier",
    target_epsilon: Annotated[float | None, typer.Option(help="Epsilon to meet (needs --delta).")] = None,
    budget_rho: Annotated[float | None, typer.Option(help="zCDP budget to meet, instead of an epsilon.")] = None,
    target_advantage: Annotated[
        float | None, typer.Option(help="Membership advantage (TPR - FPR) that no attack may exceed.")
    ] = None,
    target_tpr: Annotated[
        float | None, typer.Option(help="True positive rate that no attack may exceed (needs --at-fpr).")
    ] = None,
    at_fpr: Annotated[float | None, typer.Option(help="The false positive rate of --target-tpr.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    accountant: Method = "auto",
    group_size: Annotated[int, typer.Option(help="Size of the protected group.")] = 1,
    digits: Annotated[int | None, typer.Option(help="Round a decay up to so many decimals.")] = None,
    selection_trials: SelectionTrials = None,
    selection_shape: SelectionShape = None,
    as_json: Json = False,
) -> None:
    """The noise, decay or length with which a run meets a privacy target."""
    target = Target(target_epsilon, budget_rho, target_advantage, target_tpr, delta, at_fpr)
    trials = random_trials(selection_trials, selection_shape)
    budget = target.budget(accountant, group_size, trials)
    question = Question(flags, flags.shape(), budget, digits)
    value, trace = _SOLVERS[solve](question)
    _warn(None if delta is None else delta_warning(delta, flags.dataset_size))
    name = solve.replace("-", "_")
    cost = budget.cost(trace)
    answer = {
        "solve": solve,
        "value": value,
        name: value,
        budget.unit: cost,
        "target": budget.limit,
        "delta": delta,
        "adjacency": trace.adjacency,
        "group_size": group_size,
        "accountant": target.accountant or accountant,
        "sampling": flags.sampling,
        "schedule": flags.schedule,
        "steps": trace.steps,
    }
    if trials is not None:
        answer |= {"selection_trials": trials.mean, "selection_shape": trials.shape}
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"{solve}: {value}  ({budget.unit} {cost:.6g} of {budget.limit:g}, {trace.steps} steps)")
        if trials is not None:
            typer.echo(f"note: {SELECTION}")


@dataclass(frozen=True)
class Question:
    """The budget to meet, and the flags that describe the rest of the run. digits: decimals of a decay."""

    flags: RunFlags
    shape: RunShape
    budget: Budget
    digits: int | None


Solver = Callable[[Question], tuple[float, Trace]]
"""Solves a question; returns the value found and the trace of the run with that value."""


def _solve_noise(question: Question) -> tuple[float, Trace]:
    if question.flags.noise_multiplier is not None:
        raise InvalidInput("--noise-multiplier is what is being solved for: drop it, or choose another --solve")
    schedule = parse_schedule(question.flags.schedule, 1.0)

    def trace_of(noise_multiplier: float) -> Trace:
        return question.shape.trace(
            with_initial(schedule, noise_multiplier), epochs=question.flags.epochs, steps=question.flags.steps
        )

    found = noise_multiplier_within_budget(trace_of, question.budget)
    return found, trace_of(found)


def _solve_decay(question: Question) -> tuple[float, Trace]:
    if question.flags.epochs is None or question.flags.steps is not None:
        raise InvalidInput("solving for the decay needs --epochs, the length of the run, and no --steps")
    name, params = split_schedule(question.flags.schedule)

    def trace_of(schedule: NoiseSchedule, epochs: int) -> Trace:
        return question.shape.trace(schedule, epochs=epochs)

    sigma = question.flags.required_noise()
    parameter = decay_parameter(name).name
    if parameter in params:
        raise InvalidInput(f"{parameter!r} of schedule {name!r} is what is being solved for: drop it")
    found = calibrate_decay(name, sigma, question.flags.epochs, question.budget, trace_of, question.digits, **params)
    return found, trace_of(make_schedule(name, sigma, **params, **{parameter: found}), question.flags.epochs)


def _solve_length(unit: Literal["epochs", "steps"], at_most: int) -> Solver:
    def solve(question: Question) -> tuple[float, Trace]:
        if question.flags.epochs is not None or question.flags.steps is not None:
            raise InvalidInput("the length of the run is what is being solved for: drop --epochs and --steps")
        schedule = parse_schedule(question.flags.schedule, question.flags.required_noise())

        def trace_of(length: int) -> Trace:
            return question.shape.trace(schedule, **{unit: length})

        found = length_within_budget(trace_of, question.budget, at_most)
        return found, trace_of(found)

    return solve


_SOLVERS: Mapping[str, Solver] = {
    "noise-multiplier": _solve_noise,
    "decay": _solve_decay,
    "epochs": _solve_length("epochs", at_most=LARGEST_EPOCHS),
    "steps": _solve_length("steps", at_most=100_000_000),
}


def register(app: typer.Typer) -> None:
    """Add the commands ``epsilon`` and ``calibrate`` to ``app``."""
    app.command(
        "epsilon",
        **panels.listed(
            panels.PRIVACY,
            "epsilon --noise-multiplier 1.0 --sample-rate 0.01 --steps 2000 --delta 1e-6",
        ),
    )(epsilon)
    app.command(
        "calibrate",
        **panels.listed(panels.PRIVACY, "calibrate --target-epsilon 3 --delta 1e-5 --sample-rate 0.01 --epochs 50"),
    )(calibrate)


def whole_numbers(flag: str, text: str, at_least: int) -> list[int]:
    """The numbers in a flag such as 1,2,4 or 1..64. Raises: InvalidInput for anything else."""
    numbers: list[int] = []
    for item in map(str.strip, text.split(",")):
        first, dots, last = item.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isdecimal() and len(end) < 20 for end in ends) or not at_least <= int(ends[0]) <= int(ends[1]):
            raise InvalidInput(
                f"{flag} has {item!r}, but needs whole numbers of at least {at_least}, such as 1,2,4 or 1..64"
            )
        if len(numbers) + int(ends[1]) - int(ends[0]) >= _MOST_NUMBERS:
            raise InvalidInput(f"{flag} has {item!r}: more than {_MOST_NUMBERS} numbers; give fewer")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers


def _warn(sentence: str | None) -> None:
    if sentence is not None:
        typer.echo(f"warning: {sentence}", err=True)


def _table(estimates: Sequence[PrivacyEstimate], compared: Mapping[int, GroupComparison]) -> Table:
    """One row per estimate; rows of groups also show the comparison for their size, if given."""
    headings = [VADHAN, linear_heading(all(one.linear_is_bound for one in compared.values()))] if compared else []
    table = Table("unit", "epsilon", "at least", *headings, "delta", "accountant", "adjacency", "kind")
    for estimate in estimates:
        lower = estimate.lower_epsilon
        beside = compared.get(estimate.group_size) if not estimate.unit.startswith("examples") else None
        comparison = ["", ""] if beside is None else [_shown(beside.vadhan), _shown_down(beside.linear)]
        table.add_row(
            estimate.unit,
            _shown(estimate.epsilon),
            f"{lower:.4f}" if lower is not None and estimate.is_private else "",
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
    """Epsilon with four decimals, rounded down."""
    return f"{math.floor(epsilon * 1e4) / 1e4:.4f}" if math.isfinite(epsilon) else "infinite"


def _shown(epsilon: float) -> str:
    """Epsilon with four decimals, rounded up."""
    if not epsilon < float("inf"):
        return "infinite"
    return f"{round_up(epsilon, 4) if epsilon > 0.0 else 0.0:.4f}"
