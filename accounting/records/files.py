"""File input and output through pyarrow.fs: the same code for local paths, ``s3://`` and ``gs://``.

Writes are atomic. Locally: temporary name, fsync, rename, fsync of the folder. On object stores an object
appears only when its upload completes. Private files have mode 0600, in folders of mode 0700, where the file system
has modes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from accounting.errors import InvalidInput, StorageError
from accounting.records.stores import connected


def open_filesystem(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a local path or URI, and the path inside it.

    Raises: InvalidInput for what is no address; as `connected`.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    try:
        parts = urlsplit(uri)
    except ValueError as error:  # such as a bracket that is not closed
        raise InvalidInput(f"{uri!r} is not an address: {error}; use a local path, s3:// or gs://") from error
    if not parts.scheme:
        raise InvalidInput(f"{uri!r} is not an address, as it begins with no scheme; use a local path, s3:// or gs://")
    if parts.scheme == "file":
        return fs.LocalFileSystem(), unquote(parts.path)
    filesystem, base = connected(parts.scheme, parts.netloc)
    return filesystem, "/".join(piece for piece in (base.strip("/"), parts.path.strip("/")) if piece)


def is_local(uri: str) -> bool:
    """Whether ``uri`` lies in the file system of this machine, or in one that is mounted there."""
    return _is_local(open_filesystem(uri)[0])


def read_bytes(uri: str) -> bytes:
    """The whole content. Raises FileNotFoundError when nothing is there, `StorageError` for other failures."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("read", uri), filesystem.open_input_file(path) as stream:
        return bytes(stream.read())


def read_range(uri: str, start: int, size: int) -> tuple[bytes, int]:
    """``size`` bytes from ``start`` on, or none if the file ends before; and the size of the whole file in bytes.

    Raises: as `read_bytes`.
    """
    filesystem, path = open_filesystem(uri)
    with _named_errors("read", uri), filesystem.open_input_file(path) as stream:
        whole = stream.size()
        return bytes(stream.read_at(size, start)) if start + size <= whole else b"", whole


def write_bytes_atomically(uri: str, data: bytes | memoryview, private: bool = False) -> None:
    """Replace the content of ``uri``: whatever fails, it holds either the old bytes or the new ones.

    private gives the file mode 0600; other files get mode 0664, less the umask. Folders that are created get mode 0775,
    less the umask: users outside the owner's group can never write. Files of folders that only the owner may enter are
    written by `write_in_private_folder`.

    Raises: StorageError (disk full, no permission, a folder of a private file that is a link, ...); the old content is
    then unchanged.
    """
    filesystem, path = open_filesystem(uri)
    with _named_errors("write", uri):
        if _is_local(filesystem):
            folder = Path(path).parent
            if private:
                _refuse_links(folder)
            _make_folders(folder, 0o775)
            _replace_local(Path(path), (data,), private)
        else:
            _put_object(filesystem, path, (data,))


def write_in_private_folder(uri: str, *pieces: bytes | memoryview) -> None:
    """Replace the content of ``uri`` atomically by the pieces, one after the other, for its owner alone.

    The file gets mode 0600, its folder and every folder created for it mode 0700. Raises: as `write_bytes_atomically`.
    """
    filesystem, path = open_filesystem(uri)
    with _named_errors("write", uri):
        if _is_local(filesystem):
            make_private_folder(Path(path).parent)
            _replace_local(Path(path), pieces, private=True)
        else:
            _put_object(filesystem, path, pieces)


def append_in_private_folder(uri: str, data: bytes) -> None:
    """Append ``data`` durably, with the modes of `write_in_private_folder`.

    Object stores cannot append, so there the object is rewritten. A crash may leave only a prefix of ``data``; the
    caller's format must be able to detect that.
    """
    filesystem, path = open_filesystem(uri)
    if _is_local(filesystem):
        with _named_errors("write", uri):
            make_private_folder(Path(path).parent)
            _append_local(Path(path), data)
    else:
        existing = read_bytes(uri) if exists(uri) else b""
        write_in_private_folder(uri, existing + data)


def exists(uri: str) -> bool:
    """Whether there is a file or folder at ``uri``. Raises `StorageError` when the storage cannot tell."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("read", uri):
        return bool(filesystem.get_file_info(path).type != fs.FileType.NotFound)


def is_closed(uri: str) -> bool:
    """Whether a local folder is there that this process may not read, as the private ones of another user."""
    filesystem, path = open_filesystem(uri)
    return _is_local(filesystem) and os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK, effective_ids=True)


def modified(uri: str) -> float | None:
    """When the file at ``uri`` was last written, in seconds since 1970 UTC; None if it is missing or not known."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("read", uri):
        found = filesystem.get_file_info(path)
    return found.mtime_ns / 1e9 if found.type == fs.FileType.File and found.mtime_ns else None


