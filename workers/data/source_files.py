"""Locates the files of a data source: in a folder named by the user, in ``DPSWEEP_DATA``, or downloaded to a cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final, TypeVar

import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from dpsweep.accounting.errors import DataCorruption, DpsweepError, InvalidInput, count_of
from dpsweep.accounting.registry import nearest
from dpsweep.workers.machine.folders import at_home, user_cache

T = TypeVar("T")
DATA_VARIABLE = "DPSWEEP_DATA"

PICTURES: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats of pictures, by their content: Pillow would hand PostScript of any name to Ghostscript, which runs it."""

UNREADABLE = (
    *(pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError),
    *(SyntaxError, struct.error, Image.DecompressionBombError),  # damaged or extremely large pictures
)
"""Errors of libraries when a file cannot be read or decoded."""
_DAMAGED: Final = (ValueError, SyntaxError, EOFError, struct.error)
"""Errors of Pillow for damaged pictures, and for texts in them that unfold to megabytes; the others are OSErrors."""

Download = Callable[[Path], object]
"""A function that downloads the files of a source into the given folder."""


def locate(source: str, names: tuple[str, ...], root: str | None, download: Download | None = None) -> Path:
    """Return the first of the relative paths ``names`` that exists, as an absolute path.

    If the user names a folder, by ``root`` or ``DPSWEEP_DATA``, only this folder is searched. Otherwise the cache is
    searched, and searched again after ``download`` if nothing was found.

    Raises:
        InvalidInput: nothing was found, or the download failed; the message gives the paths and the next step.
    """
    named = root or os.environ.get(DATA_VARIABLE)
    folder = at_home(named).absolute() if named else user_cache()
    if folder is None:
        raise InvalidInput(f"data source {source!r}: this user has no home, so no cache; set {DATA_VARIABLE}")
    found = _first(folder, names)
    if found is None and named is None and download is not None:
        _fetch(source, download, folder)
        found = _first(folder, names)
    if found is None:
        looked = " or ".join(str(folder / name) for name in names)
        raise InvalidInput(f"data source {source!r}: there is no {looked}; {_next_step(named, download)}")
    return found


def require_path(path: str) -> Path:
    """Return ``path`` as an absolute path. Raises: InvalidInput when it does not exist."""
    absolute = at_home(path).absolute()
    if not os.path.exists(absolute):  # False for a name that is too long
        raise InvalidInput(f"there is no {absolute}; give the path of the data, from the working directory or absolute")
    return absolute


def reader_of(path: Path, readers: Mapping[str, T]) -> T:
    """Return the reader for the file's extension. Raises: InvalidInput for an unknown extension, and for a folder."""
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; give the path of a file of a type in {', '.join(readers)}")
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise InvalidInput(
            f"{path} is of type {suffix!r}, which is not read; save or unpack it as another; {nearest(suffix, readers)}"
        )
    return readers[suffix]


@contextlib.contextmanager
def reading(path: Path, shown: str | Path | None = None) -> Iterator[None]:
    """Turn errors while ``path`` is read and decoded into a one-line DataCorruption that names ``shown`` or ``path``.

    shown: in place of a path that tells of an example, as the name of its file or of the folder of its class does. The
    library's own message may quote the content, so it stays in the cause. A named pipe, a socket or a device is
    refused with InvalidInput before it is opened: it might never answer.
    """
    with contextlib.suppress(OSError):  # the reader says why it cannot be read
        if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
            raise InvalidInput(f"{shown or path} is a pipe, a socket or a device; give the path of a file")
    try:
        yield
    except MemoryError as error:
        raise InvalidInput(f"{shown or path} does not fit into the free memory; use a machine with more") from error
    except UNREADABLE as error:
        error.add_note(f"file: {path}")
        raise DataCorruption(f"cannot read {shown or path}: {_reason(error)}; correct or replace the file") from error


@contextlib.contextmanager
def opened_picture(file: Path | IO[bytes]) -> Iterator[Image.Image]:
    """Open a picture in a ``with`` block, in which Pillow does not warn and raises only errors of `UNREADABLE`.

    Its warnings are of large and of damaged pictures, and Pillow itself refuses those that would fill the memory.
    """
    _silence_libtiff()
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=PICTURES) as picture:
            yield picture
    except DpsweepError:
        raise
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file, not of what is in it
            raise
        raise UnidentifiedImageError(str(error)) from error


