"""Data bundled with scikit-learn, without download: handwritten digits (1797 images of 8 x 8), and breast cancer."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as csv

from dpsweep.workers.data.base import Source, make_split
from dpsweep.workers.data.preparations import Scaling
from dpsweep.workers.data.source_files import downloads, locate, reading, require_row_count
from dpsweep.workers.data.tabular import Numeric, complete_rows, encoded_columns, indices


def digits() -> Source:
    """Return 1797 real images, pixel values 0..16 scaled to 0..1; groups are the ten digits."""
    images, labels = _read()
    names = tuple(str(digit) for digit in range(10))
    return Source("digits", make_split(images.copy(), labels.copy()), None, names, names, Scaling(scale=(16.0,)))


@functools.cache
def _read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels, cached for all trials of a process, because parsing the text file takes long."""
    table = _shipped("digits.csv.gz").astype(np.int64)
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1]


def _shipped(name: str, header_lines: int = 0) -> npt.NDArray[np.float64]:
    """Return a table of numbers that scikit-learn ships, read without importing scikit-learn, which takes a second.

    Raises: DataCorruption when this installation of scikit-learn has no such file, or a damaged one.
    """
    package = importlib.util.find_spec("sklearn")
    path = Path((package and package.origin) or "sklearn").parent / "datasets" / "data" / name
    with reading(path):
        options = csv.ReadOptions(autogenerate_column_names=True, skip_rows=header_lines, use_threads=False)
        return np.column_stack([column.to_numpy() for column in csv.read_csv(path, read_options=options).columns])


# fmt: off
_PUBLISHED_RANGES = np.array([
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163),
    (0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097),
    (0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031),
    (0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03),
    (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223),
    (0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208),
])

# fmt: on
"""Minimum and maximum of each of the 30 attributes, as printed in the data set's description."""
_DOWNLOAD = downloads(
    "https://archive.ics.uci.edu/ml/machine-learning-databases/breast-cancer-wisconsin/",
    "breast-cancer-wisconsin",
    {"breast-cancer-wisconsin.data": "52b89051b9bd37a91a54e8570b963719"},
)
_SCORES = (
    "clump_thickness",
    "cell_size_uniformity",
    "cell_shape_uniformity",
    "marginal_adhesion",
    "epithelial_cell_size",
    "bare_nuclei",
    "bland_chromatin",
    "normal_nucleoli",
    "mitoses",
)


def breast_cancer() -> Source:
    """Return 569 rows of 30 attributes in [0, 1], by published ranges; groups are the two diagnoses."""
    table = _shipped("breast_cancer.csv", header_lines=1)
    low, high = _PUBLISHED_RANGES.T
    rows = np.clip((table[:, :-1] - low) / (high - low), 0.0, 1.0).astype(np.float32)
    names = ("malignant", "benign")
    return Source("breast_cancer", make_split(rows, table[:, -1].astype(np.int64)), None, names, names)


def breast_cancer_wisconsin(root: str | None = None) -> Source:
    """Return the 683 complete rows of 699: nine scores from 1 to 10, scaled to [0, 1]; groups are the two diagnoses."""
    names = ("breast-cancer-wisconsin/breast-cancer-wisconsin.data", "breast-cancer-wisconsin.data")
    path = locate("breast_cancer_wisconsin", names, root, _DOWNLOAD)
    fields = ("id", *_SCORES, "diagnosis")
    with reading(path):
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(column_names=fields),
            convert_options=csv.ConvertOptions(null_values=["?"], column_types=dict.fromkeys(fields, pa.int64())),
        )
    require_row_count(path, table.num_rows, 699)
    rows = complete_rows(table)
    complete = table.take(rows)
    split = make_split(
        encoded_columns(complete, [Numeric(score, 1, 10) for score in _SCORES]),
        indices(complete["diagnosis"], ("2", "4"), "diagnosis"),
        example_ids=rows,
    )
    diagnoses = ("benign", "malignant")
    note = "rows with an unknown value are left out"
    return Source("breast_cancer_wisconsin", split, None, diagnoses, diagnoses, notes=(note,))
