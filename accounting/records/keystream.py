"""A cryptographic stream of uniform bits, for random numbers that must stay secret for a guarantee to hold."""

from __future__ import annotations

import functools
import hashlib
import os
import resource
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 32


def fresh_key() -> bytes:
    """Return a key from the operating system, for a process that from now on leaves no core file."""
    forbid_core_files()
    return os.urandom(KEY_BYTES)


@functools.cache
def forbid_core_files() -> None:
    """Keep this process, and those that it starts, from leaving a core file, in which a key would lie.

    Linux writes no core of at most 1 byte into a file, and unlike for a limit of 0, none to a program that collects
    them, such as systemd-coredump. ``prctl(PR_SET_DUMPABLE)`` is not used: it would also close ``/proc`` of the process
    to Ray, which measures there how much memory its workers have.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 0 if most == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


class KeyedStream:
    """SHAKE-256 of (key, counter), a fresh counter for every call.

    Guarantee: without the 256-bit key the bits, however many are seen, are computationally indistinguishable from
    uniform ones, if SHAKE-256 with a secret prefix is a pseudo-random function.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._counter = key, 0

    @staticmethod
    def from_os() -> KeyedStream:
        """Return a stream with a fresh key from the operating system."""
        return KeyedStream(fresh_key())

    def octets(self, count: int) -> NDArray[np.uint8]:
        """Return ``count`` uniform bytes."""
        stream = hashlib.shake_256(self._key + self._counter.to_bytes(8, "little"))
        self._counter += 1
        return np.frombuffer(stream.digest(count), np.uint8)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return ``count`` uniform 64-bit words."""
        return self.octets(8 * count).view("<u8")

    def state(self) -> dict[str, Any]:
        """Return the key and counter, for `restore`; as secret as the numbers drawn."""
        return {"key": self._key, "counter": self._counter}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._key, self._counter = state["key"], state["counter"]
