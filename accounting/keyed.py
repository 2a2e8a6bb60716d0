"""A cryptographic stream of uniform bits, for all random numbers that a guarantee needs to be secret."""

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

    Guarantee: whoever does not know the 256-bit key cannot tell the bits from uniform ones, however many of them are
    seen, as long as SHAKE-256 with a secret prefix is a pseudo-random function.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._counter = key, 0

    @staticmethod
    def from_os() -> KeyedStream:
        """With a key of the operating system."""
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
        """Holds the key: as secret as what was drawn."""
        return {"key": self._key, "counter": self._counter}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._key, self._counter = state["key"], state["counter"]
