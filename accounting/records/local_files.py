"""Local files in folders that others may have filled: reached without a link, and regular files only.

A path below a sweep may have been planted: a link leads to files elsewhere, a FIFO or socket never answers, a device
does what it likes. Every function here takes an absolute path without links, as `os.path.realpath` of the sweep's
folder and names below it make one. It raises `UnsafeFile` if any part of it turns out to be a link, or to be another
kind of file than it should be. Nothing is opened, created or changed then.

A folder is opened as a whole and the kernel asked where it is, which takes two calls for a path of any length. The
folder stays open while names in it are used, so that nobody can put another one in its place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import os
import pwd
import re
import secrets
import shutil
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from dpsweep.accounting.errors import DataCorruption

TEMPORARY: Final = ".partial"
"""Ending of the name of a file whose writing is not complete."""
_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASSED: Final = os.O_PATH | _FOLDER
"""Flags of a folder in which names are looked up; it need not be readable."""
_LISTED: Final = os.O_RDONLY | _FOLDER
"""Flags of a folder that is listed, or flushed to the disk."""
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")
"""Bytes as the kernel spells them in the place of a mount: blanks, line breaks, backslashes."""
_DEEPEST: Final = 64
"""Most levels of folders below one that is listed; those of a sweep have at most eight."""
_BLOCK: Final = 2**20
"""Bytes that are read at once."""
_LONG: Final = struct.calcsize("l")
_GET_FLAGS: Final = 0x80006601 | _LONG << 16
"""FS_IOC_GETFLAGS of <linux/fs.h> on x86 and Arm: what `lsattr -d` asks a folder."""
_APPEND_ONLY: Final = 0x20
"""FS_APPEND_FL, what `chattr +a` sets: names can be added, and none renamed or deleted."""
_LOOKS: Final = 4
_LOOK: Final = 0.05
"""Times that a lock is tried while another process holds it, and the seconds between."""
_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: True, "a device"),
)


class UnsafeFile(DataCorruption):
    """A file or folder is not what dpsweep writes: a link, a pipe, a device, another user's, or far too large."""


def read(path: str, most: int) -> bytes:
    """Return the whole content of a regular file. Raises: OSError; UnsafeFile, also for more than ``most`` bytes."""
    try:
        with _opened(path, most) as (handle, size), open(handle, "rb", closefd=False) as stream:
            return stream.read(size)
    except MemoryError:
        raise UnsafeFile(f"{path} does not fit into the free memory; use a machine with more of it") from None


def read_range(path: str, start: int, size: int) -> tuple[bytes, int]:
    """Return ``size`` bytes from ``start`` on, or none if the file ends before; and the size of the whole file in
    bytes.
    """
    with _opened(path, None) as (handle, whole):
        if start + size > whole:
            return b"", whole
        with open(handle, "rb", closefd=False) as stream:
            stream.seek(start)
            return stream.read(size), whole


def digest(path: str, most: int) -> str:
    """Return sha256 of a regular file, whose content is not held in memory. Raises: as `read`.

    Bytes beyond the size that it had are not read: it may grow without end, or be one of the kernel's, which waits.
    """
    found = hashlib.sha256()
    with _opened(path, most) as (handle, left), open(handle, "rb", closefd=False) as stream:
        while left and (block := stream.read(min(left, _BLOCK))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def replace_file(path: str, pieces: Sequence[bytes | memoryview], private: bool) -> None:
    """Replace the content of a file, or make it, in a folder that is there: atomically and durably.

    private: the file gets mode 0600, else 0644 less the umask. Raises: OSError, PermissionError also for a folder that
    is append-only; UnsafeFile if a folder, a link or anything else that is no regular file has that name.
    """
    with _entered(os.path.dirname(path), _LISTED) as folder:
        name = os.path.basename(path)
        _require_regular(path, _info(folder, name))
        _require_replaceable(folder)
        temporary = f".{name}.{secrets.token_hex(8)}{TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        handle = os.open(temporary, flags, 0o600 if private else 0o644, dir_fd=folder)
        try:
            with _closing(handle):
                for piece in pieces:
                    _write_all(handle, piece)
                os.fsync(handle)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)


def require_replaceable(path: str) -> None:
    """Check that names in a folder can be replaced. Raises: OSError, PermissionError if it is append-only."""
    with _entered(path, _LISTED) as folder:
        _require_replaceable(folder)


def _require_replaceable(folder: int) -> None:
    """As `require_replaceable`: a temporary file that is made in an append-only folder stays there for good."""
    flags = bytearray(_LONG)
    try:
        fcntl.ioctl(folder, _GET_FLAGS, flags)
    except OSError:  # a file system without such flags
        return
    if int.from_bytes(flags[:4], sys.byteorder) & _APPEND_ONLY:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def make_folders(path: str, mode: int) -> None:
    """Make a folder and the folders above it that are missing. mode: of each new one, before the umask is applied."""
    os.close(_made(path, mode))


