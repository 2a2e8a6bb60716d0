"""Standard normal values from a secret key, by the Box-Muller transform of uniform bits, in double precision.

A value takes 64 bits of the key's stream, of which 53 decide on it; the largest is 8.65 in size, beyond which a normal
value lies with probability 5e-18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from accounting.keystream import KeyedStream
from workers.chacha import ChaChaStream, Series

BLOCK: Final = 65_536
"""Draws made at once on a CPU; their working memory fits in a core's cache."""

_FEW: Final = BLOCK // 8
"""Draws of a call up to which it shares a series with others."""

_DEVICE_BLOCK: Final = 2**22
"""Draws made at once on another device; for fewer, launching the kernels would take as long as running them."""


class Gaussians(Protocol):
    """Independent values from N(0, 1) in float64.

    Guarantee: no two values share bits of the key's stream, also after `restore` of a later `state`.
    """

    device: torch.device
    """Where the values are made."""
    together_below: float
    """Tensors with fewer values than this are filled together, by one call."""

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        """``count`` values, piece by piece; each is the sum of ``draws`` (1, 2 or 4) values from N(0, 1)."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class ShakeGaussians:
    """From SHAKE-256, on the CPU: trials that began so go on so, with the same bits."""

    together_below: float = 16_384

    def __init__(self, device: torch.device) -> None:
        self._stream, self.device = KeyedStream.from_os(), torch.device("cpu")

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        most = BLOCK // draws
        for start in range(0, max(1, count), most):  # no values take a call of the stream too, as they ever did
            needed = draws * min(most, count - start)
            words = torch.from_numpy(self._stream.words(needed + needed % 2).view(np.int64).copy())
            yield torch.cat(_normal(*_uniform(words).chunk(2)))[:needed].view(draws, -1).sum(0)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


class ChaChaGaussians:
    """From ChaCha20, on the given device. On two kinds of device the values differ by the last bits of logarithm,
    square root, sine and cosine in float64, and by no more: the uniform bits are the same."""

    together_below: float = math.inf

    def __init__(self, device: torch.device) -> None:
        self._stream, self.device = ChaChaStream.from_os(device), device

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        return self._drawn_from(self._stream.series(), count, draws)

    def _drawn_from(self, words: Series, count: int, draws: int) -> Iterator[Tensor]:
        most = (BLOCK if self.device.type == "cpu" else _DEVICE_BLOCK) // draws
        for start in range(0, count, most):
            needed = draws * min(most, count - start)
            pairs = _uniform(words.words(needed + needed % 2)).view(-1, 2)  # of neighbours, however long a piece is
            values = torch.stack(_normal(*pairs.unbind(1)), 1).flatten()[:needed]
            yield values if draws == 1 else values.view(-1, draws).sum(1)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


class SharedChaChaGaussians(ChaChaGaussians):
    """Calls for few draws share a series, whose draws are made at once: a call takes far longer to start than to draw.

    A call takes the draws that follow those of the last such call; where too few are left of `BLOCK`, a series is begun
    and the rest is never used. Calls for more than `_FEW` draws have a series of their own. The state keeps which
    series is shared and how much of it is used, so that what is restored makes the same draws again.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._shared: int | None = None
        self._ahead, self._used = torch.zeros(0, dtype=torch.float64), 0

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        if count * draws > _FEW:
            yield from super().pieces(count, draws)
        elif count > 0:
            values = self._next(count * draws)
            yield values if draws == 1 else values.view(-1, draws).sum(1)

    def _next(self, needed: int) -> Tensor:
        if self._used + needed > len(self._ahead):
            self._share(self._stream.series())
        self._used += needed
        return self._ahead[self._used - needed : self._used].clone()  # whoever takes them may change them

    def _share(self, words: Series, used: int = 0) -> None:
        (self._ahead,) = self._drawn_from(words, BLOCK, 1)
        self._shared, self._used = words.number, used

    def state(self) -> dict[str, Any]:
        return {**super().state(), "shared": self._shared, "used": self._used}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._shared, self._ahead, self._used = None, self._ahead[:0], 0
        if state["shared"] is not None:
            self._share(self._stream.again(state["shared"]), state["used"])


CIPHERS: Final[Mapping[str, Callable[[torch.device], Gaussians]]] = {
    "chacha20_shared": SharedChaChaGaussians,
    "chacha20": ChaChaGaussians,
    "shake256": ShakeGaussians,
}
"""Makers with a fresh key from the operating system, by the names that checkpoints keep."""


def _uniform(words: Tensor) -> Tensor:
    """Uniform 64-bit words -> float64 in (0, 1], multiples of 2^-54, from the upper 53 bits."""
    upper = words.bitwise_right_shift(11).bitwise_and_((1 << 53) - 1)  # the shift copies the sign
    return upper.double().add_(0.5).mul_(2.0**-53)


def _normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal values from two independent uniform ones."""
    radius, angle = first.log().mul_(-2.0).sqrt_(), second * (2.0 * math.pi)
    return radius * angle.cos(), angle.sin_().mul_(radius)
