"""`dpsweep best`, `export`, `compare` and `predict`: the results of stored sweeps, and their use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.registry import lookup
from dpsweep.orchestration.commands.options import (
    AllowCode,
    AsJson,
    Folder,
    TrackingUri,
    show,
    stdout,
    warn,
    write_file,
)
from dpsweep.orchestration.commands.running import print_json
from dpsweep.orchestration.comparison.formats import for_terminal, plain_text, print_line
from dpsweep.orchestration.store.layout import SweepFiles, folder_at, sweep_at, sweep_of, trial_at

if TYPE_CHECKING:
    from dpsweep.orchestration.comparison.across_sweeps import Comparison

_WHOLE: Final = re.compile(r"0|-?[1-9]\d{0,17}", re.ASCII)


def export(
    folder: Folder,
    to: Annotated[Path, typer.Option(help="The file to write: .csv or .parquet.", metavar="FILE")],
    all_columns: Annotated[
        bool,
        typer.Option("--all-columns", help="Every value of results.json; `results(all_columns=True)` in Python."),
    ] = False,
) -> None:
    """Write one row per trial: parameters that vary, state, metrics that may be shown, intervals of its setting.

    Withheld numbers are empty; columns without any number are left out. With release: raw the file is readable by you
    only.
    """
    from dpsweep.orchestration.comparison.claims import checked_record
    from dpsweep.orchestration.comparison.stored import stored_settings
    from dpsweep.orchestration.comparison.trials_table import FORMATS, trial_table, useful_columns
    from dpsweep.orchestration.store.release_modes import release_mode

    write = lookup(FORMATS, to.suffix, "format of --to")
    files = sweep_at(folder)
    record = checked_record(files)
    whole = trial_table(record, stored_settings(files))
    table = whole if all_columns else useful_columns(whole)
    write_file("--to", to, write(table), release_mode(record.disclosure).is_sensitive)
    more = "" if all_columns else f"; --all-columns writes all {len(whole[0])}"
    typer.echo(f"{to}: {count_of(len(table), 'trial')}, {count_of(len(table[0]), 'column')}{more}")


def compare(
    folders: Annotated[list[str], typer.Argument(help="Folders or URIs of two sweeps or more.", metavar="DIR...")],
    html: Annotated[Path | None, typer.Option(help="Write the comparison to this HTML file.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """One table over several sweeps: settings with the same parameters beside each other, whatever they are called.

    Each with its seeds and its numbers as its own report shows them. Notes name sweeps of different data, δ or
    adjacency. With release: raw in any of them the HTML file is readable by you only.
    """
    from dpsweep.orchestration.comparison.across_sweeps import compare as compared
    from dpsweep.orchestration.comparison.claims import checked_record
    from dpsweep.orchestration.comparison.stored import stored_evidence

    every = {root: SweepFiles(root) for root in map(folder_at, folders)}
    records = {root: checked_record(files) for root, files in every.items()}
    found = compared(records, {root: stored_evidence(every[root], each.data()) for root, each in records.items()})
    if html is not None:
        from dpsweep.orchestration.report.page import comparison_page

        write_file("--html", html, comparison_page(found).encode(), found.is_sensitive)
    if as_json:
        print_json(found.as_dict())
        return
    _print(found)
    if html is not None:
        typer.echo(f"comparison: {html}")


def best(
    folder: Folder,
    by: Annotated[
        str | None,
        typer.Option(help="A metric of results.json; by default accuracy, or r2, micro_f1, ...", metavar="METRIC"),
    ] = None,
    max_epsilon: Annotated[
        float, typer.Option(help="The most that a trial of the setting may cost.", metavar="E")
    ] = math.inf,
    at_least: Annotated[
        list[str] | None,
        typer.Option(
            help="A condition, such as worst_group=0.7; of a metric that is better when lower, such as loss, at most "
            "that. May be repeated.",
            metavar="METRIC=NUMBER",
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show all settings that may equal it, not the nearest three.")
    ] = False,
    register: Annotated[
        str | None, typer.Option(help="Register its model in MLflow under this name.", metavar="NAME")
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option(help="With --register: alias of the registered model (default: champion).", metavar="ALIAS"),
    ] = None,
    tracking_uri: TrackingUri = None,
    as_json: AsJson = False,
) -> None:
    """The best private setting: its interval, what cannot be told from it, and where its model lies.

    The model is that of its first seed: choosing the seed with the best result would flatter it. With --register,
    MLflow keeps it as a registered model, and the alias moves to it.
    """
    from dpsweep.orchestration.comparison.best import best as chosen
    from dpsweep.orchestration.comparison.best import best_lines, parse_conditions
    from dpsweep.orchestration.comparison.claims import checked_record
    from dpsweep.orchestration.comparison.stored import stored_findings
    from dpsweep.orchestration.execution.same_code import own_files
    from dpsweep.orchestration.store.integrity import require_unaltered_model

    conditions = parse_conditions(at_least or ())
    files = sweep_at(folder)
    record = checked_record(files)
    found = chosen(stored_findings(files, record.data()), by, max_epsilon, conditions)
    trial, result, registered = files.trial(found.trial.key), record.status(found.trial.key).result, ""
    if result is not None:
        require_unaltered_model(trial, result)
    for warning in own_files(files, record, keys=[found.trial.key]).changes():
        warn(warning)
    if register is not None:
        from dpsweep.orchestration.tracking.logged_models import register_best

        made = register_best(found, record.manifest.sweep_id, files, register, alias or "champion", tracking_uri)
        registered = made.address
    if as_json:
        print_json({**found.as_dict(), "model": trial.model, **({"registered": registered} if registered else {})})
        return
    for line in (*best_lines(found, trial.model, show_all), *([f"registered: {registered}"] if registered else [])):
        print_line(stdout(), line)


def predict(
    trial: Annotated[str, typer.Argument(help="Folder or URI of a finished trial.", metavar="TRIAL")],
    table: Annotated[
        Path, typer.Argument(help="A table: .csv, .tsv, .jsonl or .parquet.", metavar="TABLE", readable=False)
    ],
    to: Annotated[Path, typer.Option(help="The file to write: .csv or .parquet.", metavar="FILE")],
    allow_code: AllowCode = None,
) -> None:
    """Apply a trained model to a new table, read by the names and declarations of the sweep: one row for each of its
    rows.

    Labels, groups and users are not needed. The file holds classes with probabilities, or targets in the unit of the
    table, and is readable by you only.
    """
    from dpsweep.orchestration.comparison.claims import checked_record
    from dpsweep.orchestration.comparison.trials_table import FORMATS
    from dpsweep.orchestration.store.integrity import require_unaltered_model
    from dpsweep.orchestration.store.results import TrialResult
    from dpsweep.orchestration.sweeps.user_code import allowed_again
    from dpsweep.workers.trials.predicted_table import predicted_table
    from dpsweep.workers.trials.trained_model import load_trained

    write = lookup(FORMATS, to.suffix, "format of --to")
    files = trial_at(trial.removesuffix("/model.pt"))
    place = sweep_of(files)
    record = None if place is None else checked_record(place[0])
    result = None if record is None or place is None else record.status(place[1]).result
    if record is None or not isinstance(result, TrialResult):
        raise InvalidInput(f"{files.root} is no finished trial; give the folder of one, below trials/ of its sweep")
    require_unaltered_model(files, result)
    code = allowed_again(record.sweep, allow_code or (), ())
    found, notes = predicted_table(load_trained(files, result.spec, code), table)
    columns = [_plain(each.tolist()) for each in found.values()]
    rows = [dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True)]
    write_file("--to", to, write(rows), private=True)
    for note in notes:
        warn(note)
    typer.echo(for_terminal(f"{to}: {count_of(len(rows), 'row')}"))


def _plain(values: list[Any]) -> list[Any]:
    """Return None for NaN, and names of classes as whole numbers if all are: CSV would mark -1 as text of a formula."""
    known = [None if value != value else value for value in values]
    are_whole = all(value is None or (isinstance(value, str) and _WHOLE.fullmatch(value)) for value in known)
    return [value and int(value) for value in known] if are_whole else known


def _print(found: Comparison) -> None:
    from dpsweep.orchestration.comparison.across_sweeps import between_heads, heads, rows_of
    from dpsweep.orchestration.report.prose import composed_cost

    if found.between:
        show(_table(between_heads(found), [each.cells() for each in found.between]))
        show("")
    show(_table(heads(found), rows_of(found)))
    for sentence in (*found.differences, *composed_cost(found.trials)):
        print_line(stdout(), sentence)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(for_terminal(head), header_style="dim", overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    return table
