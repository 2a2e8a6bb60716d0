"""Examples in memory-mapped files, for data that exceed memory.

Rows are written once, block by block, and read when they are used. The system caches as many as fit in memory, once for
all processes of a node that map the same file. The name of a file is a hash of everything its rows were made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import is_encrypting
from dpsweep.accounting.records.local_files import (
    UnsafeFile,
    make_private_file,
    make_private_folder,
    require_library_files,
)
from dpsweep.workers.machine.folders import at_home, node_folder

_MAX_ROWS_IN_MEMORY: Final = 1024
"""Largest number of rows of a selection that is held in memory."""
_BYTES_AT_ONCE: Final = 2**20
"""Approximate number of bytes copied at a time."""
_ROOM: Final = 3
"""Free space that a run's own folder must have for columns, as a multiple of their bytes."""
RowBlocks = Iterator[Sequence[npt.NDArray[Any]]]
"""Iterator over blocks of rows; each item holds the rows of one block, for every column."""


@dataclass(frozen=True)
class RowForm:
    """Type and shape of one row of a column."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class ColumnFiles:
    """Location of the memory-mapped columns of a set of rows. key: base name of their files."""

    folder: Path
    key: str

    def columns(self, forms: Sequence[RowForm], rows: int, blocks: Callable[[], RowBlocks]) -> tuple[Tensor, ...]:
        """Return the columns, each a tensor [rows, *shape]. blocks: their rows; called only if no process has written
        all of them.

        Raises: InvalidInput for a folder that cannot be written, or in which a link or another user's file has the name
        of a column. Also if a key that encrypts private files is set.
        """
        if is_encrypting():
            raise InvalidInput(
                f"cache {str(self.folder)!r} would hold examples as they are, which DPSWEEP_KEY does not encrypt; "
                "leave out `cache`, or unset the key"
            )
        folder = os.path.realpath(self.folder)
        files = {Path(folder, f"{self.key}.{number}"): rows * form.bytes for number, form in enumerate(forms)}
        try:
            make_private_folder(folder)
            with _exclusively(Path(folder, f"{self.key}.lock")):
                require_library_files(map(str, files))
                if not all(file.exists() and file.stat().st_size == size for file, size in files.items()):
                    _write(list(files), blocks())
        except (OSError, UnsafeFile) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no folder of this user's own"
            raise InvalidInput(
                f"cache {str(self.folder)!r} cannot hold the examples ({reason}); name another folder, or leave out "
                "`cache`"
            ) from error
        return tuple(_mapped(file, form) for file, form in zip(files, forms, strict=True))

    def select(self, columns: Sequence[Tensor], at: Tensor) -> tuple[ColumnFiles | None, tuple[Tensor, ...]]:
        """Return the rows ``at`` of columns at this place, and where they are; None for few, which stay in memory."""
        if len(at) <= _MAX_ROWS_IN_MEMORY:
            return None, tuple(column[at] for column in columns)
        place = ColumnFiles(self.folder, digest_of_parts(self.key, at.numpy().data))
        forms = [RowForm(column.dtype, tuple(column.shape[1:])) for column in columns]
        at_once = max(1, _BYTES_AT_ONCE // sum(form.bytes for form in forms))
        return place, place.columns(
            forms, len(at), lambda: ([column[some].numpy() for column in columns] for some in at.split(at_once))
        )


def cached_columns(
    cache: str | None, key: Callable[[], str], forms: Sequence[RowForm], rows: int, blocks: Callable[[], RowBlocks]
) -> tuple[tuple[Tensor, ...], ColumnFiles | None]:
    """Return the columns, and their place if it is the user's folder ``cache``. Other parameters: as in `once_on_node`.

    Raises: InvalidInput as `ColumnFiles.columns`.
    """
    if cache is None:
        return once_on_node(key, forms, rows, blocks), None
    place = ColumnFiles(at_home(cache).absolute(), key())
    return place.columns(forms, rows, blocks), place


def once_on_node(
    key: Callable[[], str], forms: Sequence[RowForm], rows: int, blocks: Callable[[], RowBlocks]
) -> tuple[Tensor, ...]:
    """Return the columns, written by the first trial of the run on this node and mapped by all others.

    They are in memory where the run has no folder for them (`dpsweep.workers.machine.folders`), or one that cannot hold
    them, and where private files are encrypted. `key`, `forms`, `blocks`: as for `ColumnFiles`, the key as a function
    that is called only if needed. `rows`: how many there are.
    """
    folder, size = node_folder(), rows * sum(form.bytes for form in forms)
    if folder is not None and not is_encrypting():
        with contextlib.suppress(InvalidInput, UnsafeFile, OSError):  # it was removed, or has filled up meanwhile
            if shutil.disk_usage(folder.parent).free >= _ROOM * size:
                return ColumnFiles(folder, key()).columns(forms, rows, blocks)
    return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*blocks(), strict=True))


def digest_of_parts(*parts: str | bytes | memoryview) -> str:
    """Return a sha256 of all parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(f"{memoryview(content).nbytes} ".encode())
        digest.update(content)
    return digest.hexdigest()


@contextlib.contextmanager
def _exclusively(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock among the processes of this node, so that only one writes the files."""
    make_private_file(str(lock))
    with lock.open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _write(files: Sequence[Path], blocks: RowBlocks) -> None:
    """Write the columns to temporary files, and rename these when they are complete."""
    unfinished = [file.with_suffix(f"{file.suffix}.unfinished") for file in files]
    for file in unfinished:
        file.unlink(missing_ok=True)
        make_private_file(str(file))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(file.open("wb")) for file in unfinished]
        for block in blocks:
            for rows, column in zip(block, opened, strict=True):
                np.ascontiguousarray(rows).tofile(column)
        for column in opened:
            os.fsync(column.fileno())
    for complete, file in zip(unfinished, files, strict=True):
        complete.replace(file)


def _mapped(file: Path, form: RowForm) -> Tensor:
    """Return the rows of a file as a private mapping: changes of the tensor do not reach the file."""
    rows = file.stat().st_size // form.bytes
    if rows == 0:
        return torch.empty(0, *form.shape, dtype=form.dtype)
    stored = torch.from_file(str(file), shared=False, size=rows * math.prod(form.shape), dtype=form.dtype)
    return stored.view(rows, *form.shape)
