"""Decorators that compile functions by numba, and the folder where the machine code is kept.

The folder is the user's cache, never the installation: pip removes only files that it has installed, and machine code
beside an installed package would outlive it. Python takes the folder that is left for a package, and a later, editable
installation is then not found.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core.caching import UserProvidedCacheLocator

Function = TypeVar("Function", bound=Callable[..., Any])


def helper(function: Function) -> Function:
    """Compile the decorated function into each caller. Division by zero gives infinities and NaN, as in numpy."""
    return cast(Function, numba.njit(error_model="numpy", nogil=True)(function))


def kernel(*arguments: types.Type) -> Callable[[Function], Function]:
    """Compile the decorated function once per machine for arguments of these types. It runs without the GIL.

    The code is kept as `ByContent` says. Where there is no folder for it, or no room, each process compiles again. Each
    function has one signature: with several, two processes that compile at the same time could store one signature's
    code under the other's name.
    """

    def compiled(function: Function) -> Function:
        signature = [types.void(*arguments)]
        try:
            with _kept_by_content():
                return cast(Function, numba.njit(signature, error_model="numpy", nogil=True, cache=True)(function))
        except Exception:  # no folder, a full disk, or a file that a power cut left empty: unpickling raises anything
            _delete_code(function)
            return cast(Function, numba.njit(signature, error_model="numpy", nogil=True)(function))

    return compiled


class ByContent(UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no annotations
    """Places machine code in ``~/.cache/dpsweep``, in a folder named by numba's version and the source file's sha256.

    All installations of a user share it, and the copies of dpsweep that Ray ships to its workers.
    """

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._folder = _folder(source)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> ByContent | None:
        """Return the place for a function; None if no safe folder can be made."""
        try:
            found = cls(function, source)
            found.ensure_cache_path()
        except (OSError, RuntimeError):  # RuntimeError: there is no home folder
            return None
        return found if _is_safe(found._folder) else None


@contextlib.contextmanager
def _kept_by_content() -> Iterator[None]:
    """Let numba use `ByContent` while the block runs, unless the user has set where it keeps code."""
    if numba.config.CACHE_DIR or numba.config.CACHE_LOCATOR_CLASSES:
        yield
        return
    numba.config.CACHE_LOCATOR_CLASSES = f"{ByContent.__module__}.{ByContent.__name__}"
    try:
        yield
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = ""


def _delete_code(function: Callable[..., Any]) -> None:
    """Delete the stored code of a function, so that the next process stores it anew."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        for file in _folder(function.__code__.co_filename).glob(f"*.{function.__qualname__}-*"):
            file.unlink(missing_ok=True)


@functools.cache
def _folder(source: str) -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = named if named.is_absolute() else Path.home() / ".cache"  # the XDG base directory specification
    path = Path(source)
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return home / "dpsweep" / "machine-code" / f"numba-{numba.__version__}-{path.stem}-{content}"


def _is_safe(folder: Path) -> bool:
    """Say whether only this user can write a folder, since machine code is unpickled when it is loaded."""
    state = folder.stat()
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
