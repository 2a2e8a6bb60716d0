"""One connection for several sweeps that run in turn, such as a tuning and what it tunes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, TypeVar

T = TypeVar("T")

_stacks: Final[list[ExitStack]] = []
"""Of the block of `kept_open` that this process is in, if any: what is to be closed at its end."""
_opened: Final[list[Any]] = []
"""What was opened within it, if anything."""


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """What `kept` opens first in this ``with`` block stays open until its end, and `kept` gives it from then on."""
    with ExitStack() as stack:
        _stacks.append(stack)
        try:
            yield
        finally:
            _stacks.clear()
            _opened.clear()


@contextlib.contextmanager
def kept(opening: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """What ``opening`` opens: closed at the end of this block, or of the block of `kept_open` around it."""
    if not _stacks:
        with opening() as found:
            yield found
        return
    if not _opened:
        _opened.append(_stacks[0].enter_context(opening()))
    yield _opened[0]
