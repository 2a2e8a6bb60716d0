"""Standard normal values from a secret key, by the Box-Muller transform of uniform bits, in double precision.

Each value takes 64 bits of the key's stream and uses 53 of them. The largest absolute value is 8.65; a normal value
exceeds it with probability 5e-18.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from dpsweep.workers.noise.chacha import ChaChaStream, Series

BLOCK: Final = 65_536
"""Number of draws made at once on a CPU; their working memory fits in a core's cache."""

_MAX_SHARED_DRAWS: Final = BLOCK // 8
"""Largest number of draws of a call that shares a series with other calls."""

_DEVICE_BLOCK: Final = 2**22
"""Number of draws made at once on other devices; with fewer, launching kernels would take as long as running them."""


class ChaChaGaussians:
    """Independent float64 values from N(0, 1), drawn on ``device`` by ChaCha20 with a key of the operating system.

    Guarantee: no two values share bits of the key's stream, also after `restore` of a later `state`. The uniform bits
    are the same on all kinds of device; values differ only by the last bits of the float64 logarithm, square root, sine
    and cosine.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self.device = ChaChaStream.from_os(device), device

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        """Return ``count`` values in consecutive pieces; each is the sum of ``draws`` (1, 2 or 4) values from N(0, 1).

        Callers must not change them in place.
        """
        return drawn_from(self._stream.series(), count, draws, self.device)

    def series(self, count: int) -> Series | None:
        """Return a new series for a call of ``count`` draws, None if the call shares one with others."""
        return self._stream.series()

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


class SharedChaChaGaussians(ChaChaGaussians):
    """ChaCha20 values for many small calls, which share a block of `BLOCK` draws made at once.

    The start of a call takes far longer than its few draws. Each call for at most `_MAX_SHARED_DRAWS` draws takes the
    next unused draws of the block; if too few are left, they are discarded and a new series is begun. Larger calls have
    their own series. The state holds the number of the shared series and how much of it is used, so that a restored run
    repeats the draws.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._shared: int | None = None
        self._ahead, self._used = torch.zeros(0, dtype=torch.float64), 0

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        if count * draws > _MAX_SHARED_DRAWS:
            yield from super().pieces(count, draws)
        elif count > 0:
            values = self._next(count * draws)
            yield values if draws == 1 else values.view(-1, draws).sum(1)

    def series(self, count: int) -> Series | None:
        return None if count <= _MAX_SHARED_DRAWS else super().series(count)

    def _next(self, needed: int) -> Tensor:
        if self._used + needed > len(self._ahead):
            self._share(self._stream.series())
        self._used += needed
        return self._ahead[self._used - needed : self._used]

    def _share(self, words: Series, used: int = 0) -> None:
        (self._ahead,) = drawn_from(words, BLOCK, 1, self.device)
        self._shared, self._used = words.number, used

    def state(self) -> dict[str, Any]:
        return {**super().state(), "shared": self._shared, "used": self._used}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._shared, self._ahead, self._used = None, self._ahead[:0], 0
        if state["shared"] is not None:
            self._share(self._stream.again(state["shared"]), state["used"])


def most_at_once(device: torch.device) -> int:
    """Return how many draws are made at once on the device."""
    return BLOCK if device.type == "cpu" else _DEVICE_BLOCK


def drawn_from(words: Series, count: int, draws: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the values of `ChaChaGaussians.pieces` from the next words of a series."""
    most = most_at_once(device) // draws
    for start in range(0, count, most):
        needed = draws * min(most, count - start)
        pairs = _uniform(words.words(needed + needed % 2)).view(-1, 2)  # neighbours, whatever the length of a piece
        values = torch.stack(_normal(*pairs.unbind(1)), 1).flatten()[:needed]
        yield values if draws == 1 else values.view(-1, draws).sum(1)


def _uniform(words: Tensor) -> Tensor:
    """Uniform 64-bit words -> float64 in (0, 1], multiples of 2^-54, from the upper 53 bits."""
    upper = words.bitwise_right_shift(11).bitwise_and_((1 << 53) - 1)  # the shift copies the sign
    return upper.double().add_(0.5).mul_(2.0**-53)


def _normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal values from two independent uniform ones."""
    radius, angle = first.log().mul_(-2.0).sqrt_(), second * (2.0 * math.pi)
    return radius * angle.cos(), angle.sin_().mul_(radius)
