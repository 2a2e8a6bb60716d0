"""One connection for several sweeps that run in turn, such as a tuning and what it tunes, or one that is opened while
its sweep is still planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, TypeVar

T = TypeVar("T")

_stacks: Final[list[ExitStack]] = []
"""What is closed at the end of the block of `kept_open` that this process is in, if any."""
_opened: Final[list[Future[Any]]] = []
"""What was opened, or is being opened, within that block."""


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """What `kept` opens first in this ``with`` block stays open until its end, and `kept` gives it from then on.

    Within another such block it is without effect.
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
    """`kept_open`, with ``opening`` begun at once, in a thread: the first `kept` waits for it, and raises its error.

    The thread lives until all is closed: Linux ends the processes of a Ray when the thread that started them ends.
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
    """What ``opening`` opens: closed at the end of this block, or of the block of `kept_open` around it."""
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
