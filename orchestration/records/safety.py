"""Checks of a sweep's folder before it is filled or emptied: somebody else may have put something there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records import (
    UnsafeFile,
    require_library_file,
    require_own_folder,
    require_own_folders,
    require_plain_entries,
    require_plain_file,
    require_plain_folder,
)
from dpsweep.orchestration.records.layout import SweepFiles


def require_safe(files: SweepFiles) -> None:
    """Refuse to fill a folder in which links, pipes or devices lie, or that other users own or can change.

    Only what a sweep writes is looked at: other files in the folder are the user's own. A folder that is not there is
    safe. Raises: InvalidInput with what was found, and how to get a folder that is safe.
    """
    try:
        require_own_folder(str(files.local_folder))
        require_no_links(files)
        for folder in _local(files.folders):
            require_plain_folder(folder)
            require_own_folders(folder)
        for path in files.in_place:
            require_library_file(path)
    except (UnsafeFile, StorageError, OSError) as error:
        raise InvalidInput(f"{error}; another --output is a new folder, which only you can change") from error


def require_no_links(files: SweepFiles) -> None:
    """Refuse a folder in which a link, a pipe or a device stands for a file or folder of a sweep or its candidates.

    Raises: UnsafeFile naming the first; StorageError for a folder that may not be read.
    """
    try:
        for sweep in (files, SweepFiles(files.tuning), SweepFiles(files.selection)):
            for path in _local((*sweep.top_files, sweep.manifest, sweep.lock)):
                require_plain_file(path)
            for folder in _local(sweep.folders):
                require_plain_entries(folder)
    except OSError as error:
        raise StorageError(f"cannot read {error.filename or files.root}: {error.strerror}; check who may") from error


def require_safe_tracking(files: SweepFiles) -> None:
    """Check what MLflow opens by its path: the database in the sweep's folder, and the artifacts beside it.

    Raises: InvalidInput with what was found.
    """
    try:
        for path in files.in_place:
            require_library_file(path)
        for folder in _local((files.artifacts,)):
            require_plain_folder(folder)
    except (UnsafeFile, OSError) as error:
        raise InvalidInput(f"{error}; --tracking-uri names another store, or `none`") from error


def _local(uris: Iterable[str]) -> Iterator[str]:
    return (uri for uri in uris if "://" not in uri)
