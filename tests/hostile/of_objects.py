"""Norms in objects: damaged ones are refused; forged ones whose hashes agree are refused or cost what they hold."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from dpsweep.accounting.jobs.examples import epsilons_of_part
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.accounting.records.part_files import NORM_SCHEMA
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from tests.accounting.stored_trial import job_of, write_trial
from tests.hostile.odd import Edit, edited, edits, odd_values
from tests.hostile.target import Target

DELTA = 1e-5
EXAMPLES, STEPS = 12, (0, 60)
_MAGIC = b"ARROW1\0\0"
_NORMS, _COMPLETE = "private/norms/", "private/norms/complete.json"


@dataclass(frozen=True)
class DamagedFile:
    """A file was changed, took the place of another, or is gone. file and other: shares of all files."""

    file: float
    what: str
    other: float
    changes: list[Edit]


@dataclass(frozen=True)
class ForgedBatch:
    """One column of the batch of a part holds other values, and all hashes agree."""

    step: int
    part: int
    column: str
    values: list[Any]


@dataclass(frozen=True)
class ForgedPiece:
    """The bytes of a piece of an object were changed, and all hashes agree."""

    step: int
    piece: int
    changes: list[Edit]


@dataclass(frozen=True)
class ForgedEntry:
    """An entry of a manifest holds another value, and its checksum agrees. step: None for what completes the run."""

    step: int | None
    entry: str
    value: Any


Input = DamagedFile | ForgedBatch | ForgedPiece | ForgedEntry


def inputs() -> st.SearchStrategy[Input]:
    shares, steps = st.floats(0.0, 1.0, exclude_max=True), st.sampled_from(STEPS)
    whats = st.sampled_from(("edit", "edit", "edit", "exchange", "delete"))
    columns = st.sampled_from(("example_id", "group", "norm", "contribution", "contribution", "loss"))
    numbers = st.one_of(
        st.floats(), st.floats(0.0, 1.0), st.integers(-(2**63), 2**63 - 1), st.none(), st.text(max_size=3)
    )
    entries = st.sampled_from(
        ("step", "number", "previous", "rows", "rows_per_part", "objects", "snapshots", "last", "more")
    )
    values = st.lists(numbers, min_size=1, max_size=EXAMPLES)
    return st.one_of(
        st.builds(DamagedFile, shares, whats, shares, edits()),
        st.builds(ForgedBatch, steps, st.integers(0, 1), columns, values),
        st.builds(ForgedPiece, steps, st.integers(0, 1), edits()),
        st.builds(ForgedEntry, st.sampled_from((None, *STEPS)), entries, odd_values()),
    )


def feed(given: Input, folder: Path) -> None:
    check(_changed(given), folder / "trial", holds_other_rows=isinstance(given, ForgedBatch | ForgedPiece))


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
        return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def _changed(given: Input) -> dict[str, bytes]:
    files = dict(_stored())
    if isinstance(given, DamagedFile):
        norms = sorted(name for name in files if name.startswith(_NORMS))
        name, other = norms[int(given.file * len(norms))], norms[int(given.other * len(norms))]
        if given.what == "edit":
            files[name] = edited(files[name], given.changes)
        elif given.what == "exchange":
            files[name], files[other] = files[other], files[name]
        else:
            del files[name]
    elif isinstance(given, ForgedBatch):
        _replace(files, given.step, given.part, lambda piece: _with_column(piece, given.column, given.values))
    elif isinstance(given, ForgedPiece):
        _replace(files, given.step, given.piece, lambda piece: edited(piece, given.changes))
    else:
        name = _COMPLETE if given.step is None else _manifest(given.step)
        files[name] = _sealed(_opened(files[name]) | {given.entry: given.value})
    return files


def _replace(files: dict[str, bytes], step: int, piece: int, change: Callable[[bytes], bytes]) -> None:
    """Change a piece, and make the manifests from there on agree."""
    name = f"{_NORMS}step={step:08d}/object-00000.arrow"
    values = _opened(files[_manifest(step)])
    (listed,) = values["objects"]
    ends = [sum(listed["sizes"][: place + 1]) for place in range(len(listed["sizes"]))]
    pieces = [files[name][end - size : end] for end, size in zip(ends, listed["sizes"], strict=True)]
    pieces[piece] = change(pieces[piece])
    files[name] = b"".join(pieces)
    digests = "".join(hashlib.sha256(each).hexdigest() for each in pieces)
    values["objects"] = [{"sizes": [len(each) for each in pieces], "digests": digests}]
    files[_manifest(step)] = _sealed(values)
    previous = ""
    for each in STEPS:
        values = _opened(files[_manifest(each)]) | {"previous": previous}
        files[_manifest(each)] = _sealed(values)
        previous = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    files[_COMPLETE] = _sealed({"snapshots": len(STEPS), "last": previous})


def _manifest(step: int) -> str:
    return f"{_NORMS}step={step:08d}/manifest.json"


def _opened(content: bytes) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(content)
    del values["sha256"]
    return values


def _sealed(values: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return json.dumps({**values, "sha256": checksum}).encode()


def _with_column(piece: bytes, name: str, values: list[Any]) -> bytes:
    """The batch with ``values`` repeated down a column, alone: other pieces hold what surrounds it."""
    file = piece if piece.startswith(_MAGIC) else _MAGIC + NORM_SCHEMA.serialize().to_pybytes() + piece
    batch = pa.ipc.open_stream(file[len(_MAGIC) :]).read_next_batch()
    column = repeated(values, batch.num_rows, NORM_SCHEMA.field(name).type)
    columns = {each: column if each == name else batch.column(each) for each in NORM_SCHEMA.names}
    return bytes(pa.record_batch(columns).serialize().to_pybytes())


def repeated(values: list[Any], rows: int, kind: pa.DataType) -> pa.Array:
    """``values`` again and again, as texts where they do not fit."""
    column = [values[row % len(values)] for row in range(rows)]
    try:
        return pa.array(column, kind)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return pa.array([repr(value) for value in column])


OBJECTS = Target("objects", inputs(), feed)
