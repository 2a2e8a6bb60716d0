"""A cache in the process for tables that every part of a trial needs, limited in bytes."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


def kept(most_bytes: int) -> Callable[[Callable[..., Table]], Callable[..., Table]]:
    """Cache the latest results of the decorated pure function of hashable arguments, read-only, up to ``most_bytes``.

    `functools.lru_cache` limits the number of results, but these differ in size by a factor of a thousand.
    """

    def decorate(function: Callable[..., Table]) -> Callable[..., Table]:
        cache = _Cache(most_bytes)

        @functools.wraps(function)
        def found(*arguments: Any) -> Table:
            table = cache.get(arguments)
            if table is None:
                table = function(*arguments)
                table.setflags(write=False)
                cache.put(arguments, table)
            return table

        return found

    return decorate


class _Cache:
    """Tables by key. Above the limit in bytes the least recently used are dropped, except the last. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Table | None:
        with self._lock:
            if key not in self._tables:
                return None
            self._tables.move_to_end(key)
            return self._tables[key]

    def put(self, key: Hashable, table: Table) -> None:
        with self._lock:
            if key in self._tables:
                return
            self._tables[key] = table
            self._bytes += table.nbytes
            while self._bytes > self._most and len(self._tables) > 1:
                self._bytes -= self._tables.popitem(last=False)[1].nbytes
