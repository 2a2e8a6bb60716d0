"""Folders of pictures with one mask for each; a mask gives the class of every pixel of its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import Field

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, count_of
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.workers.data.base import Source, make_split
from dpsweep.workers.data.images import (
    IMAGENET_SCALING,
    SideLength,
    divided,
    group_columns,
    read_groups,
    read_images,
    refuse_links,
)
from dpsweep.workers.data.source_files import opened_picture, reading, require_path
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.tasks import IGNORED

_PARTS: Final = ("train", "test")
_PICTURES: Final = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_LOSSLESS: Final = (".bmp", ".png", ".tif", ".tiff")
"""File formats of masks: lossless ones."""
_MASK_MODES: Final = ("1", "L", "P", "I", "I;16")
"""Pillow modes with one number for each pixel."""
Pixel = Annotated[int, Field(ge=0, le=65_535)]


def image_masks(
    path: str,
    classes: Sequence[str],
    size: SideLength = 64,
    values: Sequence[Pixel] | None = None,
    ignored: Pixel | None = 255,
    groups: str | None = None,
    group_names: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    group: str | Sequence[str] = "group",
) -> Source:
    """Return pictures in ``path/images`` and a mask of the same name for each in ``path/masks``, for segmentation.

    Both folders may also be below ``path/train`` and ``path/test``. A mask is a PNG, TIFF or BMP file with one number
    for each pixel; for a palette image this is the index.
    `classes`: the declared names of classes.
    `values`: the number of each class in masks, by default 0, 1, 2, ... in the order of ``classes``.
    `ignored`: the number of pixels that are not counted, if any; a number that is also in ``values`` is counted.
    `size`: pictures are resized to size x size by bilinear interpolation, masks by the nearest pixel.
    `groups`, `group_names`, `group`: as in `image_folder`, with files such as ``images/a.png``; without them there is
    one group.
    All pictures are held in memory, 5 bytes for each pixel.

    Raises: InvalidInput for folders, groups, pictures or masks that do not fit; DataCorruption for unreadable files.
    """
    columns = group_columns("image_masks", groups, group, group_names)
    numbers = tuple(range(len(classes)) if values is None else values)
    if len(numbers) != len(classes) or len(set(numbers)) < len(numbers):
        raise InvalidInput(
            f"`values` has {count_of(len(numbers), 'number')}, but must have a different one for each of `classes`"
        )
    folder = require_path(path)
    parts = [folder / name for name in _PARTS] if all((folder / name).is_dir() for name in _PARTS) else [folder]
    listed = [_pictures(part) for part in parts]
    files = [file for part in listed for file in part]
    names: tuple[str, ...] = NO_GROUPS
    members, reasons = None, tuple[Reason, ...]()
    if groups is not None:
        names, members, reasons = read_groups(Path(groups), folder, files, columns, group_names)
    masks = [_mask_of(file) for file in files]
    refuse_links(masks)
    labels = np.stack([_read_mask(mask, size, numbers, ignored) for mask in masks])
    train, test = divided(make_split(read_images(files, size), labels, members), list(map(len, listed)))
    outputs = tuple(classes)
    return Source(folder.name, train, test, names, outputs, IMAGENET_SCALING, task="segmentation", reasons=reasons)


def _pictures(part: Path) -> list[Path]:
    """Return the pictures of a part, sorted by name. Raises: InvalidInput when there are none."""
    folder = part / "images"
    found = sorted(file for file in folder.glob("*") if file.suffix.lower() in _PICTURES)
    if not found:
        raise InvalidInput(
            f"there are no pictures in {folder}; image_masks needs the folders `images` and `masks`, there or below "
            "`train` and `test`"
        )
    return found


def _mask_of(picture: Path) -> Path:
    folder = picture.parent.parent / "masks"
    found = [file for suffix in _LOSSLESS if (file := folder / f"{picture.stem}{suffix}").exists()]
    if len(found) == 1:
        return found[0]
    amount = "several masks" if found else "no mask"
    raise InvalidInput(
        f"a picture has {amount} in {folder}; give each one of its name, as {', '.join(_LOSSLESS)}"
    ) from PrivateDetail(picture.name)


def _read_mask(file: Path, size: int, numbers: Sequence[int], ignored: int | None) -> npt.NDArray[np.int16]:
    """[size, size]: the class of each pixel, or `IGNORED` if it is not counted."""
    with reading(file, file.with_stem("*")), opened_picture(file) as mask:
        if mask.mode not in _MASK_MODES:
            raise InvalidInput(
                f"a mask has pixels of mode {mask.mode}, but must have one number for each pixel "
                f"({', '.join(_MASK_MODES)}); store it so"
            ) from PrivateDetail(str(file))
        pixels = np.asarray(mask.resize((size, size), Image.Resampling.NEAREST)).astype(np.int64)
    found = np.full(pixels.shape, -1, dtype=np.int16)
    if ignored is not None:
        found[pixels == ignored] = IGNORED
    for place, number in enumerate(numbers):
        found[pixels == number] = place
    if (found == -1).any():
        raise InvalidInput(
            f"a mask has a number besides {', '.join(map(str, numbers))}, those of `classes`; declare it by `values`, "
            "or as `ignored`"
        ) from PrivateDetail(f"{file} has {int(pixels[found == -1][0])}")
    return found
