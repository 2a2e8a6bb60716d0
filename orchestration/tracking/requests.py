"""Requests to servers that end in time, and side by side.

The timeouts of HTTP libraries bound the pause between two bytes, not an answer. A server that sends a byte now and
then, in a header or a body, would keep whoever waits for it as long as it likes. One that sends without end would fill
the memory. Requests side by side run in daemon threads: one that hangs does not keep the process from ending.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
MOST_LEFT: Final = 8
"""Most calls of one client that are left unanswered before it is asked nothing more."""
LARGEST: Final = 2**28
"""Most bytes of an answer that is read as a whole, unpacked: a page of 1000 runs has up to 100 MB."""
_PIECE: Final = 2**16


class Unanswered(TimeoutError):
    """A call took longer than it may. answer: what it will return, if it ever does."""

    def __init__(self, message: str, answer: Future[Any]) -> None:
        super().__init__(message)
        self.answer = answer


def within_seconds(seconds: float, call: Callable[[], Result], advice: str) -> Result:
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
    """A client of a server whose calls all end.

    limit: seconds for a call of a method, by the method's name. advice: as `within_seconds`. An answer of more than
    `LARGEST` bytes is an error of the call.
    """

    def __init__(self, client: object, limit: Callable[[str], float], advice: str) -> None:
        _bound_answers()
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
            return within_seconds(self._limit(name), call, self._advice)
        except Unanswered as error:
            with self._lock:
                self._left.append(error.answer)
            raise


@functools.cache
def _bound_answers() -> None:
    """Let `requests` read no answer of more than `LARGEST` bytes at once, in this process.

    MLflow and Ray make their own sessions, and offer no option. An answer that is read piece by piece, as a file, is
    not bounded.
    """
    from requests import RequestException, Response

    def content(response: Any) -> Any:
        if response._content is False and not response._content_consumed and response.raw is not None:
            pieces, size = [], 0
            for piece in response.iter_content(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > LARGEST:
                    response.close()
                    raise RequestException(f"{response.url} answers with more than {LARGEST / 2**20:.0f} MiB")
            response._content, response._content_consumed = b"".join(pieces), True
        return original(response)

    answers: Any = Response  # whose property is replaced
    original = answers.content.fget
    answers.content = property(content)


Item = TypeVar("Item")


def each(function: Callable[[Item], object], items: Iterable[Item], in_flight: int) -> None:
    """Call ``function`` for every item, in up to ``in_flight`` threads; return when all calls have.

    After an error no further call begins, and the first error is raised. With one in flight, or one item, the calls are
    made in this thread.
    """
    waiting = list(items)[::-1]
    errors: list[BaseException] = []

    def work() -> None:
        while waiting and not errors:
            try:
                item = waiting.pop()
            except IndexError:  # another thread took the last one
                return
            try:
                function(item)
            except BaseException as error:
                errors.append(error)

    number = min(in_flight, len(waiting))
    if number <= 1:
        work()
    else:
        threads = [threading.Thread(target=work, name="dpsweep-mlflow", daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
