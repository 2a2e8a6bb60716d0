"""File input and output: local paths by `local_files`, object stores (``s3://``, ``gs://``) through pyarrow.fs.

Writes are atomic. Locally: temporary name, fsync, rename, fsync of the folder. On object stores an object
appears only when its upload completes. Private files have mode 0600, in folders of mode 0700, where the file system
has modes. Local paths lead through no link; `UnsafeFile` names what is one.

Many files or ranges are read in order, from an object store several at a time. A request to an object store takes
tens of milliseconds, so several overlap. Local files are read one by one: threads would only cost time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records import local_files
from dpsweep.accounting.records.memory_limits import half_of_memory

_CONNECT_WITHIN: Final = 5.0
"""Seconds in which an object store takes a connection."""
_ANSWER_WITHIN: Final = 30.0
"""Seconds in which an object store answers the first request; pyarrow itself tries for two minutes."""
_CUT_OFF: Final = "the answer of the store was cut off"
_MARKS: Final = (0xA5, 0x5A)
"""Bytes in which no text and few other files end."""
_OPTIONS: Final = {"s3": "?allow_delayed_open=true"}
"""Options of a file system by scheme: a file smaller than a part of an upload (10 MB) takes one request, not three."""


@functools.lru_cache(maxsize=32)
def file_system_of(scheme: str, host: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of ``scheme://host``, and the path of that host in it.

    One object for each is cached for the life of the process, because connecting is slow. Raises: InvalidInput for a
    scheme that pyarrow does not know; StorageError if a store does not answer, or the region of a bucket is not found.
    """
    uri = f"{scheme}://{host}/"
    if scheme == "s3":
        _require_answer(uri, host)
    try:
        filesystem, base = fs.FileSystem.from_uri(f"{uri}{_OPTIONS.get(scheme, '')}")
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"cannot open {uri!r}: {error}; use a local path, s3:// or gs://") from error
    except OSError as error:
        raise StorageError(
            f"cannot reach {uri}: {error}; check the bucket's name, the network and the region"
        ) from error
    return filesystem, str(base)


