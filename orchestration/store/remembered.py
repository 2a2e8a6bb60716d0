"""Answers that take long to compute, kept in the user's own cache, where nobody else can write.

A question is a text that determines its answer completely; the digest of it and of the code that answers is the key. A
fact that was noted needs no code. A cache that cannot be used, such as one on a full disk, is as good as an empty one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dpsweep import accounting
from dpsweep.accounting.errors import DpsweepError, StorageError
from dpsweep.accounting.records.local_files import make_private_file, make_private_folder
from dpsweep.workers.machine.folders import user_cache

_PACKAGES: Final = ("dpsweep", "dp-accounting", "numpy", "scipy")
"""Packages that compute the answers; with another version of one, everything is computed anew."""
_TIMEOUT: Final = 5.0
"""Seconds to wait for another process that writes."""
_UNUSABLE: Final = (sqlite3.Error, OSError, DpsweepError)
"""Errors of a cache that cannot be used."""


def remembered(question: str, answer: Callable[[], str]) -> str:
    """Return the answer to a question, or what the same code has answered before. Raises: as ``answer``."""
    key = _key_of(f"{_code()}\n{question}")
    with contextlib.suppress(*_UNUSABLE), _opened() as store:
        row = store.execute("select answer from answers where key = ?", (key,)).fetchone()
        if row is not None:
            return str(row[0])
    found = answer()
    with contextlib.suppress(*_UNUSABLE), _opened() as store:
        store.execute("insert or replace into answers values (?, ?)", (key, found))
    return found


def remember(fact: str) -> None:
    """Remember a fact, which holds for every version, if the cache can be used."""
    with contextlib.suppress(*_UNUSABLE), _opened() as store:
        store.execute("insert or ignore into answers values (?, '')", (_key_of(fact),))


def is_noted(fact: str) -> bool:
    """Return whether this user has noted a fact."""
    with contextlib.suppress(*_UNUSABLE), _opened() as store:
        return store.execute("select 1 from answers where key = ?", (_key_of(fact),)).fetchone() is not None
    return False


def _key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _opened() -> Iterator[sqlite3.Connection]:
    if (cache := user_cache()) is None:
        raise StorageError("this user has no home, so no cache")
    folder = cache / "answers"
    make_private_folder(str(folder))
    file = folder / "answers.db"
    if not file.exists():
        make_private_file(str(file))
    with contextlib.closing(sqlite3.connect(file, timeout=_TIMEOUT)) as store, store:
        store.execute("create table if not exists answers (key text primary key, answer text)")
        yield store


@functools.cache
def _code() -> str:
    """Versions of the packages, and a sha256 of all source files of `accounting`, which may change within a version."""
    root, sources = Path(accounting.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        sources.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return " ".join((*map(importlib.metadata.version, _PACKAGES), sources.hexdigest()))