def make_private_folder(path: str) -> None:
    """Make a folder that only its owner can enter; an existing one gets that mode.

    Raises: OSError; UnsafeFile for one of another user, who could open it again.
    """
    os.close(_made(path, 0o700))
    with _entered(path, _LISTED) as folder:
        found = os.fstat(folder)
        _require_owner(path, found)
        if stat.S_IMODE(found.st_mode) != 0o700:  # bits that give what is made there to a group go too
            os.fchmod(folder, 0o700)


def make_private_file(path: str) -> None:
    """Make an empty file that only its owner can read; an existing one gets that mode and keeps its content.

    Raises: OSError; UnsafeFile, also for a file of another user.
    """
    with _entered(os.path.dirname(path), _PASSED) as folder:
        name = os.path.basename(path)
        if (found := _info(folder, name)) is not None:
            _require_in_place(path, found)
        with _closing(os.open(name, os.O_WRONLY | os.O_CREAT | _FILE, 0o600, dir_fd=folder)) as handle:
            _require_in_place(path, os.fstat(handle))
            os.fchmod(handle, 0o600)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made if missing and never written, in a ``with`` block.

    `is_locked` holds it for a moment, so it is tried a few times.

    Raises: OSError, BlockingIOError if another process holds it; UnsafeFile.
    """
    with _entered(os.path.dirname(path), _PASSED) as folder:
        name = os.path.basename(path)
        _require_regular(path, _info(folder, name))
        handle = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, 0o644, dir_fd=folder)
    with _closing(handle):
        _require_regular(path, os.fstat(handle))
        for _ in range(_LOOKS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_locked(path: str) -> bool | None:
    """Return whether somebody holds the lock of `locked`; None if that cannot be told, as for a missing file."""
    try:
        with _entered(os.path.dirname(path), _PASSED) as folder:
            name = os.path.basename(path)
            _require_regular(path, _info(folder, name))
            handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    except (OSError, UnsafeFile):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    else:
        return False
    finally:
        os.close(handle)


def info(path: str) -> os.stat_result | None:
    """Return the status of a file or folder, of a link itself; None if there is none. Raises: OSError, UnsafeFile."""
    try:
        with _entered(os.path.dirname(path), _PASSED) as folder:
            return _info(folder, os.path.basename(path) or ".")
    except FileNotFoundError:
        return None


def is_closed(path: str) -> bool:
    """Return whether a folder is there that this process may not list. Raises: OSError, UnsafeFile."""
    try:
        with _entered(path, _LISTED):
            return False
    except FileNotFoundError:
        return False
    except PermissionError:
        return True


def delete(path: str) -> None:
    """Delete a file; a link is deleted, not what it leads to. Raises: OSError; UnsafeFile for a folder."""
    with _entered(os.path.dirname(path), _PASSED) as folder:
        found = _info(folder, os.path.basename(path))
        if found is not None and stat.S_ISDIR(found.st_mode):
            _require_regular(path, found)
        os.unlink(os.path.basename(path), dir_fd=folder)


def with_partials(path: str) -> tuple[str, ...]:
    """Return the path of a file, if there is one, and paths of the remains of processes that were killed while writing
    it.

    Raises: OSError, UnsafeFile.
    """
    name = os.path.basename(path)
    return tuple(each for each in _beside(path) if os.path.basename(each) == name or _is_partial_of(each, name))


def with_parts(path: str) -> tuple[str, ...]:
    """Return the paths of a file and of its parts, ``path-...``, as far as they exist.

    Files that `with_partials` finds for any of them are among these.

    Raises: OSError, UnsafeFile.
    """
    part = f"{os.path.basename(path)}-"
    found = (each for each in _beside(path) if os.path.basename(each).startswith((part, f".{part}")))
    return (*with_partials(path), *found)


def delete_partials(path: str) -> None:
    """Delete what killed processes left of files of a folder, where none writes now. Raises: OSError, UnsafeFile."""
    for each in _beside(f"{path}/"):
        if each.endswith(TEMPORARY):
            delete(each)


def _beside(path: str) -> list[str]:
    """Return the paths of all files in the folder of ``path``."""
    above = os.path.dirname(path)
    try:
        with _entered(above, _LISTED) as folder:
            return [f"{above}/{each}" for each in os.listdir(folder)]
    except FileNotFoundError:
        return []


def delete_with_only(path: str, name: str) -> None:
    """Delete a folder that holds nothing but a file of this name, with that file. Raises: OSError, UnsafeFile."""
    with _entered(path, _LISTED) as folder:
        if os.listdir(folder) != [name]:
            return
        os.unlink(name, dir_fd=folder)
    delete_if_empty(path)


def delete_folder(path: str) -> None:
    """Delete a folder with everything below it; a link below it is deleted, not what it leads to.

    Raises: OSError; UnsafeFile for anything else than a folder, and one that is nested too deeply.
    """
    with _entered(os.path.dirname(path), _PASSED) as above:
        name = os.path.basename(path)
        _require_folder(path, _info(above, name))
        try:
            shutil.rmtree(name, dir_fd=above)
        except RecursionError:
            raise UnsafeFile(f"{path} holds folders nested too deeply; delete it yourself, with rm -r") from None


def delete_if_empty(path: str) -> None:
    """Delete a folder if it has no entries. Raises: OSError, UnsafeFile."""
    with _entered(path, _LISTED) as folder:
        if os.listdir(folder):
            return
    with _entered(os.path.dirname(path), _PASSED) as above:
        os.rmdir(os.path.basename(path), dir_fd=above)


def list_files(path: str) -> Iterator[str]:
    """Yield the paths, relative to a folder, of everything below it that is no folder, links included; none are
    followed.
    """
    with _entered(path, _LISTED) as folder:
        for name, entry in _entries(folder, ""):
            if not entry.is_dir(follow_symlinks=False):
                yield name


def list_folders(path: str) -> list[str]:
    """Return the names of the folders directly in a folder. Raises: OSError, UnsafeFile."""
    with _entered(path, _LISTED) as folder, os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def require_library_files(paths: Iterable[str]) -> None:
    """Check files before a library opens them by path and changes them in place: own and regular, or not there yet.

    Raises: OSError, UnsafeFile.
    """
    for path in paths:
        found = info(path)
        if found is not None:
            _require_in_place(path, found)


def require_plain(files: Iterable[str], folders: Iterable[str]) -> None:
    """Check that a regular file or nothing is at each path of ``files``, and that only files and folders lie directly
    in ``folders``, as far as they are there.

    Raises: OSError, UnsafeFile.
    """
    for path in files:
        _require_regular(path, info(path))
    for path in folders:
        with contextlib.suppress(FileNotFoundError), _entered(path, _LISTED) as folder, os.scandir(folder) as entries:
            for entry in entries:
                _require_plain(f"{path}/{entry.name}", entry)


def require_plain_folder(path: str) -> None:
    """Check that a folder that holds files and folders only, or nothing, is at a path.

    Raises: OSError; UnsafeFile naming the first link, pipe, socket or device.
    """
    with contextlib.suppress(FileNotFoundError), _entered(path, _LISTED) as folder:
        for name, entry in _entries(folder, ""):
            _require_plain(f"{path}/{name}", entry)


def require_no_mounts(path: str) -> None:
    """Check that nothing is mounted below a folder: to delete there would delete what lies elsewhere.

    Raises: UnsafeFile naming the first place.
    """
    with open("/proc/self/mountinfo", "rb") as mounts:
        escaped = [line.split(b" ")[4] for line in mounts]
    places = [os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), each)) for each in escaped]
    if place := next((each for each in places if each.startswith(f"{path}/")), None):
        raise UnsafeFile(f"{place} is a mount point, through which dpsweep deletes nothing; unmount it first")


def require_own_folder(path: str) -> None:
    """Check that nobody else can change a folder; one that is not there is passed over.

    Raises: OSError; UnsafeFile, which says how to get a folder that is safe.
    """
    with contextlib.suppress(FileNotFoundError), _entered(path, _LISTED) as folder:
        _require_own_folder(path, folder)


def require_own_folders(path: str) -> None:
    """Call `require_own_folder`, also of every folder below it."""
    with contextlib.suppress(FileNotFoundError), _entered(path, _LISTED) as folder:
        _require_own_folder(path, folder)
        for name, entry in _entries(folder, ""):
            if entry.is_dir(follow_symlinks=False):
                with _closing(os.open(name, _LISTED, dir_fd=folder)) as inner:
                    _require_own_folder(f"{path}/{name}", inner)


def _require_own_folder(path: str, folder: int) -> None:
    found = os.fstat(folder)
    _require_owner(path, found)
    if others_can_write(folder):
        raise UnsafeFile(
            f"{path} can be changed by other users (mode {stat.S_IMODE(found.st_mode):04o}), who could put links to "
            "your files there; look at what is in it, then `chmod go-w` it, or choose another folder"
        )


def others_can_write(folder: int | str) -> bool:
    """Return whether users other than the owner can put files into a folder.

    A group that is the owner's alone, as many systems make one for each user, is not counted.
    """
    found = os.stat(folder)
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    return "system.posix_acl_access" in _attributes(folder) or not _is_own_group(found.st_uid, found.st_gid)


def _attributes(folder: int | str) -> list[str]:
    try:
        return os.listxattr(folder)
    except OSError:  # a file system without them
        return []


def _is_own_group(user: int, group: int) -> bool:
    try:
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return owner.pw_gid == group and owner.pw_name == found.gr_name and set(found.gr_mem) <= {owner.pw_name}


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield handle
    finally:
        os.close(handle)


def _entries(folder: int, prefix: str, depth: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below an open folder with its path in it, folders before what is in them."""
    if depth > _DEEPEST:
        raise UnsafeFile(f"{prefix} lies more than {_DEEPEST} folders deep, where dpsweep writes nothing; delete it")
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        name = f"{prefix}{entry.name}"
        yield name, entry
        if entry.is_dir(follow_symlinks=False):
            with _closing(os.open(entry.name, _LISTED, dir_fd=folder)) as inner:
                yield from _entries(inner, f"{name}/", depth + 1)