def _require_answer(uri: str, bucket: str) -> None:
    """Raise `StorageError` unless an S3 store answers, whatever it says: refusals show when files are read."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    place = urlsplit(endpoint)
    store = fs.S3FileSystem(
        connect_timeout=_CONNECT_WITHIN,
        request_timeout=_ANSWER_WITHIN,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        endpoint_override=place.netloc or None,
        scheme=place.scheme or None,
    )
    try:
        store.get_file_info(bucket)
    except OSError as error:
        if "NETWORK_CONNECTION" not in str(error):
            return
        raise StorageError(
            f"{uri}: no object store answers at {endpoint or 'Amazon S3'} ({str(error).rpartition('Details: ')[2]}); "
            "check the network, the bucket's name and AWS_ENDPOINT_URL"
        ) from error


def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of an object store's address, and the path inside it.

    Raises: InvalidInput unless it is an address without a password; as `file_system_of`.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:  # such as a bracket that is not closed
        raise InvalidInput(f"{uri!r} is not an address: {error}; use a local path, s3:// or gs://") from error
    if parts.password is not None:
        raise InvalidInput(
            f"an address {parts.scheme}:// holds a password, which would stand in files and lines that others read; "
            "give it by variables of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not parts.scheme:
        raise InvalidInput(f"{uri!r} is not an address, as it begins with no scheme; use a local path, s3:// or gs://")
    filesystem, base = file_system_of(parts.scheme, parts.netloc)
    return filesystem, "/".join(piece for piece in (base.strip("/"), parts.path.strip("/")) if piece)


def is_local(uri: str) -> bool:
    """Return whether ``uri`` lies in the file system of this machine, or in one that is mounted there."""
    return _local(uri) is not None


def read_bytes(uri: str) -> bytes:
    """Return the whole content. Raises FileNotFoundError when nothing is there, `StorageError` for other failures, and
    `UnsafeFile` for a local path that is no regular file, or larger than a file of its kind."""
    with _named_errors("read", uri) as local:
        if local is not None:
            return local_files.read(local, largest(uri))
        with _opened_object(uri) as (stream, size):
            _require_size(uri, size)
            return _bytes_of(stream, 0, size)


def read_range(uri: str, start: int, size: int) -> tuple[bytes, int]:
    """Return ``size`` bytes from ``start`` on, or none if the file ends before; and the size of the whole file in
    bytes.

    Raises: as `read_bytes`, also for a range that is larger than a file of its kind.
    """
    _require_size(uri, size)
    with _named_errors("read", uri) as local:
        if local is not None:
            return local_files.read_range(local, start, size)
        with _opened_object(uri) as (stream, whole):
            return _bytes_of(stream, start, size) if start + size <= whole else b"", whole


@contextlib.contextmanager
def _opened_object(uri: str) -> Iterator[tuple[pa.NativeFile, int]]:
    """Open an object, and yield it with its size in bytes. Raises: OSError, as `open_filesystem`.

    For pyarrow, an answer that was cut off within its headers is that of an empty object.
    """
    filesystem, path = open_filesystem(uri)
    with filesystem.open_input_file(path) as stream:
        size = stream.size()
        if size == 0 and filesystem.get_file_info(path).size:
            raise ConnectionError(_CUT_OFF)
        yield stream, size


def _bytes_of(stream: pa.NativeFile, start: int, size: int) -> bytes:
    """Return ``size`` bytes of an open object from ``start`` on.

    An object may meanwhile be replaced by a shorter one. Then pyarrow takes the answer for whole, and leaves the rest
    of the memory as it was. So the last byte is marked before. The object is read again with another mark if it ends in
    the first one. Raises: OSError, also for such an answer.
    """
    found = bytearray(size)
    for mark in _MARKS:
        found[-1:] = (mark,) if size else ()
        stream.seek(start)
        if stream.readinto(found) == size and found[-1:] != bytes([mark]):
            return bytes(found)
    raise ConnectionError(_CUT_OFF)


def digest_of(uri: str) -> str:
    """Return sha256 of a file as it is stored. Raises: as `read_bytes`."""
    with _named_errors("read", uri) as local:
        if local is not None:
            return local_files.digest(local, largest(uri))
        return hashlib.sha256(read_bytes(uri)).hexdigest()


def write_bytes_atomically(uri: str, data: bytes | memoryview, private: bool = False) -> None:
    """Replace the content of ``uri``: whatever fails, it holds either the old bytes or the new ones.

    private gives the file mode 0600; other files get mode 0644, less the umask. Folders that are created get mode 0755,
    less the umask: only their owner can write. Files of folders that only the owner may enter are
    written by `write_in_private_folder`.

    Raises: StorageError (disk full, no permission, ...), UnsafeFile; the old content is then unchanged.
    """
    with _named_errors("write", uri) as local:
        if local is not None:
            local_files.make_folders(os.path.dirname(local), 0o755)
            local_files.replace_file(local, (data,), private)
        else:
            _put_object(*open_filesystem(uri), (data,))


def write_in_private_folder(uri: str, *pieces: bytes | memoryview) -> None:
    """Replace the content of ``uri`` atomically by the pieces, one after the other, for its owner alone.

    The file gets mode 0600, its folder and every folder created for it mode 0700. Raises: as `write_bytes_atomically`.
    """
    with _named_errors("write", uri) as local:
        if local is not None:
            local_files.make_private_folder(os.path.dirname(local))
            local_files.replace_file(local, pieces, private=True)
        else:
            _put_object(*open_filesystem(uri), pieces)


def exists(uri: str) -> bool:
    """Return whether anything is at ``uri``, a link included. Raises `StorageError` when the storage cannot tell."""
    with _named_errors("read", uri) as local:
        if local is not None:
            return local_files.info(local) is not None
        filesystem, path = open_filesystem(uri)
        return bool(filesystem.get_file_info(path).type != fs.FileType.NotFound)


def is_closed(uri: str) -> bool:
    """Return whether a local folder is there that this process may not read, as the private ones of another user."""
    with _named_errors("read", uri) as local:
        return local is not None and local_files.is_closed(local)


def modified(uri: str) -> float | None:
    """Return when the file at ``uri`` was last written, in seconds since 1970 UTC; None if it is missing or not
    known.
    """
    with _named_errors("read", uri) as local:
        if local is not None:
            there = local_files.info(local)
            return None if there is None or not stat.S_ISREG(there.st_mode) else there.st_mtime
        filesystem, path = open_filesystem(uri)
        found = filesystem.get_file_info(path)
    return found.mtime_ns / 1e9 if found.type == fs.FileType.File and found.mtime_ns else None


def delete(uri: str) -> None:
    """Delete a file if it exists; a link is deleted, not what it leads to. Raises `StorageError`, `UnsafeFile`."""
    with _named_errors("delete", uri) as local, contextlib.suppress(FileNotFoundError):
        if local is not None:
            local_files.delete(local)
        else:
            filesystem, path = open_filesystem(uri)
            filesystem.delete_file(path)


def with_partials(uri: str) -> tuple[str, ...]:
    """Return ``uri``, if a file is there, and the files that processes which were killed while writing it left.

    Object stores show no object before its upload is complete. Raises: StorageError, UnsafeFile.
    """
    with _named_errors("list", uri) as local:
        if local is not None:
            return local_files.with_partials(local)
        return (uri,) if exists(uri) else ()


def delete_partials(uri: str) -> None:
    """Delete what processes that were killed while writing files of a folder have left; none may write there now.

    Object stores show no object before its upload is complete. Raises: StorageError, UnsafeFile.
    """
    with _named_errors("delete", uri) as local:
        if local is not None:
            local_files.delete_partials(local)


def with_parts(uri: str) -> tuple[str, ...]:
    """Return what `with_partials` does, and the same for the parts of a file, ``uri-...``."""
    with _named_errors("list", uri) as local:
        if local is not None:
            return local_files.with_parts(local)
        folder, _, name = uri.rpartition("/")
        found = (each for each in list_files(folder) if each.startswith(f"{name}-"))
        return (*with_partials(uri), *(f"{folder}/{each}" for each in found))


def delete_folder(uri: str) -> None:
    """Delete a folder with everything below it, if it exists; a link below it is deleted, not what it leads to.

    Raises: StorageError when the storage refuses, UnsafeFile for anything that is no folder, such as a link.
    """
    with _named_errors("delete", uri) as local, contextlib.suppress(FileNotFoundError):
        if local is not None:
            local_files.delete_folder(local)
        else:
            filesystem, path = open_filesystem(uri)
            filesystem.delete_dir(path)


def delete_if_empty(uri: str) -> None:
    """Delete a folder if it has no entries. Raises: StorageError, UnsafeFile."""
    with _named_errors("delete", uri) as local, contextlib.suppress(FileNotFoundError):
        if local is not None:
            local_files.delete_if_empty(local)
            return
        filesystem, path = open_filesystem(uri)
        if not filesystem.get_file_info(fs.FileSelector(path)):
            filesystem.delete_dir(path)


def list_files(uri: str) -> tuple[str, ...]:
    """Return sorted paths, relative to a folder, of all files below it, without temporary files of unfinished writes.

    Locally, links and whatever else is no folder are listed too, and no link is followed.
    """
    with _named_errors("list", uri) as local:
        if local is not None:
            with contextlib.suppress(FileNotFoundError):
                names = [name for name in local_files.list_files(local) if not name.endswith(local_files.TEMPORARY)]
                return tuple(sorted(names))
            return ()
        filesystem, path = open_filesystem(uri)
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return tuple(sorted(info.path[len(path) :].lstrip("/") for info in found if info.type == fs.FileType.File))


def list_folders(uri: str) -> tuple[str, ...]:
    """Return sorted names of the folders directly in a folder, without hidden ones and symbolic links."""
    with _named_errors("list", uri) as local:
        if local is not None:
            with contextlib.suppress(FileNotFoundError):
                return tuple(sorted(name for name in local_files.list_folders(local) if not name.startswith(".")))
            return ()
        filesystem, path = open_filesystem(uri)
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = (info.base_name for info in found if info.type == fs.FileType.Directory)
    return tuple(sorted(name for name in names if not name.startswith(".")))


@contextlib.contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Let no file that this process creates be writable by others, also files that libraries create."""
    before = os.umask(0o077)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


