"""A background thread that does work in order, so that callers do not wait for the storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

AT_MOST = 2
"""Largest number of unfinished pieces of work; handing over another one waits."""


class Background:
    """Runs functions in the order given, in one thread. After a failure no further one is begun.

    The failure is raised by the next call of `do` or `wait`, and by every one after that.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "dpsweep-writer")
        self._pending: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Hand over some work; waits while `AT_MOST` others are not done."""
        while self._pending and (self._pending[0].done() or len(self._pending) >= AT_MOST):
            self._settle()
        self._raise()
        self._pending.append(self._thread.submit(self._unless_failed, work))

    def wait(self) -> None:
        """Return when everything is done."""
        while self._pending:
            self._settle()
        self._raise()

    def close(self) -> None:
        """Wait for the work that has begun, and drop the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        self._raise()
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise

    def _settle(self) -> None:
        self._pending[0].result()
        self._pending.popleft()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