def _entered(path: str, flags: int) -> contextlib.AbstractContextManager[int]:
    """Open a folder in a ``with`` block, with no link on the way. Raises: OSError; UnsafeFile naming what is none."""
    return _closing(_enter(path, flags))


def _enter(path: str, flags: int) -> int:
    try:
        handle = os.open(path, flags)
    except PermissionError:
        raise
    except OSError:  # missing, or a link or another kind of file: the walk says which
        return _walk(path, flags)
    if _place(handle) == path:
        return handle
    os.close(handle)
    return _walk(path, flags)


def _place(handle: int) -> str | None:
    """Return where the kernel says that an open folder is."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return None


def _walk(path: str, flags: int) -> int:
    """Open a folder one name at a time. Raises: OSError; UnsafeFile naming the first that is no folder."""
    handle, reached = os.open("/", _PASSED), ""
    names = [name for name in path.split("/") if name]
    for number, name in enumerate(names, start=1):
        reached += f"/{name}"
        try:
            _require_folder(reached, _info(handle, name))
            below = os.open(name, flags if number == len(names) else _PASSED, dir_fd=handle)
        finally:
            os.close(handle)
        handle = below
    return handle


def _made(path: str, mode: int) -> int:
    """Return an open folder, made with the folders above it that are missing."""
    try:
        return _enter(path, _PASSED)
    except FileNotFoundError:
        above = _made(os.path.dirname(path), mode)
    try:
        name = os.path.basename(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=above)
        _require_folder(path, _info(above, name))
        return os.open(name, _PASSED, dir_fd=above)
    finally:
        os.close(above)


@contextlib.contextmanager
def _opened(path: str, most: int | None) -> Iterator[tuple[int, int]]:
    """A regular file that is open for reading, and its size.

    It is looked at before it is opened, because to open some devices makes them do something.
    """
    with _entered(os.path.dirname(path), _PASSED) as folder:
        name = os.path.basename(path)
        _require_regular(path, os.stat(name, dir_fd=folder, follow_symlinks=False))
        handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    with _closing(handle):
        found = os.fstat(handle)
        _require_regular(path, found)
        if most is not None and found.st_size > most:
            raise UnsafeFile(
                f"{path} has {found.st_size:,} bytes, but a file of its kind has at most {most:,}; it was altered: "
                "restore it from a backup"
            )
        yield handle, found.st_size


def _info(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_partial_of(path: str, final: str) -> bool:
    name = os.path.basename(path)
    return name.startswith(f".{final}.") and name.endswith(TEMPORARY)


def _require_in_place(path: str, found: os.stat_result) -> None:
    _require_regular(path, found)
    _require_owner(path, found)
    if found.st_nlink > 1:
        raise UnsafeFile(f"{path} has {found.st_nlink} names, so to change it changes another file; put a copy there")


def _require_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise UnsafeFile(
            f"{path} belongs to another user (uid {found.st_uid}), who can read and change what is put there; copy "
            "it to a folder of your own, or choose another folder"
        )


def _require_folder(path: str, found: os.stat_result | None) -> None:
    if found is None:
        raise FileNotFoundError(2, os.strerror(2), path)
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(path, found)


def _require_plain(path: str, entry: os.DirEntry[str]) -> None:
    if not (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)):
        raise _unsafe(path, entry.stat(follow_symlinks=False))


def _require_regular(path: str, found: os.stat_result | None) -> None:
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise _unsafe(path, found)


def _unsafe(path: str, found: os.stat_result) -> UnsafeFile:
    kind = next(words for is_it, words in _KINDS if is_it(found.st_mode))
    return UnsafeFile(
        f"{path} is {kind}, which dpsweep does not write there and did not open; find out who put it there, then "
        "delete it or restore what it was"
    )


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
