"""Data that Python code has in memory: arrays, frames and data sets of torch, as a source, and as bytes.

The bytes are arrays in an ``npz`` file, read without running code.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils import data as torch_data

from dpsweep.accounting.errors import DataCorruption, InvalidInput, PrivateDetail, count_of
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.registry import build, nearest
from dpsweep.workers.data.base import Source, Split, make_split, repeated
from dpsweep.workers.data.owner_columns import owners_in, people_in
from dpsweep.workers.data.owners import Ids
from dpsweep.workers.data.preparations import made_preparation, plain_preparation, preparation_as_stored
from dpsweep.workers.data.table import table
from dpsweep.workers.dataset_description import NO_GROUPS

Values = npt.NDArray[Any]
_COLUMNS: Final = ("features", "labels", "groups", "example_ids", "user_ids")


def columns_of(data: object) -> tuple[Any, ...]:
    """Return features, labels and, where they are given, groups: of a tuple, or of a data set of torch, read once.

    Raises: InvalidInput for anything else.
    """
    match data:
        case torch_data.TensorDataset(tensors=(_, _) | (_, _, _) as tensors):
            return tensors
        case (_, _) | (_, _, _):
            return tuple(data)
        case torch_data.Dataset() if hasattr(data, "__len__"):
            rows = [data[at] for at in range(len(data))]
            features = torch.stack([torch.as_tensor(np.asarray(example)) for example, *_ in rows])
            others = zip(*(rest for _, *rest in rows), strict=True)
            return features, *(np.stack([np.asarray(each) for each in column]) for column in others)
    raise InvalidInput(
        f"data is {type(data).__name__}; give a pair of features and labels, or a data set of torch that has a length "
        "and whose items are such pairs"
    )


def as_tensor(values: Any, what: str) -> Tensor:
    """Return numbers as a tensor on the CPU. Raises: InvalidInput for other values."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise InvalidInput(
            f"{what} are of type {array.dtype} with {count_of(array.ndim, 'axis', 'axes')}; give numbers, one row an "
            "example"
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def source_of_arrays(
    features: npt.ArrayLike | Tensor,
    labels: npt.ArrayLike | Tensor,
    groups: npt.ArrayLike | None = None,
    users: Any = None,
    test: object = None,
    classes: Sequence[Any] | None = None,
    group_names: Sequence[str] | None = None,
    task: str = "classification",
) -> Source:
    """Return the source of examples in memory.

    features: numbers [n, ...], as the model takes them; whole numbers are tokens, bytes are pixels as they are.
    labels: [n], values of ``classes`` in classification; for another task as it takes them.
    groups: values of ``group_names`` or indices into them, or any values without these; names are then read off the
    rows, as are classes that are not given.
    users: the owner of each example, any values, or a list of its owners.
    test: further features, labels and groups.

    Raises: InvalidInput for columns of different lengths, and values that are not among the given ones.
    """
    parts = [(features, labels, groups)]
    if test is not None:
        further = columns_of(test)
        tested = further[2] if len(further) > 2 else None
        if groups is not None and tested is None:
            raise InvalidInput("the training examples have groups, and the test examples none; give test as 3 columns")
        parts.append((further[0], further[1], tested))
    columns, names, reasons = _labels([each for _, each, _ in parts], classes, task)
    members: Sequence[Values | None] = [None] * len(parts)
    called = names if task == "classification" else NO_GROUPS
    if groups is not None:
        members, called, of_groups = groups_of([each for _, _, each in parts], group_names)
        reasons = (*reasons, *of_groups)
    owners = None if users is None else _owners(users)
    splits, first = list[Split](), 0
    for (examples, _, _), column, group in zip(parts, columns, members, strict=True):
        splits.append(_split(as_tensor(examples, "features"), column, group, None if first else owners, first))
        first += len(splits[-1])
    return Source(
        "given",
        splits[0],
        splits[1] if len(splits) > 1 else None,
        called,
        names,
        preparation_as_stored(splits[0].features),
        task=task,
        reasons=reasons,
    )


