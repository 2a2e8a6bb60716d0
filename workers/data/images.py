"""Folders of pictures, one folder per class."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, count_of
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.workers.data.base import Indices, Source, Split, make_split, numbered, repeated
from dpsweep.workers.data.mapped import RowBlocks, RowForm, digest_of_parts, once_on_node
from dpsweep.workers.data.preparations import pixels
from dpsweep.workers.data.source_files import opened_picture, reading, require_path
from dpsweep.workers.data.tabular import attributes, intersected, intersected_indices

IMAGENET_SCALING = pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The common scaling of colour pictures, which models pre-trained on ImageNet expect."""

SideLength = Annotated[int, Field(ge=1, le=4096)]
"""Pixels of a side of a picture."""
A_PICTURE: Final = "a picture"
"""Name in errors of a file whose path tells of the example in it, such as by its class."""
_PARTS = ("train", "test")
_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow modes with colours in 0..255; in other modes, Pillow would clamp colours at 255."""


def image_folder(
    path: str,
    size: SideLength = 32,
    groups: str | None = None,
    classes: Sequence[str] | None = None,
    group_names: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    group: str | Sequence[str] = "group",
) -> Source:
    """Return pictures in one folder per class, below ``path``, or ``path/train`` and ``path/test`` if these are all.

    size: pictures are resized to size x size, in colour.
    groups: a CSV file with columns file (relative to ``path``) and group; without it the groups are the classes.
    group: name of the group column, if it is another; or several columns, such as ["sex", "race"], whose intersections
    are the groups.
    classes: declared class names.
    group_names: declared values of the group column; for several columns, {column: values}.
    Names that are not declared are taken from the folders and the CSV file, which is not private. A note tells it, and
    these groups are shown as "group 1", "group 2". Example ids follow the sorted file names. All pictures are held in
    memory.

    Raises: InvalidInput for folders, groups or pictures that do not fit; DataCorruption for unreadable files.
    """
    columns = group_columns("image_folder", groups, group, group_names)
    folder = require_path(path)
    parts = _parts(folder)
    listed = [_list(part) for part in parts]
    files = [file for part in listed for file, _ in part]
    class_names = tuple(classes or sorted({name for _, name in listed[0]}))
    labels = _encoded([name for part in listed for _, name in part], class_names, folder)
    names, members = class_names if classes else numbered("group", len(class_names)), labels
    learnt: tuple[Reason, ...] = ()
    if groups is not None:
        names, members, learnt = read_groups(Path(groups), folder, files, columns, group_names)
    train, test = divided(make_split(read_images(files, size), labels, members), list(map(len, listed)))
    reasons = learnt if classes else (*learnt, "classes_from_rows")
    return Source(folder.name, train, test, names, class_names, IMAGENET_SCALING, reasons=reasons)


def group_columns(source: str, groups: str | None, group: str | Sequence[str], group_names: object) -> tuple[str, ...]:
    """Return the attributes that ``group`` names.

    Raises: InvalidInput for ``group`` or ``group_names`` without ``groups``, the file with these attributes.
    """
    columns = attributes(source, group)
    if groups is None and (group_names is not None or group != "group"):
        what = "group" if group_names is None else "group_names"
        raise InvalidInput(
            f"`{what}` needs `groups`, the CSV file with the attributes of each picture; name it too. Without "
            "attributes, the groups are the classes, and pictures with masks have one group"
        )
    return columns


def read_groups(
    path: Path,
    folder: Path,
    files: list[Path],
    columns: Sequence[str],
    declared: Sequence[str] | Mapping[str, Sequence[str]] | None,
) -> tuple[tuple[str, ...], Indices, tuple[Reason, ...]]:
    """Return the intersections of the attributes ``columns`` of a CSV file as groups: their names as shown in results,
    the index of each picture's, and what was read off the rows. declared: values; None takes those found.
    """
    named = _groups(path, folder, files, columns)
    values = _group_values(named, declared)
    names = intersected(values)
    members = intersected_indices(named, values, f"groups of {path}: ")
    return (names, members, ()) if declared else (numbered("group", len(names)), members, ("groups_from_rows",))


def _encoded(labels: Sequence[str], names: Sequence[str], folder: Path) -> Indices:
    """Return the class folders of pictures as indices into ``names``. Raises: InvalidInput for other folders."""
    if unknown := sorted(set(labels) - set(names)):
        raise InvalidInput(
            f"some class folders of {folder} are not among those declared; declare them, or correct them"
        ) from PrivateDetail(f"{', '.join(map(repr, unknown))}; declared: {', '.join(names)}")
    position = {name: index for index, name in enumerate(names)}
    return np.array([position[label] for label in labels], dtype=np.int64)


def _parts(folder: Path) -> list[Path]:
    """Return the folders train and test if there are no others, else ``folder`` itself.

    Raises: InvalidInput when a class folder could also be a training or test set.
    """
    with _listing(folder):
        found = (entry.name for entry in folder.iterdir() if entry.is_dir())
        names = sorted(name for name in found if not name.startswith((".", "__")))  # files of other programs
    if set(names) == set(_PARTS):
        return [folder / name for name in _PARTS]
    if mistaken := [name for name in names if name.lower().removesuffix("ing") in _PARTS]:
        raise InvalidInput(
            f"{folder} holds a folder called like a training or test set beside others, so that it may be a class or a "
            "part; give a class another name, and for both parts have there train and test and no other folder"
        ) from PrivateDetail(f"{mistaken[0]!r} among the folders {', '.join(names)}")
    return [folder]


_NO_PICTURES = "{} holds no folder of pictures, or one without any; give one folder of pictures for each class"


@contextlib.contextmanager
def _listing(folder: Path) -> Iterator[None]:
    """Turn errors of a listing into one that names no class."""
    try:
        yield
    except OSError as error:
        what = f"{folder} cannot be listed ({os.strerror(error.errno)})" if error.errno else _NO_PICTURES.format(folder)
        raise InvalidInput(f"data source 'image_folder': {what}") from error  # whose text names the classes


def _list(folder: Path) -> list[tuple[Path, str]]:
    """Return each picture and its class, in the order of classes and files."""
    from torchvision.datasets.folder import ImageFolder  # late: importing torchvision takes seconds

    with _listing(folder):
        found = ImageFolder(str(folder))
    return [(Path(file), found.classes[label]) for file, label in found.samples]


def divided(whole: Split, sizes: Sequence[int]) -> tuple[Split, Split | None]:
    """Return the examples of the first part, and of the second, if there is one."""
    if len(sizes) == 1:
        return whole, None
    indices = np.arange(len(whole))
    return whole.select(indices[: sizes[0]]), whole.select(indices[sizes[0] :])


def _group_values(
    named: pa.Table, declared: Sequence[str] | Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Return the values of each attribute: declared, or the distinct ones in ``named``."""
    columns = named.column_names
    if isinstance(declared, Mapping):
        if set(declared) != set(columns):
            raise InvalidInput(f"`group_names` names {', '.join(declared)}, but `group` is {', '.join(columns)}")
        return {name: tuple(declared[name]) for name in columns}
    if declared and len(columns) > 1:
        raise InvalidInput(f"`group_names` must give the values of each of {', '.join(columns)}: {{column: [values]}}")
    return {name: tuple(declared or sorted(set(named[name].to_pylist()))) for name in columns}


