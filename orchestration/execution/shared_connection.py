"""Share one connection between sweeps that run in turn, such as tuning and the tuned sweep, or open it in advance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, TypeVar

T = TypeVar("T")

_stacks: Final[list[ExitStack]] = []
"""Holds the stack that closes the connection at the end of the current `kept_open` block; empty outside one."""
_opened: Final[list[Future[Any]]] = []
"""Holds the connection that was opened, or is being opened, within that block."""


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Share one connection between all `kept` blocks within this ``with`` block: the first one opens it.

    Has no effect within another such block.
    """
    if _stacks:
        yield
        return
    with ExitStack() as stack:
        _stacks.append(stack)
        try:
            yield
        finally:
            _stacks.clear()
            _opened.clear()


@contextlib.contextmanager
def opened_ahead(opening: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """As `kept_open`, but start ``opening`` at once in a thread; the first `kept` waits for it and raises its error.

    The thread lives until the connection is closed, because Linux ends Ray's processes with the thread that started
    them.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dpsweep-ahead") as thread, kept_open():
        stack = _stacks[0]
        opened = thread.submit(lambda: stack.enter_context(opening()))
        _opened.append(opened)
        try:
            yield
        finally:
            wait([opened])


@contextlib.contextmanager
def kept(opening: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Yield the connection that ``opening`` opens, closed at the end of this block or of the `kept_open` block around
    it.
    """
    if not _stacks:
        with opening() as found:
            yield found
        return
    if not _opened:
        _opened.append(_done(_stacks[0].enter_context(opening())))
    yield _opened[0].result()


def _done(value: T) -> Future[T]:
    future = Future[T]()
    future.set_result(value)
    return future
