"""A cryptographic stream of uniform bits, for random numbers that must stay secret for a guarantee to hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 32


class KeyedStream:
    """SHAKE-256 of (key, counter), a fresh counter for every call.

    Guarantee: without the 256-bit key the bits, however many are seen, are computationally indistinguishable from
    uniform ones, if SHAKE-256 with a secret prefix is a pseudo-random function.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._counter = key, 0

    @staticmethod
    def from_os() -> KeyedStream:
        """A stream with a fresh key from the operating system."""
        return KeyedStream(os.urandom(KEY_BYTES))

    def octets(self, count: int) -> NDArray[np.uint8]:
        """``count`` uniform bytes."""
        stream = hashlib.shake_256(self._key + self._counter.to_bytes(8, "little"))
        self._counter += 1
        return np.frombuffer(stream.digest(count), np.uint8)

    def words(self, count: int) -> NDArray[np.uint64]:
        """``count`` uniform 64-bit words."""
        return self.octets(8 * count).view("<u8")

    def state(self) -> dict[str, Any]:
        """Key and counter, for `restore`; as secret as the numbers drawn."""
        return {"key": self._key, "counter": self._counter}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._key, self._counter = state["key"], state["counter"]
