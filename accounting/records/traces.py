"""Traces as Arrow files: one row per segment; facts about the whole run are in the schema's metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints

import pyarrow as pa

from dpsweep.accounting.errors import DataCorruption, DpsweepError
from dpsweep.accounting.mechanism.filters import FILTERS, IndividualFilter
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, plain_strategy, strategy_of
from dpsweep.accounting.mechanism.samplings import stored_kinds
from dpsweep.accounting.mechanism.trace import (
    GaussianRelease,
    PureRelease,
    Segment,
    Selection,
    SideQuery,
    Trace,
    require_supported,
)
from dpsweep.accounting.mechanism.units import EXAMPLE, Unit
from dpsweep.accounting.records.arrow_tables import read_table
from dpsweep.accounting.records.files import read_bytes, write_bytes_atomically
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.registry import with_fields

_RELEASES: Mapping[str, Callable[..., GaussianRelease | PureRelease]] = {
    "gaussian": GaussianRelease,
    "pure": PureRelease,
}
_RELEASE_NAMES = {GaussianRelease: "gaussian", PureRelease: "pure"}

_CLAIM = "recorded_contributions"

_NEXT = "restore it from a backup, or run the trial again"

_COLUMN_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}


def _sampling_columns() -> dict[str, pa.DataType]:
    """Return one column for each field of any sampling."""
    kinds = stored_kinds()
    return {field.name: _COLUMN_TYPES[get_type_hints(kind)[field.name]] for kind in kinds for field in fields(kind)}


def _schema() -> pa.Schema:
    return pa.schema(
        [
            ("start_step", pa.int64()),
            ("steps", pa.int64()),
            ("noise_multiplier", pa.float64()),
            ("sampling", pa.string()),
            *_sampling_columns().items(),
            ("side_queries", pa.list_(pa.struct([("name", pa.string()), ("noise_multiplier", pa.float64())]))),
        ]
    )


def write_trace(path: str, trace: Trace) -> None:
    """Store a trace with a checksum of its content.

    Raises: StorageError when the storage refuses, UnsupportedMechanism for a mechanism that no reader would know.
    """
    require_supported(trace)
    run = {
        "dataset_size": trace.dataset_size,
        "adjacency": trace.adjacency,
        _CLAIM: trace.contributions,
        "noise_follows_results": trace.noise_follows_results,
        **({"ended_by_results": True} if trace.ended_by_results else {}),
        **({"filter": _plain_filter(trace.filter)} if trace.filter else {}),
        **({"selection": asdict(trace.selection)} if trace.selection else {}),
        **({"strategy": plain_strategy(trace.strategy)} if trace.strategy != INDEPENDENT else {}),
        **({"unit": asdict(trace.unit)} if trace.unit != EXAMPLE else {}),
        "releases": [{"release": _RELEASE_NAMES[type(release)], **asdict(release)} for release in trace.releases],
    }
    table = pa.Table.from_pylist([_segment_row(segment) for segment in trace.segments], schema=_schema())
    table = table.replace_schema_metadata({"run": json.dumps(run), "sha256": _checksum(table.to_pylist(), run)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_bytes_atomically(path, sink.getvalue().to_pybytes())


def read_trace(path: str) -> Trace:
    """Return the stored trace.

    Raises: FileNotFoundError when there is none, `DataCorruption` when it is damaged or describes an impossible run.
    """
    data = read_bytes(path)
    try:
        table = read_table(data)
        if not table.schema.equals(_schema()):
            raise ValueError("other columns")
        rows, run = table.to_pylist(), parsed_json(table.schema.metadata[b"run"])
        intact = table.schema.metadata[b"sha256"].decode() == _checksum(rows, run)
    except (pa.ArrowException, ValueError, KeyError, TypeError, OSError):
        intact = False
    if not intact:
        raise DataCorruption(f"{path} is damaged; {_NEXT}")
    try:
        return _trace(rows, run)
    except DpsweepError as error:
        raise DataCorruption(f"{path} holds no possible run: {error}; {_NEXT}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataCorruption(f"{path} holds no trace of this version of dpsweep; {_NEXT}") from error


def _trace(rows: list[dict[str, Any]], run: dict[str, Any]) -> Trace:
    limit, selection = run.pop("filter", None), run.pop("selection", None)
    strategy, unit = run.pop("strategy", None), run.pop("unit", None)
    releases = [dict(release) for release in run.pop("releases")]
    contributions = run.pop(_CLAIM)
    return Trace(
        segments=tuple(_segment(row) for row in rows),
        releases=tuple(_RELEASES[release.pop("release")](**release) for release in releases),
        contributions=contributions,
        filter=None if limit is None else FILTERS[limit.pop("kind")](**limit),
        selection=None if selection is None else with_fields(get_args(Selection), selection),
        strategy=INDEPENDENT if strategy is None else strategy_of(strategy),
        unit=EXAMPLE if unit is None else Unit(**unit),
        **run,
    )


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {
        "start_step": segment.start_step,
        "steps": segment.steps,
        "noise_multiplier": segment.noise_multiplier,
        "sampling": segment.sampling.stored_name,
        **asdict(segment.sampling),
        "side_queries": [asdict(query) for query in segment.side_queries],
    }


def _segment(row: dict[str, Any]) -> Segment:
    kind = {kind.stored_name: kind for kind in stored_kinds()}[row["sampling"]]
    return Segment(
        start_step=row["start_step"],
        steps=row["steps"],
        sampling=kind(**{field.name: row[field.name] for field in fields(kind)}),
        noise_multiplier=row["noise_multiplier"],
        side_queries=tuple(SideQuery(**query) for query in row["side_queries"]),
    )


def _plain_filter(individual: IndividualFilter) -> dict[str, Any]:
    return {"kind": individual.stored_name, **asdict(individual)}


def _checksum(rows: list[dict[str, Any]], run: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([rows, run], sort_keys=True).encode()).hexdigest()
