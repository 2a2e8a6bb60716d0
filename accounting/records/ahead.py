"""Reading many files or ranges one after the other: from an object store several at once, each of which takes a while.

A local file is there at once, and threads would only cost: it is read when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from accounting.records.files import is_local

READERS = 8
"""Requests to an object store at the same time, of one reader."""
AHEAD = 16
"""What is read and not yet taken, or being read: the most that is in memory."""

Name = TypeVar("Name")
Content = TypeVar("Content")


def read_in_turn(uri: str, read: Callable[[Name], Content], names: Iterable[Name]) -> Iterator[Content]:
    """What ``read`` returns for each of the names, in their order. uri: of the folder that they are in.

    Where that is not local, ``read`` is called in several threads, for at most `AHEAD` names before their turn. Its
    error is raised when its turn comes, as it would be if names were read one by one.
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
    """The content, or the error: one that a future raises has passed through code that is not ours, which hides it."""
    try:
        return read(name)
    except Exception as error:
        return error


def _content(future: Future[Content | Exception]) -> Content:
    found = future.result()
    if isinstance(found, Exception):
        raise found
    return found