@functools.cache
def _silence_libtiff() -> None:
    """Keep libtiff, which Pillow has loaded, from lines of its own on stderr about the content of damaged pictures."""
    with contextlib.suppress(OSError, AttributeError):  # a system without /proc, or a Pillow without libtiff
        mapped = (line.split(maxsplit=5)[5:] for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines())
        for library in {path for path in itertools.chain.from_iterable(mapped) if "/libtiff" in path}:
            ctypes.CDLL(library).TIFFSetErrorHandler(None)


_NO_TEXT: Final = "it is not UTF-8 text, or not of the `encoding` that is declared (such as cp1252)"
_NO_PICTURE: Final = f"it is cut off or damaged, or no {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
_JSON: Final = "(null|boolean|number|string|array|object)"
_REASONS: Mapping[str, str] = {
    r"Expected (\d+) columns, got (\d+)": r"a row has \2 fields where the first has \1 (is a quote not closed, or does "
    r"a remark stand above the names?)",
    r"Empty CSV file": "it is empty",
    r"(more than \d+ columns|columns nested more than \d+ levels deep) in a Parquet file": r"it has \1",
    r"invalid UTF8 data": _NO_TEXT,
    r"Invalid UTF8 sequence|surrogate pair in string is invalid": "a text in it is not Unicode; write it as UTF-8",
    r"exceeds limit of (\d+) pixels": r"it has more than \1 pixels; scale it down",
    r"MAX_TEXT_CHUNK|text chunks": "texts in it unfold to more than pictures need",
    r"straddling object": "a row is too long (is a quote not closed?)",
    r"conversion error to double": "a column of numbers holds another text",
    r"^nested more than \d+ levels deep in a line": "a line holds values that are nested too deeply",
    r"Column\(\) changed from": "a line of JSON is no object",
    rf"changed from {_JSON} to {_JSON} in row": r"a column holds values of two types, \1 and \2; write all of them "
    "alike, such as in quotes",
    r"Failed to convert JSON to int64": "a column of whole numbers holds another; write all with a point, or in quotes",
    r"was specified twice in row": "a row names a column twice",
}
"""Faults of files by patterns of Arrow's messages, which themselves also quote rows."""


def _reason(error: Exception) -> str:
    """Return why a file cannot be read, without its content."""
    if isinstance(error, UnicodeDecodeError):
        return _NO_TEXT
    number = getattr(error, "errno", None)
    if isinstance(number, int):
        return os.strerror(number)
    other = _NO_PICTURE if isinstance(error, UnidentifiedImageError) else type(error).__name__
    found = (match.expand(reason) for known, reason in _REASONS.items() if (match := re.search(known, str(error))))
    return next(found, other)


def require_row_count(path: Path, rows: int, published: int) -> None:
    """Raise DataCorruption when a file does not have its published number of rows."""
    if rows != published:
        raise DataCorruption(f"{path} has {count_of(rows, 'row')}, but as published it has {published}; fetch it again")


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).exists()), None)


def _next_step(named: str | None, download: Download | None) -> str:
    if download is None:
        return f"put the data there, or name the folder that holds it by `root` or {DATA_VARIABLE}"
    if named is not None:
        return f"put the data there, or set neither `root` nor {DATA_VARIABLE} to have it downloaded"
    return f"the download left no such file; name a folder that holds it by `root` or {DATA_VARIABLE}"


def _fetch(source: str, download: Download, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        download(folder)
    except (OSError, RuntimeError) as error:
        raise InvalidInput(
            f"data source {source!r}: the download into {folder} failed ({' '.join(str(error).split())}); "
            f"fetch the data elsewhere and name its folder by `root` or {DATA_VARIABLE}"
        ) from error


def downloads(address: str, folder: str, checksums: Mapping[str, str]) -> Download:
    """Return a `Download` of files at ``address`` to ``folder`` of the cache. checksums: md5 by name, verified."""

    def download(cache: Path) -> None:
        from torchvision.datasets.utils import download_url  # late: importing torchvision takes seconds

        for name, md5 in checksums.items():
            download_url(f"{address}{name}", str(cache / folder), md5=md5)

    return download
