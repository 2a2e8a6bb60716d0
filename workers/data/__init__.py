"""Data sources by name, and how a source is split into the data set of a trial."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.sealed import read_private
from dpsweep.workers.data.adult import adult
from dpsweep.workers.data.base import (
    Dataset,
    Source,
    Split,
    as_targets,
    cut,
    make_split,
)
from dpsweep.workers.data.bundled import breast_cancer, breast_cancer_wisconsin, digits
from dpsweep.workers.data.cifar import cifar10
from dpsweep.workers.data.dutch import dutch
from dpsweep.workers.data.encoder import padding_beside
from dpsweep.workers.data.given import (
    as_bytes,
    as_tensor,
    columns_of,
    groups_of,
    parquet_of,
    source_of_arrays,
    source_of_bytes,
    source_of_frame,
)
from dpsweep.workers.data.idx import fashion_mnist, mnist
from dpsweep.workers.data.images import IMAGENET_SCALING, image_folder
from dpsweep.workers.data.label_columns import TableTask
from dpsweep.workers.data.listed_images import image_table
from dpsweep.workers.data.mapped import RowForm, once_on_node
from dpsweep.workers.data.masks import image_masks
from dpsweep.workers.data.new_pictures import Pictures
from dpsweep.workers.data.new_rows import Columns, NewRows
from dpsweep.workers.data.new_texts import Texts
from dpsweep.workers.data.owners import are_shared, dependent_rows, ownership, rows_of_owners
from dpsweep.workers.data.preparations import (
    Preparation,
    Scaling,
    Tokens,
    made_preparation,
    pixels,
    plain_preparation,
    preparation_as_stored,
)
from dpsweep.workers.data.row_readers import RowReader, reader_of_rows
from dpsweep.workers.data.source_files import require_path
from dpsweep.workers.data.table import table
from dpsweep.workers.data.table_profile import FEW_ROWS, ColumnProfile, TableProfile, profile_table
from dpsweep.workers.data.tabular import NORM_OF_TEXT
from dpsweep.workers.data.texts import text
from dpsweep.workers.data.utkface import utkface
from dpsweep.workers.dataset_description import DatasetDescription, RowsKept, RowsPerUser
from dpsweep.workers.machine.devices import torch_defaults
from dpsweep.workers.own_code.imports import (
    NO_CODE,
    UserCode,
    blamed_on,
    build_named,
    with_checked_types,
)
from dpsweep.workers.own_code.own_sources import GIVEN
from dpsweep.workers.spec import DataSpec

_SOURCES: Mapping[str, Callable[..., Source]] = {
    "adult": adult,
    "breast_cancer": breast_cancer,
    "breast_cancer_wisconsin": breast_cancer_wisconsin,
    "cifar10": cifar10,
    "csv": table,
    "digits": digits,
    "dutch": dutch,
    "fashion_mnist": fashion_mnist,
    "image_folder": image_folder,
    "image_masks": image_masks,
    "image_table": image_table,
    "mnist": mnist,
    "parquet": table,
    "text": text,
    "utkface": utkface,
}
SOURCES: Mapping[str, Callable[..., Source]] = {
    name: blamed_on(name, "data source")(with_checked_types(load)) for name, load in _SOURCES.items()
}
"""Data sources by name. The parameters of a source are the arguments of its function."""


def load_source(spec: DataSpec, code: UserCode = NO_CODE) -> Source:
    """Return the source before any split: registered, or ``module:function(**params) -> Source`` from the user's
    ``code``.

    Call it within `torch_defaults`. Raises: see `load_dataset`.
    """
    if spec.name == GIVEN:
        return _given(spec, code)
    source = build_named(SOURCES, spec.name, spec.params, "data source", code)
    if not isinstance(source, Source):
        raise InvalidInput(f"data source {spec.name!r} returned {type(source).__name__}, but must return a Source")
    return source


def _given(spec: DataSpec, code: UserCode) -> Source:
    """Return the data that Python code gave, from memory or from the private copy that workers read."""
    called = spec.params.get("called")
    found = next((each for each in code.data if each.called == called), None)
    if found is None:
        raise InvalidInput(
            f"the data {called!r} were given in Python and are not kept; give them again: "
            "dpsweep.run({..., 'data': ...})"
        )
    return source_of_bytes(found.content if found.path is None else read_private(found.path))


@torch_defaults()
def load_dataset(spec: DataSpec, code: UserCode = NO_CODE) -> Dataset:
    """Load a source and split it. Equal specs give equal data sets on every machine.

    Raises:
        InvalidInput: unknown source, key or group; impossible split; data not found (with the paths that were tried);
            the user's own source whose module is not in ``code``.
        DataCorruption: a file cannot be read or decoded.
    """
    return cut(load_source(spec, code), spec)


def describe(dataset: Dataset, caps: Collection[int] = ()) -> DatasetDescription:
    """Return the description of a data set. caps: most rows per user that trials ask for, for `rows_kept`."""
    sizes, test_sizes = (
        tuple(np.bincount(part.groups.numpy(), minlength=dataset.num_groups).tolist())
        for part in (dataset.train, dataset.test)
    )
    tested = None if dataset.test.user_ids is None else dependent_rows(dataset.test.user_ids)
    return DatasetDescription(
        name=dataset.name,
        train_size=len(dataset.train),
        test_size=len(dataset.test),
        public_size=0 if dataset.public is None else len(dataset.public),
        group_names=dataset.group_names,
        group_sizes=sizes,
        test_group_sizes=test_sizes,
        class_names=dataset.class_names,
        feature_shape=dataset.feature_shape,
        notes=dataset.notes,
        task=dataset.task,
        reasons=dataset.reasons,
        rows_per_user=rows_per_user(dataset.train),
        rows_kept=_rows_kept(dataset.train.user_ids, caps),
        test_users=None if tested is None else len(np.unique(tested)),
        test_group_users=() if tested is None else _users_by_group(tested, dataset),
        shared_users=shared_users(dataset),
    )


def _rows_kept(owners: Tensor | None, caps: Collection[int]) -> RowsKept | None:
    if owners is None or not are_shared(owners):
        return None
    largest = int(np.unique(ownership(owners)[1], return_counts=True)[1].max(initial=1))
    tried = {*caps, *(min(most, largest) for most in _CAPS)} if caps else ()
    return tuple((most, len(rows_of_owners(owners, most))) for most in sorted(tried))


_CAPS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows per user among which a plan recommends one, where rows have several owners."""