PRIVATE = "private"
"""Name of every folder with files derived from single examples."""


def _local(uri: str) -> str | None:
    """Return the absolute path of a local file; None for an object in a store. Raises: as `open_filesystem`,
    UnsafeFile.
    """
    path = unquote(urlsplit(uri).path) if uri.startswith("file://") else uri
    _require_inside(path)
    return os.path.abspath(path) if "://" not in path else None


def _require_inside(path: str) -> None:
    """Refuse a path that leads up by ``..``, or that no file can have.

    Paths join an absolute folder and names. Others may have written the record that some names were read from: keys of
    trials in sweep.json, names in digests.json. Raises: UnsafeFile.
    """
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
        is_name = False
    if not is_name or ".." in path.split("/"):
        raise local_files.UnsafeFile(
            f"{path!r} leads out of its folder, or is no path of a file, so nothing was done with it; a record in that "
            "folder was altered: restore it from a backup"
        )


def _require_size(uri: str, size: int) -> None:
    if size > largest(uri):
        raise local_files.UnsafeFile(
            f"{uri} has {size:,} bytes, but an object of its kind has at most {largest(uri):,}; it was altered: "
            "restore it from a backup"
        )


@contextlib.contextmanager
def _named_errors(action: str, uri: str) -> Iterator[str | None]:
    """Turn an error of the operating system into a `StorageError` that names the file and the next step.

    Yields `_local` of the file.
    """
    try:
        yield _local(uri)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and action != "write":
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = _ADVICE.get(action, _FREE_SPACE)
        if error.errno == errno.EPERM:
            advice = ATTRIBUTES
        elif isinstance(error, PermissionError) and f"/{PRIVATE}/" in uri:
            advice = _OF_THE_OWNER
        raise StorageError(f"cannot {action} {uri}: {reason}; {advice}") from error


