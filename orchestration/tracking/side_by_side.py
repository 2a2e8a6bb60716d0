"""Requests to MLflow side by side, in daemon threads: a request that hangs does not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

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
