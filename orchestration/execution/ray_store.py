"""The place where ranks on several nodes find each other: an actor, which only processes of the cluster can ask.

A store of torch's own would listen on all interfaces, and answer whoever connects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, cast

import ray
from ray.exceptions import RayError
from torch._C._distributed_c10d import Store

_PATIENCE: Final = 600.0
"""Seconds in which the other ranks must have come."""


class _Meeting:
    """Values by key, for the calls of all ranks. An asyncio actor: any number of calls wait in it at once."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def get(self, key: str) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    async def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    async def add(self, key: str, amount: int) -> int:
        async with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total


@contextlib.contextmanager
def meeting(ranks: int) -> Iterator[Any]:
    """An actor in which ``ranks`` ranks can meet, for the duration of a ``with`` block."""
    actor = cast(Any, ray.remote(_Meeting)).options(num_cpus=0.0, max_concurrency=2 * ranks).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)


class RayStore(Store):
    """A store of torch.distributed whose values the actor of a `meeting` holds.

    Raises: RuntimeError, as torch's own stores do, if the actor is lost or a rank does not come in time.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = actor

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        _answer(self._actor.set.remote(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        value: bytes = _answer(self._actor.get.remote(key))
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, at first 0; return the sum."""
        total: int = _answer(self._actor.add.remote(key, amount))
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        found: bool = _answer(self._actor.has.remote(keys))
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all values are there."""
        for key in keys:
            self.get(key)


def _answer(call: Any) -> Any:
    try:
        return ray.get(call, timeout=_PATIENCE)
    except RayError as error:  # of a lost actor, or `GetTimeoutError`
        raise RuntimeError("the other ranks cannot be found") from error