ATTRIBUTES = (
    "`lsattr -d` shows whether the folder is immutable or append-only; `chattr -ia` ends that, or choose another folder"
)
"""The next step where even the owner of a file may not change it (EPERM)."""
_FREE_SPACE = "nothing was committed. Free space or fix access, then resume"
_OF_THE_OWNER = (
    f"what lies below {PRIVATE}/ is open to the user who ran the sweep alone, who may pass on its report.html, "
    "comparison.json and results.json"
)
_ADVICE = {
    **dict.fromkeys(("read", "list"), "check the path, who may read it, and the network of a store"),
    "delete": "what was deleted before stays so. Fix access, then repeat the command",
}
"""The next step about an error, by the action that was refused, if it is not `_FREE_SPACE`."""


def _put_object(filesystem: fs.FileSystem, path: str, pieces: Sequence[bytes | memoryview]) -> None:
    try:
        stream = filesystem.open_output_stream(path)
    except FileNotFoundError:  # a store with real folders
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        stream = filesystem.open_output_stream(path)
    with stream:
        for piece in pieces:
            stream.write(piece)


_MIB: Final = 2**20
_BY_NAME: Final[Mapping[str, int]] = {
    "results.json": 256 * _MIB,
    "comparison.json": 256 * _MIB,
    "trace.arrow": 64 * _MIB,
}
"""Largest size in bytes of files that grow with the number of trials, some kilobytes each, and of a trace, which has
about 100 bytes for each noise level."""
_BY_ENDING: Final[Mapping[str, int]] = {
    ".json": 64 * _MIB,
    ".jsonl": 1024 * _MIB,
    ".txt": 64 * _MIB,
    ".html": 512 * _MIB,
    ".arrow": 4096 * _MIB,
    ".ipc": 4096 * _MIB,
}
"""Largest size in bytes of other files, by the ending of the name. An object of norms has about 94 MB."""


def largest(uri: str) -> int:
    """Return the largest accepted size of a file in bytes.

    Models, checkpoints and files of a user's own are as large as the user wants, up to `half_of_memory`:
    decoding holds their content twice.

    >>> largest("s3://bucket/runs/a/status.json") // 2**20
    64
    """
    name = uri.rpartition("/")[2]
    return _BY_NAME.get(name) or _BY_ENDING.get(os.path.splitext(name)[1]) or half_of_memory()


READERS = 8
"""Concurrent requests to an object store, per call of `read_in_turn`."""
AHEAD = 16
"""Maximum number of items in memory: read but not yet taken, or being read."""

Name = TypeVar("Name")
Content = TypeVar("Content")


def read_in_turn(uri: str, read: Callable[[Name], Content], names: Iterable[Name]) -> Iterator[Content]:
    """Yield ``read(name)`` for each name, in order. uri: the folder that contains them.

    If the folder is not local, ``read`` runs in several threads, for at most `AHEAD` names before their turn. An error
    is raised when its name's turn comes, as if the names were read one by one.
    """
    return map(read, names) if is_local(uri) else _ahead(read, names)


def _ahead(read: Callable[[Name], Content], names: Iterable[Name]) -> Iterator[Content]:
    waiting: deque[Future[Content | Exception]] = deque()
    readers = ThreadPoolExecutor(READERS, "dpsweep-reader")
    try:
        for name in names:
            waiting.append(readers.submit(_attempt, read, name))
            if len(waiting) >= AHEAD:
                yield _content(waiting.popleft())
        while waiting:
            yield _content(waiting.popleft())
    finally:
        readers.shutdown(cancel_futures=True)


def _attempt(read: Callable[[Name], Content], name: Name) -> Content | Exception:
    """Return the content, or the error: one that a future raises has passed through code that is not ours, which
    hides it.
    """
    try:
        return read(name)
    except Exception as error:
        return error


def _content(future: Future[Content | Exception]) -> Content:
    found = future.result()
    if isinstance(found, Exception):
        raise found
    return found