def _split(rows: Tensor, labels: Values, groups: Values | None, owners: Ids | None, first: int) -> Split:
    """Return the split of these examples. first: id of the first one."""
    stored = rows.float() if rows.dtype in (torch.float64, torch.float16, torch.bfloat16) else rows
    if len({len(each) for each in (stored, labels, groups, owners) if each is not None}) > 1:
        raise InvalidInput(
            f"there are {count_of(len(stored), 'example')} and {count_of(len(labels), 'label')}; give features, "
            "labels, groups and users one row for each example"
        )
    return make_split(stored, labels, groups, first_id=first, user_ids=owners)


_Read = tuple[Sequence[Values], tuple[str, ...], tuple[Reason, ...]]
"""A column of each part; the names that its numbers are indices of; and what was read off the rows."""


def _labels(given: Sequence[Any], classes: Sequence[Any] | None, task: str) -> _Read:
    """Return the labels of each part as the task takes them, with the names of a model's outputs."""
    if task != "classification":
        found = [as_tensor(each, "labels").numpy() for each in given]
        found = [each[:, None] if each.ndim == 1 and each.dtype.kind == "f" else each for each in found]
        width = found[0].shape[1] if found[0].ndim > 1 else 1
        numbered = [f"target {place}" for place in range(width)]
        return found, tuple(map(str, numbered if classes is None else classes)), ()
    columns = [_values(each, "labels") for each in given]
    if any(each.ndim != 1 for each in columns):
        raise InvalidInput(
            "labels have several columns, but classification takes one class for each example; set task: "
            "multi_label for columns of 0 and 1, or task: regression for numbers"
        )
    known = np.unique(np.concatenate(columns)).tolist() if classes is None else list(classes)
    reasons: tuple[Reason, ...] = ("classes_from_rows",) if classes is None else ()
    return [_places(each, known, "labels", "classes") for each in columns], tuple(map(str, known)), reasons


def groups_of(given: Sequence[Any], named: Sequence[str] | None) -> _Read:
    """Return the groups of each part, and their names; read off the rows unless they are given."""
    columns = [_values(each, "groups") for each in given]
    if named is None:
        known = np.unique(np.concatenate(columns)).tolist()
        found = [_places(each, known, "groups", "names") for each in columns]
        return found, tuple(map(str, known)), ("groups_from_rows",)
    others = (value for each in columns if each.dtype.kind not in "biuf" for value in each.tolist())
    if any(isinstance(value, str) for value in others):
        columns = [_places(each, named, "groups", "group_names") for each in columns]
    return columns, tuple(named), ()


def source_of_frame(frame: Any, **params: Any) -> Source:
    """Return the rows of a data frame as the source ``parquet`` reads them, by the same declarations of columns."""
    if not hasattr(frame, "to_parquet"):
        raise InvalidInput(f"frame is of type {type(frame).__name__}; give a data frame of pandas")
    columns = [str(name) for name in frame.columns]
    if repeat := repeated(columns):
        raise InvalidInput("the data frame has more than one column of the same name; rename them") from PrivateDetail(
            f"the name {repeat!r}"
        )
    for name in _named(params):
        if name not in columns and not re.fullmatch(r".+\[\d+\]", name):
            index = "; it is an index: call reset_index() first" if name in frame.index.names else ""
            raise InvalidInput(f"the data frame has no column {name!r}{index}") from PrivateDetail(
                nearest(name, columns)
            )
    with parquet_of(frame) as path:
        return build({"frame": partial(table, path)}, "frame", params, "data")


