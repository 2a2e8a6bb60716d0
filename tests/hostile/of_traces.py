"""Traces: damaged ones are refused, and forged ones with a right checksum are refused or cost what they say."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from hypothesis import strategies as st

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.records.traces import read_trace, write_trace
from tests.hostile.floor import assert_pays_for_a_step
from tests.hostile.odd import Edit, edited, edits, odd_values, places_in
from tests.hostile.target import Target

DELTA = 1e-5
_POISSON = PoissonSampling(0.05)
TRACES = (
    Trace(50, (Segment(0, 60, _POISSON, 1.5), Segment(60, 60, _POISSON, 1.2, (SideQuery("counts", 8.0),)))),
    Trace(100, (Segment(0, 30, ShuffledSampling(10), 2.0),), adjacency="zero_out"),
    Trace(1000, (Segment(0, 9, FixedBatchSampling(1000, 50), 3.0),), releases=(GaussianRelease("mean", 4.0),)),
    Trace(1000, (Segment(0, 9, TruncatedPoissonSampling(1000, 0.05, 90), 3.0),), noise_follows_results=True),
    Trace(1000, (Segment(0, 9, _POISSON, 1.0),), filter=RenyiFilter(2.0, 8)),
    Trace(20, (), releases=(PureRelease("histogram", 0.5), GaussianRelease("mean", 4.0))),
)


@dataclass(frozen=True)
class Damaged:
    """One of `TRACES` whose file was changed."""

    trace: int
    changes: list[Edit]


@dataclass(frozen=True)
class Forged:
    """One of `TRACES` with other content, under a right checksum. place: of a value of it, as a share of them all."""

    trace: int
    place: float
    what: Literal["replace", "delete", "repeat"]
    value: Any


def inputs() -> st.SearchStrategy[Damaged | Forged]:
    traces, places = st.integers(0, len(TRACES) - 1), st.floats(0.0, 1.0, exclude_max=True)
    what = st.sampled_from(("replace", "replace", "replace", "delete", "repeat"))
    return st.one_of(st.builds(Damaged, traces, edits()), st.builds(Forged, traces, places, what, odd_values()))


def feed(given: Damaged | Forged, folder: Path) -> None:
    file = folder / "trace.arrow"
    if isinstance(given, Damaged):
        file.write_bytes(edited(stored(given.trace), given.changes))
        assert read_trace(str(file)) == TRACES[given.trace], "what is read is what was written"
        return
    file.write_bytes(forged(given))
    trace = read_trace(str(file))
    found = account(trace, DELTA)
    if trace.noise_follows_results and trace.filter is None and found.is_private:
        assert found.kind == "estimate"
    assert_pays_for_a_step(trace, found.epsilon, DELTA)


@functools.cache
def stored(place: int) -> bytes:
    """The file of one of the traces."""
    with tempfile.TemporaryDirectory() as folder:
        write_trace(f"{folder}/trace.arrow", TRACES[place])
        return Path(folder, "trace.arrow").read_bytes()


@functools.cache
def _content(place: int) -> dict[str, Any]:
    table = pa.ipc.open_file(stored(place)).read_all()
    return {"rows": table.to_pylist(), "run": json.loads(table.schema.metadata[b"run"]), "schema": table.schema}


def forged(given: Forged) -> bytes:
    """The file of a changed content; columns that hold other types than they should get the type of what they hold."""
    original = _content(given.trace)
    content = copy.deepcopy({"rows": original["rows"], "run": original["run"]})
    places = [place for place in places_in(content) if place[0] is not content]
    holder, key = places[int(given.place * len(places))]
    if given.what == "replace":
        holder[key] = given.value
    elif given.what == "delete":
        del holder[key]
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = given.value
    table = _table(content["rows"], original["schema"])
    rows, run = table.to_pylist(), json.dumps(content["run"])
    seal = hashlib.sha256(json.dumps([rows, json.loads(run)], sort_keys=True).encode()).hexdigest()
    table = table.replace_schema_metadata({"run": run, "sha256": seal})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _table(rows: Any, schema: pa.Schema) -> pa.Table:
    """The rows under their schema, else under one of their own, else none of them."""
    for attempt in (schema, None):
        try:
            return pa.Table.from_pylist(rows, schema=attempt)
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return schema.empty_table()


TRACE_FILES = Target("traces", inputs(), feed)