def _users_by_group(owners: npt.NDArray[np.int64], dataset: Dataset) -> tuple[int, ...]:
    groups = dataset.test.groups.numpy()
    return tuple(len(np.unique(owners[groups == group])) for group in range(dataset.num_groups))


def shared_users(dataset: Dataset) -> int:
    """Return how many users own training and test examples, which is private; 0 if either names no users.

    A test set that was split off here shares none.
    """
    train, test = dataset.train.user_ids, dataset.test.user_ids
    return 0 if train is None or test is None else len(np.intersect1d(ownership(train)[1], ownership(test)[1]))


def rows_per_user(split: Split) -> RowsPerUser:
    """Return how many users have how many rows of ``split``; empty if the data name no users."""
    if split.user_ids is None:
        return ()
    _, counts = np.unique(ownership(split.user_ids)[1], return_counts=True)
    rows, users = np.unique(counts, return_counts=True)
    return tuple(zip(rows.tolist(), users.tolist(), strict=True))


__all__ = [
    "FEW_ROWS",
    "IMAGENET_SCALING",
    "NORM_OF_TEXT",
    "SOURCES",
    "ColumnProfile",
    "Columns",
    "Dataset",
    "NewRows",
    "Pictures",
    "Preparation",
    "RowForm",
    "RowReader",
    "Scaling",
    "Source",
    "Split",
    "TableProfile",
    "TableTask",
    "Texts",
    "Tokens",
    "are_shared",
    "as_bytes",
    "as_targets",
    "as_tensor",
    "columns_of",
    "dependent_rows",
    "describe",
    "groups_of",
    "load_dataset",
    "load_source",
    "made_preparation",
    "make_split",
    "once_on_node",
    "ownership",
    "padding_beside",
    "parquet_of",
    "pixels",
    "plain_preparation",
    "preparation_as_stored",
    "profile_table",
    "reader_of_rows",
    "require_path",
    "rows_of_owners",
    "rows_per_user",
    "shared_users",
    "source_of_arrays",
    "source_of_frame",
]