@contextlib.contextmanager
def parquet_of(frame: Any) -> Iterator[str]:
    """Yield the path of a Parquet file that holds the data frame, as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "given.parquet")
        try:
            frame.to_parquet(path, index=False)
        except (ArithmeticError, NotImplementedError, TypeError, ValueError) as error:  # pyarrow's quote values
            raise InvalidInput(
                "a column of the data frame holds what cannot be stored as one type, such as numbers beside texts, "
                "whole numbers of more than 64 bits, or complex numbers; convert it, or drop it"
            ) from PrivateDetail(str(error))
        yield str(path)


_OF_COLUMNS: Final = (
    *("label", "group", "user", "features", "ranges", "categories", "numbers", "unscaled", "hashed", "ignore_case"),
)
"""Parameters of `table` that name columns."""


def _named(params: Mapping[str, Any]) -> list[str]:
    """Return the columns that the parameters of a table name."""
    values = [params[key] for key in _OF_COLUMNS if params.get(key) is not None]
    listed = (value if isinstance(value, Iterable) and not isinstance(value, str) else [value] for value in values)
    return [str(name) for names in listed for name in names]


def _owners(users: Any) -> Ids:
    """Return the owner of each example [n], or its owners [n, k] where ``users`` lists them."""
    rows = users.tolist() if isinstance(users, Tensor | np.ndarray) else list(users)
    if not any(isinstance(each, list | tuple) for each in rows):
        return np.unique(_values(users, "users"), return_inverse=True)[1].astype(np.int64)
    lists = [each if isinstance(each, list | tuple) else [each] for each in rows]
    _require_known(chain.from_iterable(lists), "users")
    listed = [list(map(str, owners)) for owners in lists]
    column = pa.chunked_array([pa.array(listed, pa.list_(pa.string()))])
    return owners_in(column, tuple(people_in(column).unique().to_pylist()))


def _values(column: Any, what: str) -> Values:
    """Return the values [n] of a column. Raises: InvalidInput for missing ones, and for several types."""
    values = column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)
    if values.dtype.kind not in "biu":
        given = values.ravel().tolist() if isinstance(column, np.ndarray | Tensor) else list(column)
        _require_known(given, what)
        if values.dtype.kind in "OU" and len({isinstance(each, str) for each in given}) > 1:
            raise InvalidInput(f"{what} are numbers beside texts, which may name the same; give all of them as texts")
    return values


def _require_known(values: Iterable[Any], what: str) -> None:
    """Raises: InvalidInput where a value is None, NaN or NaT, or pandas' NA, whose comparisons are no truth values."""
    if any(value is None or str(value == value) != "True" for value in values):
        raise InvalidInput(f"some {what} are missing (NaN); leave out their rows, or give them a value")


def _places(column: Values, values: Sequence[Any], what: str, named: str) -> Ids:
    """Return the places of values in a list. Raises: InvalidInput for others."""
    places = {value: place for place, value in enumerate(values)}
    listed = column.tolist()
    found = [places.get(each, -1) for each in listed]
    if -1 in found:
        raise InvalidInput(f"some {what} are not among the given {named}; give all of them")
    return np.array(found, dtype=np.int64)


def as_bytes(source: Source) -> bytes:
    """Return the source as bytes, for `source_of_bytes`. Raises: InvalidInput for a preparation of the user's own."""
    kept = plain_preparation(source.preparation)
    if kept is None:
        raise InvalidInput(
            f"the preparation of {source.name!r} is of type {type(source.preparation).__name__}, which cannot be "
            "stored; prepare the features first, or give a function that returns the source"
        )
    about = {
        "name": source.name,
        "group_names": source.group_names,
        "class_names": source.class_names,
        "preparation": {"kind": kept[0], **kept[1]},
        "notes": source.notes,
        "task": source.task,
        "reasons": source.reasons,
        "columns": source.columns,
    }
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
    for part, split in (("train", source.train), ("test", source.test)):
        for name in _COLUMNS if split is not None else ():
            column = getattr(split, name)
            arrays |= {} if column is None else {f"{part}.{name}": column.numpy()}
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]  # arrays by their names
    return out.getvalue()


def source_of_bytes(content: bytes) -> Source:
    """Return the source of `as_bytes`. Raises: DataCorruption for other bytes."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        about = parsed_json(arrays["about"].tobytes())
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataCorruption("the stored copy of the given data is damaged; run the sweep again") from error

    def split(part: str) -> Split | None:
        columns = {name: arrays.get(f"{part}.{name}") for name in _COLUMNS}
        if columns["features"] is None:
            return None
        return Split(*(None if each is None else torch.from_numpy(each) for each in columns.values()))  # type: ignore[arg-type]

    train = split("train")
    assert train is not None
    return Source(
        about["name"],
        train,
        split("test"),
        tuple(about["group_names"]),
        tuple(about["class_names"]),
        made_preparation(about["preparation"].pop("kind"), about["preparation"]),
        tuple(about["notes"]),
        about["task"],
        tuple(about["reasons"]),
        about["columns"],
    )
