"""Pictures that a table lists: a column of files, with labels, groups and users in other columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as compute

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, count_of
from dpsweep.workers.data.base import Source, repeated
from dpsweep.workers.data.images import IMAGENET_SCALING, SideLength, StoredPicture, read_images
from dpsweep.workers.data.label_columns import TableTask, label_columns
from dpsweep.workers.data.owner_columns import OwnerColumns, UserColumns
from dpsweep.workers.data.source_files import require_path
from dpsweep.workers.data.spelling import CellValues, declared_groups
from dpsweep.workers.data.table import (
    Declared,
    Range,
    Roles,
    encoding_of,
    owned,
    read_alike,
    require_other,
    rows_left_out,
    used_columns,
    user_names,
)
from dpsweep.workers.data.table_files import read_table_file
from dpsweep.workers.data.tabular import attributes, complete_rows, holds_bytes
from dpsweep.workers.machine.folders import at_home


def image_table(
    path: str,
    image: str,
    label: str | Sequence[str],
    folder: str | None = None,
    size: SideLength = 32,
    task: TableTask = "classification",
    group: str | Sequence[str] | None = None,
    user: UserColumns = None,
    user_separator: str | None = None,
    test_path: str | None = None,
    classes: CellValues | None = None,
    groups: CellValues | Mapping[str, CellValues] | None = None,
    ranges: Mapping[str, Range] | None = None,
    encoding: str | None = None,
) -> Source:
    """Return the pictures whose files the column ``image`` of a .csv, .tsv, .jsonl or .parquet file names.

    A .parquet file may hold them itself: the bytes of each, or a field ``bytes``, as the package datasets stores them.
    folder: where these names start, by default the folder of each table; no file may lie outside of it, by its name or
    by a link. size: pictures are resized to size x size, in colour. label, task, group, user, user_separator,
    test_path, classes, groups, encoding, and ranges, of the labels of a regression: as in tables. Rows with a missing
    value are left out, and notes count them. Example ids count the rows of the table, then of ``test_path``. All
    pictures are held in memory.

    Raises: InvalidInput for unknown columns, undeclared values, files that are missing, outside or there twice, and
    pictures that do not fit; DataCorruption for unreadable files.
    """
    labels = label_columns(label, task)
    by = (
        ()
        if group is None and task != "classification"
        else attributes("image_table", labels if group is None else group)
    )
    declared = Declared(task, ranges or {}, {}, classes, declared_groups(by, groups))
    owners = OwnerColumns.of(user, user_separator)
    roles = Roles(labels, by, owners.column, (image,), frozenset((image,)))
    if image in (*labels, *by, *owners.names):
        raise InvalidInput(f"the column {image!r} is the image, and also a label, group or user; name another of both")
    texts = {image: [], **declared.texts(labels, by, owners.names)}
    if test_path is not None:
        require_other(test_path, path)
    paths = [path] if test_path is None else [path, test_path]
    found = [with_names(owned(read_table_file(each, texts, encoding), owners, each), image) for each in paths]
    tables = [used_columns(each, roles, texts, place) for (each, _), place in zip(found, paths, strict=True)]
    encoded = encoding_of(tables[0], replace(roles, features=()), declared)
    kept = [complete_rows(each) for each in tables]
    complete = [each.take(rows) for each, rows in zip(tables, kept, strict=True)]
    files = [
        _pictures(each[image], stored and stored.take(rows), folder, place)
        for each, (_, stored), rows, place in zip(complete, found, kept, paths, strict=True)
    ]
    if repeat := repeated([str(file) for part in files for file in part if isinstance(file, Path)]):
        raise InvalidInput(
            f"two rows of {path} have one picture; keep one, as whoever is there twice is protected half as well"
        ) from PrivateDetail(repeat)
    pictures = read_images([file for part in files for file in part], size).split(list(map(len, files)))
    users = user_names(tables, owners.column)
    starts = (0, tables[0].num_rows)
    splits = [
        encoded.joined(found, part, rows + first, users, encoded.labels.encode(part))
        for found, part, rows, first in zip(pictures, complete, kept, starts, strict=False)
    ]
    return Source(
        Path(path).stem,
        splits[0],
        splits[1] if len(splits) > 1 else None,
        encoded.group_names,
        encoded.labels.names,
        IMAGENET_SCALING,
        task=task,
        notes=rows_left_out(list(zip(tables, kept, strict=True)), encoded),
        reasons=encoded.reasons,
        columns={  # of `new_pictures.Pictures`
            "image": image,
            "size": size,
            **read_alike(encoded, declared, encoding),
        },
    )


def _pictures(
    names: pa.ChunkedArray, stored: pa.ChunkedArray | None, folder: str | None, table: str
) -> Sequence[Path | StoredPicture]:
    """Return the pictures of these names, or the ``stored`` ones. Raises: InvalidInput for a folder of the latter."""
    if stored is None:
        step = "set `folder` to one that holds all"
        return listed_files(names, Path(folder or at_home(table).parent), table, step)
    if folder is not None:
        raise InvalidInput(f"{table} holds its pictures itself, and names no files; leave `folder` out")
    return stored_pictures(stored, table)


def with_names(rows: pa.Table, image: str) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return the rows with names of pictures, and the pictures where the table holds these itself; then their names
    are numbers of rows.
    """
    if image not in rows.column_names:
        return rows, None  # refused with the columns that are there
    stored = rows[image]
    if not holds_bytes(stored.type):
        return rows, None
    if pa.types.is_struct(stored.type):
        stored = compute.struct_field(stored, "bytes")
    numbers = pa.array(map(str, range(rows.num_rows)), pa.string())
    named = compute.if_else(compute.is_valid(stored), numbers, pa.scalar(None, pa.string()))
    return rows.set_column(rows.column_names.index(image), image, named), stored


def stored_pictures(stored: pa.ChunkedArray, table: str) -> list[StoredPicture]:
    """Return the pictures that a table holds, none of them missing."""
    path = require_path(table)
    return [StoredPicture(content, path) for content in stored.to_pylist()]


def listed_files(names: pa.ChunkedArray, folder: Path, table: str, step: str) -> list[Path]:
    """Return the files of these names in ``folder``, without links.

    step: how to change the folder, for errors. Raises: InvalidInput for files that are missing or lie outside of it.
    """
    base = require_path(str(folder)).resolve()
    listed = [base / name for name in names.to_pylist()]
    if missing := [file for file in listed if not os.path.exists(file)]:  # False for a name that no file can have
        raise InvalidInput(
            f"some pictures that {table} names are not in {base}; correct the names, or {step}"
        ) from PrivateDetail(f"{count_of(len(missing), 'picture')} of {len(listed)}, first {missing[0]}")
    files = [file.resolve() for file in listed]
    if outside := [file for file in files if not file.is_relative_to(base)]:
        raise InvalidInput(
            f"some pictures that {table} names lie outside of {base}, by their names or by links; {step}"
        ) from PrivateDetail(f"{count_of(len(outside), 'picture')} of {len(listed)}, first {outside[0]}")
    return files
