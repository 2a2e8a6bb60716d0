"""Read many files or ranges in order, from an object store several at a time.

A request to an object store takes tens of milliseconds, so several overlap. Local files are read one by one: threads
would only cost time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dpsweep.accounting.records.files import is_local

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
