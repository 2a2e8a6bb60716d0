"""Folders of pictures, one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.csv as csv
import torch
from torch import Tensor

from accounting.errors import InvalidInput
from workers.data.base import Source, Split, encode, make_split, pixels
from workers.data.files import require_path

IMAGENET_SCALING = pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The usual scaling of colour pictures, and the one that models pre-trained on ImageNet expect."""


def image_folder(
    path: str,
    size: int = 32,
    groups: str | None = None,
    classes: Sequence[str] | None = None,
) -> Source:
    """Pictures in one folder per class, below ``path`` or below its ``train`` and ``test``.

    size: pictures are resized to size x size, colour. groups: a CSV file with columns file (relative to ``path``)
    and group; without it the classes are the groups. Example ids follow the sorted file names. All pictures are
    held in memory.
    """
    folder = require_path("image_folder", path)
    parts = [folder / name for name in ("train", "test") if (folder / name).is_dir()] or [folder]
    listed = [_list(part) for part in parts]
    class_names = tuple(classes) if classes else listed[0].class_names
    files = [file for part in listed for file in part.files]
    labels, _ = encode([name for part in listed for name in part.labels], class_names)
    group_labels, group_names = (labels, class_names) if groups is None else _groups(groups, folder, files)
    whole = make_split(read_images(files, size), labels, group_labels)
    train, test = _divide(whole, len(listed[0].files)) if len(parts) > 1 else (whole, None)
    return Source(folder.name, train, test, group_names, class_names, IMAGENET_SCALING)


@dataclass(frozen=True)
class _Listing:
    files: list[Path]
    labels: list[str]
    class_names: tuple[str, ...]


def _list(folder: Path) -> _Listing:
    from torchvision.datasets.folder import ImageFolder  # late: importing torchvision takes seconds

    try:
        found = ImageFolder(str(folder))
    except FileNotFoundError as error:
        raise InvalidInput(f"data source 'image_folder': {error}") from error
    names = tuple(found.classes)
    return _Listing([Path(file) for file, _ in found.samples], [names[label] for _, label in found.samples], names)


def _divide(whole: Split, train_size: int) -> tuple[Split, Split]:
    indices = np.arange(len(whole))
    return whole.select(indices[:train_size]), whole.select(indices[train_size:])


def _groups(path: str, folder: Path, files: list[Path]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    table = csv.read_csv(require_path("image_folder", path))
    if not {"file", "group"} <= set(table.column_names):
        raise InvalidInput(f"{path} has columns {', '.join(table.column_names)}, but needs file and group")
    by_file = dict(zip(table["file"].to_pylist(), (str(name) for name in table["group"].to_pylist()), strict=True))
    names = [file.relative_to(folder).as_posix() for file in files]
    missing = [name for name in names if name not in by_file]
    if missing:
        raise InvalidInput(f"{path} gives no group for {len(missing)} pictures, first {missing[0]!r}")
    return encode([by_file[name] for name in names])


def read_images(files: Sequence[Path], size: int) -> Tensor:
    """uint8 [n, 3, size, size], resized with bilinear interpolation."""
    if size < 1:
        raise InvalidInput(f"size is {size}, but pictures need at least 1 x 1 pixel")
    from torchvision.datasets.folder import default_loader  # late: importing torchvision takes seconds
    from torchvision.transforms.functional import pil_to_tensor, resize

    shape = [size, size]
    return torch.stack([pil_to_tensor(resize(default_loader(str(file)), shape)) for file in files])
