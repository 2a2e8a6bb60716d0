"""CIFAR-10: the original Python batches, or Parquet files of JPEG pictures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dpsweep.accounting.errors import DataCorruption, PrivateDetail
from dpsweep.accounting.records.parquet_tables import read_parquet
from dpsweep.workers.data.base import Source, Split, make_split
from dpsweep.workers.data.images import colours
from dpsweep.workers.data.mapped import RowBlocks, RowForm, cached_columns, digest_of_parts
from dpsweep.workers.data.preparations import pixels
from dpsweep.workers.data.source_files import UNREADABLE, locate, opened_picture, reading

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def cifar10(root: str | None = None, cache: str | None = None) -> Source:
    """Return 50,000 + 10,000 colour pictures of 32 x 32 pixels; groups are the ten classes.

    Read from ``cifar-10-batches-py`` (the original) if it exists, else from ``cifar10-jpeg/train.parquet`` and
    ``test.parquet`` with columns image_jpeg and label. Pixels decoded from JPEG differ from the original: see the note.
    cache: a folder of this node for memory-mapped files of the decoded pictures, which all trials share. An embedded
    run has its own.
    """
    folder = locate("cifar10", ("cifar-10-batches-py", "cifar10-jpeg"), root, _download)
    notes: tuple[str, ...] = (f"pixels scaled by the published means {_MEAN} and standard deviations {_STD}",)
    if folder.name == "cifar10-jpeg":
        train = _read_jpegs(folder / "train.parquet", cache)
        test = _read_jpegs(folder / "test.parquet", cache, len(train))
        notes = ("pictures decoded from JPEG: not CIFAR-10's original pixels", *notes)
    else:
        train = _read_batches(folder, train=True)
        test = _read_batches(folder, train=False, first_id=len(train))
    return Source("cifar10", train, test, CLASSES, CLASSES, pixels(_MEAN, _STD), notes)


def _download(cache: Path) -> None:
    import torchvision  # late: importing it takes seconds

    torchvision.datasets.CIFAR10(root=str(cache), download=True)


def _read_batches(folder: Path, *, train: bool, first_id: int = 0) -> Split:
    import torchvision  # late: importing it takes seconds

    try:
        batches = torchvision.datasets.CIFAR10(root=str(folder.parent), train=train)
    except RuntimeError as error:
        raise DataCorruption(f"{folder} does not hold the published files of CIFAR-10: {error}") from error
    pictures = torch.from_numpy(batches.data).permute(0, 3, 1, 2).contiguous()
    return make_split(pictures, np.array(batches.targets, dtype=np.int64), first_id=first_id)


def _read_jpegs(path: Path, cache: str | None, first_id: int = 0) -> Split:
    with reading(path):
        table = read_parquet(path, ["image_jpeg", "label"])
    if table.num_rows == 0:
        raise DataCorruption(f"{path} holds no pictures; replace the file")
    if any(column.null_count for column in table.columns):
        raise DataCorruption(f"{path} has a picture without image_jpeg or label; replace the file")
    labels = table["label"].to_numpy().astype(np.int64)

    def decoded() -> RowBlocks:
        return ([_decode(jpeg.as_py(), path, row)[None]] for row, jpeg in enumerate(table["image_jpeg"]))

    def key() -> str:
        return digest_of_parts("cifar10", path.read_bytes())

    (pictures,), place = cached_columns(cache, key, [RowForm(torch.uint8, (3, 32, 32))], len(labels), decoded)
    return replace(make_split(pictures, labels, first_id=first_id), place=place)


def _decode(jpeg: bytes, path: Path, row: int) -> npt.NDArray[np.uint8]:
    """Return the picture as uint8 [3, 32, 32]."""
    try:
        with opened_picture(io.BytesIO(jpeg)) as picture:
            pixels = np.asarray(colours(picture, f"{path}, row {row}")).transpose(2, 0, 1)
    except UNREADABLE as error:
        error.add_note(f"row {row}")
        raise DataCorruption(f"{path} holds a picture that cannot be decoded; replace the file") from error
    if pixels.shape != (3, 32, 32):
        raise DataCorruption(
            f"{path} holds a picture whose shape is not (3, 32, 32); replace the file"
        ) from PrivateDetail(f"shape {pixels.shape} in row {row}")
    return pixels
