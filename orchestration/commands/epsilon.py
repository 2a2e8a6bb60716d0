"""`dpsweep epsilon`: the accountants as a calculator.

It raises `InvalidInput` or `UnsupportedMechanism`, which `dpsweep.orchestration.commands.main.main` prints as one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dpsweep.orchestration.commands import options
from dpsweep.orchestration.commands.epsilon_answers import EpsilonRequest, RunSource, answer
from dpsweep.orchestration.commands.epsilon_output import print_answers_as_json, print_tables, write_plots
from dpsweep.orchestration.commands.run_flags import (
    AccountantName,
    Json,
    RunFlags,
    SelectionShape,
    SelectionTrials,
    random_trials,
    warn_of_delta,
    with_run_flags,
)
from dpsweep.orchestration.commands.stored_trial import INDIVIDUAL

if TYPE_CHECKING:
    IndividualMethod = str
else:  # the choices that typer shows and accepts
    IndividualMethod = Literal[tuple(INDIVIDUAL)]


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
    source = RunSource(trial, trace, flags)
    request.check(source)
    run = source.run()
    warn_of_delta(delta, run.dataset_size)
    found = answer(run, request)
    write_plots(found)
    if as_json:
        print_answers_as_json(found)
    else:
        print_tables(found)


def register(app: typer.Typer) -> None:
    """Add the command ``epsilon`` to ``app``."""
    example = "epsilon --noise-multiplier 1.0 --sample-rate 0.01 --steps 2000 --delta 1e-6"
    app.command("epsilon", **options.listed(options.PRIVACY, example))(epsilon)
