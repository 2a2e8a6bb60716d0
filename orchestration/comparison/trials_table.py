"""Flat table of all trials of a sweep: one row per trial, one column per value that its release mode shows. Pure.

`dpsweep export` writes it, and `Sweep.results` of the library returns it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv, parquet

from dpsweep.orchestration.comparison.metrics import METRICS, of_task
from dpsweep.orchestration.comparison.parameters import asked, varying
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.record import SweepRecord, rows
from dpsweep.orchestration.comparison.values import further_numbers
from dpsweep.workers.tasks import TASKS

FORMULA: Final = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")
"""First characters of a cell that a spreadsheet may interpret as a formula; the last four are the wide forms of the
first, which some locales read so."""
_BY_GROUP_SIZE = ("groups", "risks")
"""Lists of a row with one entry per group size."""


def trial_table(record: SweepRecord, settings: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return one row of single values per trial, all with the same columns; None where a value is unknown or withheld.

    Columns: ``key``, the labels (``labels.clipping``, ..., always ``labels.seed``), the parameters that vary
    (``parameters.sampling.batch_size``, ...), ``status``, ``error`` and every metric. The other values of
    results.json follow, except confusion matrices: rates by group (``by_group.Female.accuracy``), costs by group size
    (``groups.4.epsilon``). Several notes are one text. `settings`: as in `record.rows`; ends of intervals are columns
    too (``setting.intervals.accuracy.low``, ``setting.groups.Female.accuracy.low``). For an infinite epsilon the value
    is None and ``private`` is False.
    """
    parameters = varying([asked(point) for point in record.points])
    data = record.data()
    found = [
        dict(_flat(_ordered(row, chosen, further_numbers(trial), data.task)))
        for row, chosen, trial in zip(rows(record, settings), parameters, data.trials, strict=True)
    ]
    names = list(dict.fromkeys(name for row in found for name in row))
    return [{name: row.get(name) for name in names} for row in found]


def useful_columns(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table without columns that are empty, that repeat a label, or that detail what another column says.

    Kept are trial, labels, parameters that vary, state, metrics, what each epsilon claims, the accuracy of each group,
    and the intervals of the setting in its headline's metrics.
    """
    if not table:
        return []
    labels = [[row[name] for row in table] for name in table[0] if name.startswith("labels.")]
    metrics = {metric.name for metric in METRICS}

    def is_useful(name: str) -> bool:
        values = [row[name] for row in table]
        if name.startswith("parameters."):
            return values not in labels
        is_kept = name in metrics or name in _USEFUL or name.startswith(("labels.", *_USEFUL_FAMILIES))
        is_interval = name.startswith("setting.intervals.") and name.split(".")[2] in _headline(table)
        return (is_kept or is_interval) and any(value is not None for value in values)

    names = [name for name in table[0] if is_useful(name) and not name.endswith(".value")]
    return [{name: row[name] for name in names} for row in table]


def main_columns(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table with the few columns that settings are compared by: about ten.

    Kept are trial, labels that vary, state, epsilon and what it claims, the main score with the interval of its
    setting, the worst-group metric, and the error if a trial has one.
    """
    useful = useful_columns(table)
    if not useful:
        return []
    headline, mains = _headline(table), [task.main for task in TASKS.values()]
    main = next((name for name in mains if name in useful[0]), "")
    labels = [name for name in useful[0] if name.startswith("labels.") and len({row[name] for row in useful}) > 1]
    interval = (f"setting.intervals.{main}.low", f"setting.intervals.{main}.high")
    worst = (name for name in useful[0] if name in headline and name not in mains)
    chosen = ("key", *labels, "status", "private", "epsilon", "kind", main, *interval, *worst, "error")
    return [{name: row[name] for name in chosen if name in row} for row in useful]


_USEFUL: Final = frozenset(
    (
        *("key", "status", "error", "asked", "private", "kind", "unit", "reasons", "adjacency", "accountant"),
        *(
            "noise_source",
            "noise_multiplier",
            "noise_strategy",
            "steps",
            "worst_group",
            "setting.name",
            "setting.runs",
            "setting.covers",
        ),
        *("composed.trial.epsilon", "composed.trial.kind", "composed.sweep.epsilon", "composed.sweep.kind"),
    )
)
_USEFUL_FAMILIES: Final = ("group_accuracies.",)
"""Beginnings of names of one column for each group."""


def _headline(table: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the headline's metrics: the main score, and that of the worst-served group."""
    mains = {task.main for task in TASKS.values()}
    worst = {WORST_GROUP_METRICS[row["worst_group_by"]].name for row in table if row.get("worst_group_by")}
    return mains | worst


def _ordered(
    row: Mapping[str, Any], parameters: Mapping[str, Any], further: Mapping[str, float | None], task: str
) -> dict[str, Any]:
    """Return the row in column order: labels, parameters, status, metrics, other values, and ``further`` ones at the
    end.
    """
    first = {"key": row["key"], "labels": row["labels"], "parameters": parameters}
    known = {"status": row["status"], "error": row["error"], **dict.fromkeys(metric.name for metric in of_task(task))}
    told = {name: value for name, value in row.items() if name != "confusion"}
    return {**first, **known, **told, **{name.replace("/", "."): value for name, value in further.items()}}


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        match value:
            case [*entries] if key in _BY_GROUP_SIZE:
                yield from _flat({str(entry["group_size"]): entry for entry in entries}, f"{prefix}{key}.")
            case [*texts]:
                yield f"{prefix}{key}", "; ".join(map(str, texts)) or None
            case Mapping():
                yield from _flat(value, f"{prefix}{key}.")
            case float() if not math.isfinite(value):
                yield f"{prefix}{key}", None
            case _:
                yield f"{prefix}{key}", value


def as_csv(table: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the table as CSV. Texts that a spreadsheet could interpret as a formula (`FORMULA`) get a leading
    apostrophe.
    """

    def harmless(text: str | None) -> str | None:
        return f"'{text}" if text is not None and text.startswith(FORMULA) else text

    found = _arrow(table)
    columns = [
        pa.array(map(harmless, column.to_pylist()), pa.string()) if pa.types.is_string(column.type) else column
        for column in found.columns
    ]
    stream = io.BytesIO()
    csv.write_csv(pa.table(columns, [harmless(name) for name in found.column_names]), stream)
    return stream.getvalue()


def as_parquet(table: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the table as Parquet; texts are unchanged."""
    stream = io.BytesIO()
    parquet.write_table(_arrow(table), stream)
    return stream.getvalue()


FORMATS: Final[Mapping[str, Callable[[Sequence[Mapping[str, Any]]], bytes]]] = {
    ".csv": as_csv,
    ".parquet": as_parquet,
}
"""Functions that serialize a table, by file suffix."""


def _arrow(table: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(table[0]) if table else []
    return pa.table({name: _column(name, [row[name] for row in table]) for name in names})


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """Return an Arrow column of numbers, truth values or texts; mixed values become texts."""
    try:
        column = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    if pa.types.is_null(column.type):
        return column.cast(pa.string() if name == "error" else pa.float64())
    return column
