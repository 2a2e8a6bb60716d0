"""Norm shards of earlier versions: damaged ones are refused; forged ones with a right manifest are refused or cost what
they hold."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from accounting.jobs import epsilons_of_part
from accounting.mechanism import Trace
from accounting.records.epsilons import Epsilons
from accounting.records.layout import TrialFiles
from accounting.records.shards import NormShards
from accounting.records.traces import read_trace
from tests.accounting.old_layout import write_old_norms
from tests.accounting.stored_trial import job_of, snapshot, write_trial
from tests.hostile.odd import Edit, edited, edits, odd_values
from tests.hostile.target import Target

DELTA = 1e-5
EXAMPLES, STEPS = 12, (0, 60)
_MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class Damaged:
    """A file of the shards was changed, took the place of another, or is gone. file and other: shares of all files."""

    file: float
    what: str
    other: float
    changes: list[Edit]


@dataclass(frozen=True)
class ForgedRows:
    """One column of one part holds other values, and the manifest agrees."""

    file: float
    column: str
    values: list[Any]


@dataclass(frozen=True)
class ForgedBytes:
    """The bytes of one part were changed, and the manifest agrees."""

    file: float
    changes: list[Edit]


@dataclass(frozen=True)
class ForgedManifest:
    """One entry of one line of the manifest holds another value."""

    line: float
    entry: str
    value: Any


Input = Damaged | ForgedRows | ForgedBytes | ForgedManifest


def inputs() -> st.SearchStrategy[Input]:
    shares = st.floats(0.0, 1.0, exclude_max=True)
    whats = st.sampled_from(("edit", "edit", "edit", "exchange", "delete"))
    columns = st.sampled_from(("example_id", "group", "norm", "contribution", "contribution", "loss"))
    numbers = st.one_of(
        st.floats(), st.floats(0.0, 1.0), st.integers(-(2**63), 2**63 - 1), st.none(), st.text(max_size=3)
    )
    entries = st.sampled_from(("step", "part", "rows", "first", "last", "num_bytes", "sha256", "more"))
    return st.one_of(
        st.builds(Damaged, shares, whats, shares, edits()),
        st.builds(ForgedRows, shares, columns, st.lists(numbers, min_size=1, max_size=EXAMPLES)),
        st.builds(ForgedBytes, shares, edits()),
        st.builds(ForgedManifest, shares, entries, odd_values()),
    )


def feed(given: Input, folder: Path) -> None:
    check(_changed(given), folder / "trial", holds_other_rows=isinstance(given, ForgedRows | ForgedBytes))


def check(files: Mapping[str, bytes], trial: Path, *, holds_other_rows: bool) -> None:
    """Account the trial that these files make. Fails where an epsilon is none, or smaller than for the right files."""
    shutil.rmtree(trial, ignore_errors=True)
    for name, content in files.items():
        (trial / name).parent.mkdir(parents=True, exist_ok=True)
        (trial / name).write_bytes(content)
    found = accounted(str(trial))
    for epsilons in found:
        assert not np.isnan(epsilons.upper).any(), "an epsilon is a number"
        assert epsilons.lower is None or (epsilons.upper >= epsilons.lower).all()
    if not holds_other_rows:
        for each, right in zip(found, untouched(), strict=True):
            np.testing.assert_array_equal(each.example_ids, right.example_ids)
            assert (each.upper >= right.upper).all(), "no example costs less than before"


def accounted(root: str) -> list[Epsilons]:
    """The epsilons of every part, as the accounting of a trained trial computes them."""
    files = TrialFiles(root)
    trace: Trace = read_trace(files.trace)
    shards = NormShards(files.norms)
    shards.require_complete(trace.dataset_size)
    parts = [shards.files(part) for part in shards.parts]
    return [epsilons_of_part(job_of(root, DELTA), part, trace) for part in parts]


@functools.cache
def untouched() -> list[Epsilons]:
    with tempfile.TemporaryDirectory() as folder:
        write_trial(folder, EXAMPLES, rows_per_part=8, steps=STEPS)
        return accounted(folder)


@functools.cache
def _stored() -> Mapping[str, bytes]:
    """The files of the trial, by their path in its folder."""
    with tempfile.TemporaryDirectory() as folder:
        write_trial(folder, EXAMPLES, rows_per_part=8, steps=STEPS)
        shutil.rmtree(TrialFiles(folder).norms)
        write_old_norms(TrialFiles(folder).norms, 8, *(snapshot(step, EXAMPLES) for step in STEPS))
        return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def _changed(given: Input) -> dict[str, bytes]:
    files = dict(_stored())
    shards = sorted(name for name in files if "norms" in name)
    (manifest,) = (name for name in shards if name.endswith(_MANIFEST))
    lines = files[manifest].splitlines(keepends=True)
    if isinstance(given, Damaged):
        name, other = shards[int(given.file * len(shards))], shards[int(given.other * len(shards))]
        if given.what == "edit":
            files[name] = edited(files[name], given.changes)
        elif given.what == "exchange":
            files[name], files[other] = files[other], files[name]
        else:
            del files[name]
    elif isinstance(given, ForgedRows | ForgedBytes):
        place = int(given.file * len(lines))
        record = json.loads(lines[place])
        name = f"{manifest.removesuffix(_MANIFEST)}step={record['step']:08d}/part-{record['part']:05d}.arrow"
        if isinstance(given, ForgedBytes):
            files[name] = edited(files[name], given.changes)
        else:
            files[name], ids = _with_column(files[name], given.column, given.values)
            record |= {"first": ids[0], "last": ids[-1]} if all(isinstance(each, int) for each in ids) else {}
        record |= {"num_bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        lines[place] = _line(record)
        files[manifest] = b"".join(lines)
    else:
        place = int(given.line * len(lines))
        lines[place] = _line(json.loads(lines[place]) | {given.entry: given.value})
        files[manifest] = b"".join(lines)
    return files


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"


def _with_column(data: bytes, name: str, values: list[Any]) -> tuple[bytes, list[Any]]:
    """The file with ``values`` repeated down a column, as texts where they do not fit; and its example ids."""
    table = pa.ipc.open_file(data).read_all()
    place = table.schema.names.index(name)
    table = table.set_column(place, name, repeated(values, len(table), table.schema.field(name).type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes()), table.column("example_id").to_pylist()


def repeated(values: list[Any], rows: int, kind: pa.DataType) -> pa.Array:
    """``values`` again and again, as texts where they do not fit."""
    column = [values[row % len(values)] for row in range(rows)]
    try:
        return pa.array(column, kind)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return pa.array([repr(value) for value in column])


SHARDS = Target("shards", inputs(), feed)