def _groups(path: Path, folder: Path, files: list[Path], columns: Sequence[str]) -> pa.Table:
    """Return the attributes of each file, read from the CSV file ``path``."""
    needed = ("file", *columns)
    as_spelt = csv.ConvertOptions(column_types=dict.fromkeys(needed, pa.string()), strings_can_be_null=True)
    found = require_path(str(path))
    with reading(found):
        table = csv.read_csv(found, convert_options=as_spelt)
    if not set(needed) <= set(table.column_names):
        raise InvalidInput(
            f"{found} lacks a column of {' and '.join(needed)}; name them in its first line"
        ) from PrivateDetail(f"its columns are {', '.join(table.column_names)}")
    if repeat := repeated(table["file"].to_pylist()):
        raise InvalidInput(f"{found} has several lines for one file; keep one") from PrivateDetail(repeat)
    by_file = {row["file"]: tuple(row[name] for name in columns) for row in table.to_pylist()}
    grouped = {file: by_file.get(file.relative_to(folder).as_posix(), (None,)) for file in files}
    missing = [file for file, values in grouped.items() if None in values]
    if missing:
        raise InvalidInput(f"{found} gives no group for some pictures; add their lines") from PrivateDetail(
            f"{count_of(len(missing), 'picture')}, first {missing[0]}"
        )
    return pa.table({name: [values[place] for values in grouped.values()] for place, name in enumerate(columns)})


@dataclass(frozen=True)
class StoredPicture:
    """A picture inside of a table: the content that a file of it would have."""

    content: bytes
    table: Path


def read_images(files: Sequence[Path | StoredPicture], size: int) -> Tensor:
    """Return uint8 [n, 3, size, size], resized with bilinear interpolation. The trials of an embedded run share it."""
    refuse_links([file for file in files if isinstance(file, Path)])

    def blocks() -> RowBlocks:
        return ([read_image(file, size)[None].numpy()] for file in files)

    return once_on_node(lambda: _key(files, size), [RowForm(torch.uint8, (3, size, size))], len(files), blocks)[0]


def _key(files: Sequence[Path | StoredPicture], size: int) -> str:
    """Return a hash of all pictures and the size that they are scaled to."""
    contents = []
    for file in files:
        with reading(_place(file), A_PICTURE):
            content = file.content if isinstance(file, StoredPicture) else file.read_bytes()
            contents.append(hashlib.sha256(content).hexdigest())
    return digest_of_parts("pictures", str(size), *contents)


def refuse_links(files: Sequence[Path]) -> None:
    """Raise InvalidInput if two paths are links to the same file."""
    seen: dict[Path, Path] = {}
    for file in files:
        first = seen.setdefault(file.resolve(), file)
        if first is not file:
            raise InvalidInput(
                "two pictures are one, by a link; keep one of them, as whoever is there twice is protected half as well"
            ) from PrivateDetail(f"{first} and {file}")


def _place(file: Path | StoredPicture) -> Path:
    return file.table if isinstance(file, StoredPicture) else file


def read_image(file: Path | StoredPicture, size: int) -> Tensor:
    """Return one picture as of `read_images`, uint8 [3, size, size]."""
    from torchvision.transforms.functional import pil_to_tensor, resize  # late: importing torchvision takes seconds

    content = io.BytesIO(file.content) if isinstance(file, StoredPicture) else file
    with reading(_place(file), A_PICTURE), opened_picture(content) as picture:
        pixels: Tensor = pil_to_tensor(resize(colours(picture, str(_place(file))), [size, size]))
    return pixels


def colours(picture: Image.Image, place: str) -> Image.Image:
    """Return the picture as 8-bit RGB. place: its location, for errors.

    Raises: InvalidInput when its pixels have more than 8 bits, which the conversion would clamp.
    """
    if picture.mode not in _EIGHT_BIT:
        raise InvalidInput(
            f"a picture has pixels of mode {picture.mode}, but must have one of 8 bit ({', '.join(_EIGHT_BIT)}); "
            "scale them to 0..255 and store it again"
        ) from PrivateDetail(place)
    return picture.convert("RGB")
