"""Norms as versions before objects stored them: a file for each part of each snapshot, and one manifest of them all."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from accounting.records.files import read_bytes
from accounting.records.private_files import write_private
from accounting.records.shards import NormSnapshot


def write_old_norms(directory: str, rows_per_part: int, *snapshots: NormSnapshot) -> None:
    """The norms of a run, or of its beginning."""
    lines: list[dict[str, Any]] = []
    for each in snapshots:
        for part, start in enumerate(range(0, max(len(each.example_ids), 1), rows_per_part)):
            rows = slice(start, start + rows_per_part)
            ids = np.asarray(each.example_ids, np.int64)[rows]
            name = f"step={each.step:08d}/part-{part:05d}.arrow"
            write_private(f"{directory}/{name}", _arrow_file(each, rows))
            stored = read_bytes(f"{directory}/{name}")
            lines.append(
                {
                    "step": each.step,
                    "part": part,
                    "rows": len(ids),
                    "first": int(ids[0]) if len(ids) else None,
                    "last": int(ids[-1]) if len(ids) else None,
                    "num_bytes": len(stored),
                    "sha256": hashlib.sha256(stored).hexdigest(),
                }
            )
    manifest = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_private(f"{directory}/manifest.jsonl", manifest.encode())


def _arrow_file(snapshot: NormSnapshot, rows: slice) -> bytes:
    columns: dict[str, NDArray[Any]] = {
        "example_id": np.asarray(snapshot.example_ids, np.int64),
        "group": np.asarray(snapshot.groups, np.int32),
        "norm": np.asarray(snapshot.norms, np.float32),
        "contribution": _not_below(np.asarray(snapshot.contributions)),
        "loss": np.asarray(snapshot.losses, np.float32),
    }
    table = pa.table({name: column[rows] for name, column in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd"))) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _not_below(values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """In 32 bits, rounded up."""
    rounded = values.astype(np.float32)
    return np.minimum(np.where(rounded < values, np.nextafter(rounded, np.float32(2)), rounded), np.float32(1))
