"""`dpsweep plan`: show what a sweep would do and, with ``--probe``, the time, memory and price of its steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from dpsweep.accounting.mechanism.units import protects_users
from dpsweep.orchestration.commands.options import AllowCode, AsJson, SweepFile
from dpsweep.orchestration.commands.running import print_json
from dpsweep.orchestration.comparison.formats import for_terminal, print_line
from dpsweep.orchestration.execution.environment import IN_PROCESS, prepare_environment

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.prediction import Prediction
    from dpsweep.orchestration.sweeps.people import WaysCompared
    from dpsweep.orchestration.sweeps.planned import Plan
    from dpsweep.orchestration.sweeps.schema import SweepSpec


def plan(
    sweep: SweepFile,
    allow_code: AllowCode = None,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Run no code of the user's own; what depends on it is not planned.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Take a few steps of each kind of trial; predict time, memory and price.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(help="With --probe: price of an hour of a machine on which one trial trains.")
    ] = None,
    release_rows_per_user: Annotated[
        float | None,
        typer.Option(help="Noise multiplier: release once, with noise, how many users have how many rows (users.md)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a sweep would do: noise, steps, worst-case epsilon and bytes of each trial; trains nothing.

    A sweep file is code: the user's own data sources and models run on a few rows, unless with --no-code. With --probe,
    a few real steps are taken in a temporary folder, and nothing but times and memory is kept of them.
    """
    from dpsweep.orchestration.sweeps.plan import plan_sweep
    from dpsweep.orchestration.sweeps.schema import parse_sweep
    from dpsweep.orchestration.sweeps.text import read_text
    from dpsweep.orchestration.sweeps.user_code import permitted

    if probe:
        prepare_environment(IN_PROCESS)
    spec = parse_sweep(read_text(sweep), str(sweep))
    code = None if no_code else permitted(spec, sweep.resolve().parent, allow_code or ())
    planned, predicted = plan_sweep(spec, code), None
    if probe and code is not None and planned.trials:
        from dpsweep.orchestration.execution.prediction import predict_costs

        predicted = predict_costs(spec, planned, code, price_per_hour)
    if release_rows_per_user is not None:
        _show_release(spec, planned, release_rows_per_user)
        raise typer.Exit
    _show(spec, planned, predicted, as_json)
    if any(refusal.hidden for refusal in planned.refusals):
        print(_WITHHELD, file=sys.stderr)
    raise typer.Exit(2 if planned.refusals else 0)


_WITHHELD: Final = (
    "the full texts of these errors may quote the data; `dpsweep run`, which refuses the sweep too, keeps them in its "
    "private folder"
)


def _show_release(spec: SweepSpec, planned: Plan, noise_multiplier: float) -> None:
    from dpsweep.orchestration.commands.plan_notes import release_lines

    for line in release_lines(spec, planned, noise_multiplier):
        print(line)


def _show_users(spec: SweepSpec, compared: Sequence[WaysCompared]) -> None:
    """Print which way of protecting users is recommended, for a sweep that protects users."""
    from dpsweep.orchestration.commands.options import show, stdout
    from dpsweep.orchestration.commands.plan_notes import UNDECLARED, noise_line, rows_source, ways_lines, ways_table

    for each in compared:
        heading, *lines = ways_lines(each, rows_source(spec))
        print_line(stdout(), heading)
        show(ways_table(each))
        for line in lines:
            print_line(stdout(), line)
    for line in dict.fromkeys(map(noise_line, compared)):
        print_line(stdout(), line)
    privacy = spec.privacy
    known = privacy.rows_per_user is not None or privacy.adjacency == "fixed_graph"
    if protects_users(privacy.unit) and not known and not compared:
        print_line(stdout(), UNDECLARED)


def _show(spec: SweepSpec, planned: Plan, predicted: Prediction | None, as_json: bool) -> None:
    from dpsweep.orchestration.commands.options import show, stdout
    from dpsweep.orchestration.commands.plan_notes import prospect_line, prospects
    from dpsweep.orchestration.commands.printed_tables import plan_lines, plan_rows, plan_table, prediction_lines
    from dpsweep.orchestration.comparison import power
    from dpsweep.orchestration.sweeps.people import comparisons

    compared = list(comparisons(spec, planned.trials))
    foreseen = list(prospects(planned.trials))
    design, seeds = power.design(spec, planned.trials), len(set(spec.seeds))
    if as_json:
        shown = [asdict(power.detectable(design, count)) for count in power.SEEDS] if design else []
        more = {} if predicted is None else {"prediction": predicted.as_dict()}
        users = {"users": [asdict(each) for each in compared]} if compared else {}
        audits = {"audits": [{"trials": keys} | asdict(each) for keys, each in foreseen]} if foreseen else {}
        print_json(plan_rows(planned, spec) | {"detectable": shown} | users | audits | more)
    else:
        show(plan_table(planned, spec))
        spent = None if predicted is None else predicted.seconds / 3600.0
        hours = None if spent is None else power.hours_by_seeds(spec, len(planned.trials), spent)
        lines = power.lines(design, seeds, hours) if design else []
        of_audits = [prospect_line(keys if foreseen[1:] else (), each) for keys, each in foreseen]
        for line in [*plan_lines(planned), *of_audits, *(prediction_lines(predicted) if predicted else []), *lines]:
            print_line(stdout(), line)
        _show_users(spec, compared)
    limits = [*power.hidden_groups(planned.trials), *power.warnings(design, seeds, spec.compare.detect)]
    for warning in (*planned.warnings, *limits):
        print_line(Console(stderr=True), f"warning: {warning}")
    for reason in planned.reasons():
        print(for_terminal(f"refused: {reason}"), file=sys.stderr)