def delete(uri: str) -> None:
    """Delete a file if it exists. Raises `StorageError` when the storage refuses."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("delete", uri), contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(path)


def delete_folder(uri: str) -> None:
    """Delete a folder with everything below it, if it exists; a link below it is deleted, not what it leads to.

    Raises: StorageError when the storage refuses, and for a folder that is itself a symbolic link.
    """
    filesystem, path = open_filesystem(uri)
    if _is_local(filesystem) and os.path.islink(path):
        raise StorageError(f"{uri} is a symbolic link; delete the folder that it leads to, and the link, yourself")
    with _named_errors("delete", uri), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if _is_local(filesystem) else filesystem.delete_dir(path)


def delete_if_empty(uri: str) -> None:
    """Delete a folder if it has no entries. A symbolic link is left alone."""
    filesystem, path = open_filesystem(uri)
    if _is_local(filesystem) and os.path.islink(path):
        return
    with _named_errors("delete", uri), contextlib.suppress(FileNotFoundError):
        if not filesystem.get_file_info(fs.FileSelector(path)):
            filesystem.delete_dir(path)


def list_files(uri: str) -> tuple[str, ...]:
    """Sorted paths, relative to a folder, of all files below it, without temporary files of unfinished writes."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("list", uri):
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    names = (info.path[len(path) :].lstrip("/") for info in found if info.type == fs.FileType.File)
    return tuple(sorted(name for name in names if not name.endswith(_TEMPORARY)))


def list_folders(uri: str) -> tuple[str, ...]:
    """Sorted names of the folders directly in a folder, without hidden ones and symbolic links."""
    filesystem, path = open_filesystem(uri)
    with _named_errors("list", uri):
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    folders = (info for info in found if info.type == fs.FileType.Directory and not info.base_name.startswith("."))
    linked = _is_local(filesystem)
    return tuple(sorted(info.base_name for info in folders if not (linked and os.path.islink(info.path))))


_TEMPORARY = ".partial"
PRIVATE = "private"
"""Name of every folder with files derived from single examples."""


def _is_local(filesystem: fs.FileSystem) -> bool:
    return bool(filesystem.type_name == "local")


@contextlib.contextmanager
def _named_errors(action: str, uri: str) -> Iterator[None]:
    """Turn an error of the operating system into a `StorageError` that names the file and the next step."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        is_owners = isinstance(error, PermissionError) and f"/{PRIVATE}/" in uri
        advice = _OF_THE_OWNER if is_owners else _ADVICE.get(action, _FREE_SPACE)
        raise StorageError(f"cannot {action} {uri}: {reason}; {advice}") from error


_FREE_SPACE = "nothing was committed. Free space or fix access, then resume"
_OF_THE_OWNER = (
    f"what lies below {PRIVATE}/ is open to the user who ran the sweep alone, who may pass on its report.html, "
    "comparison.json and results.json"
)
_ADVICE = dict.fromkeys(("read", "list"), "check the path, who may read it, and the network of a store")
"""What to do about an error, by the action that was refused, if it is not `_FREE_SPACE`."""


def _put_object(filesystem: fs.FileSystem, path: str, pieces: Sequence[bytes | memoryview]) -> None:
    try:
        stream = filesystem.open_output_stream(path)
    except FileNotFoundError:  # a store with real folders
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        stream = filesystem.open_output_stream(path)
    with stream:
        for piece in pieces:
            stream.write(piece)


def _replace_local(path: Path, pieces: Sequence[bytes | memoryview], private: bool) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _mode(private))
    try:
        try:
            for piece in pieces:
                _write_all(handle, piece)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _append_local(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _mode(private=True))
    try:
        before = os.fstat(handle).st_size
        try:
            _write_all(handle, data)
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)
    _sync_folder(path.parent)


def _mode(private: bool) -> int:
    """Mode of a new file, before the umask is applied."""
    return 0o600 if private else 0o664


def make_private_folder(path: Path) -> None:
    """Make a local folder that only its owner can enter; an existing one gets that mode."""
    _refuse_links(path)
    _make_folders(path, 0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def make_private_file(path: Path) -> None:
    """Make an empty local file that only its owner can read; an existing one gets that mode and keeps its content."""
    path.touch(0o600)
    path.chmod(0o600)


@contextlib.contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Context in which no file this process creates is writable by all users, also files that libraries create."""
    before = os.umask(0o077)
    os.umask(before | 0o002)
    try:
        yield
    finally:
        os.umask(before)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _make_folders(folder: Path, mode: int) -> None:
    """Make a folder and the folders above it that are missing. mode: of each new one, before the umask is applied."""
    missing = [level for level in (folder, *folder.parents) if not level.exists()]
    for level in reversed(missing):
        level.mkdir(mode=mode, exist_ok=True)


def _refuse_links(folder: Path) -> None:
    """Raise `StorageError` if ``folder``, or a parent up to the nearest one named `PRIVATE`, is a symbolic link.

    A link may lead to wherever somebody else wants, so private files are not written through one.
    """
    levels = (folder, *folder.parents)
    names = [level.name for level in levels]
    below = levels[: names.index(PRIVATE) + 1] if PRIVATE in names else levels[:1]
    for level in below:
        if level.is_symlink():
            raise StorageError(
                f"{level} is a symbolic link, and private files are not written through one; delete it, or move the "
                "folder that it leads to there"
            )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
