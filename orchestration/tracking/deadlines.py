"""Clients of servers whose calls end: the timeouts of HTTP libraries bound the pause between two bytes, not an answer.

A server that sends a byte now and then, in a header or a body, would keep whoever waits for it as long as it likes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
MOST_LEFT: Final = 8
"""Most calls of one client that are left unanswered before it is asked nothing more."""


class Unanswered(TimeoutError):
    """A call took longer than it may. answer: what it will return, if it ever does."""

    def __init__(self, message: str, answer: Future[Any]) -> None:
        super().__init__(message)
        self.answer = answer


def within(seconds: float, call: Callable[[], Result], advice: str) -> Result:
    """Return what ``call`` returns, which is made in a daemon thread that goes on where nobody waits for it any longer.

    advice: the next step, for an error. Raises: as ``call``; Unanswered after ``seconds``.
    """
    answer: Future[Result] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="dpsweep-request", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if not answer.done():
            raise Unanswered(f"no complete answer within {seconds:g} s; {advice}", answer) from None
        return answer.result()  # it came at the last moment, or the error is the call's own


class Timed:
    """A client of a server, every call of which ends.

    limit: seconds for a call of a method, by the method's name. advice: as `within`.
    """

    def __init__(self, client: object, limit: Callable[[str], float], advice: str) -> None:
        self._client, self._limit, self._advice = client, limit, advice
        self._left: list[Future[Any]] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Return the method of the client called ``name``, which raises TimeoutError where it takes longer than its
        limit.
        """
        return functools.partial(self._call, name)

    def _call(self, name: str, *values: Any, **named: Any) -> Any:
        with self._lock:
            self._left = [each for each in self._left if not each.done()]
        if len(self._left) >= MOST_LEFT:
            raise TimeoutError(f"{len(self._left)} earlier requests have no complete answer yet; {self._advice}")
        call = functools.partial(getattr(self._client, name), *values, **named)
        try:
            return within(self._limit(name), call, self._advice)
        except Unanswered as error:
            with self._lock:
                self._left.append(error.answer)
            raise
