"""Sources of Gaussian noise. A checkpoint stores their state, so that a resumed run repeats the same noise.

========================  ==========================================================================================
``seeded``                research mode: whoever knows the trial's seed can subtract the noise. For experiments only.
``os_entropy``            a 256-bit key from the operating system, expanded by ChaCha20. For models that are released.
``os_entropy_secure``     the same, but each value is a scaled sum of four draws, against attacks that recover a draw
                          from its floating-point rounding (Holohan and Braghin, 2021, "Secure random sampling").
========================  ==========================================================================================

Sums of values and keyed noise are rounded to a public grid, so that their last bits do not reveal the exact value.
The key is stored only in the private checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.numerics.rounding import release_grid
from dpsweep.accounting.records.keystream import KeyedStream
from dpsweep.workers.noise.chacha import WORDS, ChaChaStream, Series, has_kernels


class StepDraws(Protocol):
    """Draws from N(0, 1) by step and by piece of the weights: any of them can be made again, at any rank of a trial.

    Guarantee: draws of different steps or weights are independent of each other and of everything else in the run.
    """

    @property
    def most(self) -> int:
        """Number of weights of a piece; the last piece of a model may have fewer."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that draws."""
        ...

    def draw(self, step: int, start: int, count: int) -> Tensor:
        """Return the draws [count] of a step for the piece from weight ``start`` on, float64.

        Callers must not change them in place.
        """
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class NoiseSource(Protocol):
    """A source of independent draws from N(0, std^2), reproducible from `state`.

    Guarantee: draws are independent of each other and of everything else in the run; std 0 gives exact zeros.

    Raises: InvalidInput when std is NaN, infinite or negative.
    """

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Return a float32 tensor of ``shape`` on the source's device."""
        ...

    def added(self, values: Tensor, std: float) -> Tensor:
        """Return values + noise, with the dtype and device of ``values``.

        Release private values only by this method or `added_to_each`.
        """
        ...

    def added_to_each(self, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
        """Return `added` of each of ``values``, in new tensors, with independent noise; all are on one device."""
        ...

    def added_in_turn(self, values: Iterable[Tensor], count: int, std: float) -> Iterator[Tensor]:
        """Yield the bits of `added_to_each` for tensors that come one after the other, ``count`` entries in all.

        `values`: flat ones, which may be overwritten. Take all of them before anything else is drawn.
        """
        ...

    def draws_of_steps(self) -> StepDraws:
        """Return the draws of noise that is correlated over steps, which are independent of all others."""
        ...

    def rounded(self, noisy: Tensor, std: float) -> Tensor:
        """Return ``noisy``, float64 values with noise of ``std`` > 0, as they may be released."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SeededNoise:
    """Noise of research mode: a torch generator on the device, seeded by the trial's seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generator = seed, torch.Generator(device).manual_seed(derive_seed(seed, "noise"))

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        require_finite("noise std", std, at_least=0.0)
        return torch.randn(shape, generator=self._generator, device=self._generator.device).mul_(std)

    def added(self, values: Tensor, std: float) -> Tensor:
        return values + self.normal(tuple(values.shape), std).to(values)

    def added_to_each(self, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
        noise = [self.normal(tuple(each.shape), std).to(each) for each in values.values()]
        return dict(zip(values, torch._foreach_add(list(values.values()), noise), strict=True))

    def added_in_turn(self, values: Iterable[Tensor], count: int, std: float) -> Iterator[Tensor]:
        for each in values:
            (noisy,) = self.added_to_each({"": each}, std).values()
            yield noisy

    def draws_of_steps(self) -> StepDraws:
        return SeededDraws(self._seed, self._generator.device)

    def rounded(self, noisy: Tensor, std: float) -> Tensor:
        """Return ``noisy`` itself: whoever knows the seed knows the noise."""
        return noisy

    def state(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        stored = state["generator"]
        if len(stored) == len(self._generator.get_state()):
            self._generator.set_state(stored)
        else:  # of the other kind of device, whose generator draws other numbers
            self._generator.manual_seed(derive_seed(self._seed, f"noise after {stored.tolist()}"))


class KeyedNoise:
    """Noise from a secret key, expanded to standard normal values by ChaCha20 (`ChaChaGaussians`).

    draws: number of independent draws that are summed and divided by the square root of their number, which keeps the
    distribution; with four, recovering a draw from its rounding is infeasible.
    """

    def __init__(self, device: torch.device, draws: int = 1) -> None:
        self._device, self._draws = device, draws
        self._gaussians = ChaChaGaussians(device)

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        require_finite("noise std", std, at_least=0.0)
        values = torch.empty(math.prod(shape), dtype=torch.float32, device=self._device)
        with one_thread():
            for part, noise in self._scaled(values, std):
                part.copy_(noise)
        return values.view(shape)

    def added(self, values: Tensor, std: float) -> Tensor:
        """Return values + noise, added in double precision and rounded to the public grid, which is much coarser."""
        return self._add(values.flatten().clone(), std).view(values.shape)

    def added_to_each(self, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
        """Return `added` of each of ``values``, in one call, whose start costs more than a few draws."""
        if not values:
            return {}
        given = list(values.values())
        parts = _unflatten_dense_tensors(self._add(torch.cat([each.flatten() for each in given]), std), given)
        same = (part if part.dtype == each.dtype else part.to(each) for part, each in zip(parts, given, strict=True))
        return dict(zip(values, same, strict=True))

    def added_in_turn(self, values: Iterable[Tensor], count: int, std: float) -> Iterator[Tensor]:
        require_finite("noise std", std, at_least=0.0)
        if std == 0.0:
            yield from values
            return
        scale, start = std / math.sqrt(self._draws), 0
        series = self._gaussians.series(count * self._draws) if has_kernels(self._device) else None
        if series is not None:
            for each in values:
                yield series.with_noise_from(start, each, self._draws, scale, release_grid(std))
                start += len(each)
            return

        def add(part: Tensor, draws: Tensor) -> None:
            part.copy_(self.rounded((draws * scale).add_(part.to(draws.device)), std))

        yield from met_by(values, self._gaussians.pieces(count, self._draws), add)

    def _add(self, values: Tensor, std: float) -> Tensor:
        """Change ``values`` [n] to `added` of them, in place."""
        if std == 0.0:
            return values
        require_finite("noise std", std, at_least=0.0)
        if has_kernels(values.device) and (series := self._gaussians.series(len(values) * self._draws)) is not None:
            series.add_noise(values, self._draws, std / math.sqrt(self._draws), release_grid(std))
            return values
        with one_thread():
            for part, noise in self._scaled(values, std):
                part.copy_(self.rounded(noise.add_(part.to(noise.device)), std))
        return values

    def rounded(self, noisy: Tensor, std: float) -> Tensor:
        """Round ``noisy`` in place to the public grid of ``std``, and return it."""
        grid = release_grid(std)
        return noisy.div_(grid).round_().mul_(grid)

    def draws_of_steps(self) -> StepDraws:
        return KeyedDraws(self._device, self._draws)

    def _scaled(self, values: Tensor, std: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive parts of ``values`` [n], each with as many draws of noise, float64 on the device that draws."""
        start, scale = 0, std / math.sqrt(self._draws)
        for draws in self._gaussians.pieces(len(values), self._draws):
            yield values[start : start + len(draws)], draws * scale
            start += len(draws)

    def state(self) -> dict[str, Any]:
        return self._gaussians.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._gaussians.restore(state)


class SeededDraws:
    """Draws of research mode, from the seed of the trial."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generator = seed, torch.Generator(device)
        self.device, self.most = device, most_at_once(device)

    def draw(self, step: int, start: int, count: int) -> Tensor:
        self._generator.manual_seed(derive_seed(self._seed, f"noise of step {step} from weight {start} on"))
        return torch.randn(count, generator=self._generator, device=self.device, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._seed = state["seed"]


class KeyedDraws:
    """Draws from a secret key of their own: a series for each step, a place in it for each weight.

    draws: as of `KeyedNoise`. Pieces have other sizes on other devices, and the same draws.
    """

    def __init__(self, device: torch.device, draws: int) -> None:
        self._draws, self._stream = draws, ChaChaStream.from_os(device)
        self.device, self.most = device, most_at_once(device) // draws

    def draw(self, step: int, start: int, count: int) -> Tensor:
        words = self._stream.again(step, start * self._draws // WORDS)
        (drawn,) = drawn_from(words, count, self._draws, self.device)
        return drawn if self._draws == 1 else drawn / math.sqrt(self._draws)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


def met_by(
    values: Iterable[Tensor], pieces: Iterator[Tensor], add: Callable[[Tensor, Tensor], None]
) -> Iterator[Tensor]:
    """Yield flat ``values``, changed in place by ``add`` with as many entries of consecutive ``pieces``.

    Takes all pieces.
    """
    left = torch.zeros(0)
    for each in values:
        start = 0
        with one_thread():
            while start < len(each):
                left = left if len(left) else next(pieces)
                some = min(len(left), len(each) - start)
                add(each[start : start + some], left[:some])
                left, start = left[some:], start + some
        yield each
    with one_thread():
        assert next(pieces, None) is None, "there are as many draws as values"


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: blocks are small, and on a busy machine several threads can be a hundred times as slow."""
    threads = torch.get_num_threads()
    if threads == 1:  # setting it again would empty torch's cache of kernels
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def derive_seed(seed: int, purpose: str) -> int:
    """Return a 63-bit seed for one purpose: the first bits of a SHA-256 digest of seed and purpose."""
    digest = hashlib.sha256(f"dpsweep:{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


BLOCK: Final = 65_536
"""Number of draws made at once on a CPU; their working memory fits in a core's cache."""

_MAX_SHARED_DRAWS: Final = BLOCK // 8
"""Largest number of draws of a call that shares a series with other calls."""

_DEVICE_BLOCK: Final = 2**22
"""Number of draws made at once on other devices; with fewer, launching kernels would take as long as running them."""


class ChaChaGaussians:
    """Independent float64 values from N(0, 1), drawn on ``device`` by ChaCha20 with a key of the operating system.

    They are made by the Box-Muller transform from uniform bits, 53 of 64 for each value. The largest absolute value is
    8.65; a normal value exceeds it with probability 5e-18.

    Guarantee: no two values share bits of the key's stream, also after `restore` of a later `state`. The uniform bits
    are the same on all kinds of device; values differ only by the last bits of the float64 logarithm, square root, sine
    and cosine.

    Small calls share a block of `BLOCK` draws made at once, because the start of a call takes far longer than its few
    draws. Each call for at most `_MAX_SHARED_DRAWS` draws takes the next unused draws of the block; if too few are
    left, they are discarded and a new series is begun. Larger calls have their own series. The state holds the number
    of the shared series and how much of it is used, so that a restored run repeats the draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._device = ChaChaStream.from_os(device), device
        self._shared: int | None = None
        self._ahead, self._used = torch.zeros(0, dtype=torch.float64), 0

    def pieces(self, count: int, draws: int) -> Iterator[Tensor]:
        """Yield ``count`` values in consecutive pieces; each is the sum of ``draws`` (1, 2 or 4) values from N(0, 1).

        Callers must not change them in place.
        """
        words = self.series(count * draws)
        if words is not None:
            yield from drawn_from(words, count, draws, self._device)
        elif count > 0:
            values = self._next(count * draws)
            yield values if draws == 1 else values.view(-1, draws).sum(1)

    def series(self, count: int) -> Series | None:
        """Return a new series for a call of ``count`` draws, None if the call shares one with others."""
        return None if count <= _MAX_SHARED_DRAWS else self._stream.series()

    def _next(self, needed: int) -> Tensor:
        if self._used + needed > len(self._ahead):
            self._share(self._stream.series())
        self._used += needed
        return self._ahead[self._used - needed : self._used]

    def _share(self, words: Series, used: int = 0) -> None:
        (self._ahead,) = drawn_from(words, BLOCK, 1, self._device)
        self._shared, self._used = words.number, used

    def state(self) -> dict[str, Any]:
        return {**self._stream.state(), "shared": self._shared, "used": self._used}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)
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


def seed_torch(seed: int | None, purpose: str) -> None:
    """Seed torch's global generators, from which models draw (dropout, for instance); see `start_generator`.

    CUDA generators get at most 64 bits of seed, which is all that they take.
    """
    torch.manual_seed(start_of(seed, purpose))
    start_generator(torch.default_generator, seed, purpose)


def start_of(seed: int | None, purpose: str) -> int:
    """Return the start of a CUDA generator: from the seed, or from a secret key if there is none."""
    return int(KeyedStream.from_os().words(1)[0]) if seed is None else derive_seed(seed, purpose)


def start_generator(generator: torch.Generator, seed: int | None, purpose: str) -> None:
    """Seed a CPU generator from `TrialSpec.known_seed`, or from a secret key if there is none.

    Why secret: one more example in a batch shifts the draws of all others in it. For an adversary who knows the
    draws, the sum changes by more than the contribution of one example. All 19,937 bits of the initial state are
    secret; `torch.Generator.manual_seed` takes 32. The generator is a Mersenne Twister, which is not cryptographic.
    """
    if seed is not None:
        generator.manual_seed(derive_seed(seed, purpose))
        return
    state = generator.manual_seed(0).get_state()
    words = KeyedStream.from_os().words(_TWISTER_WORDS) >> np.uint64(32)
    state.numpy()[_TWISTER_START : _TWISTER_START + words.nbytes] = words.view(np.uint8)
    generator.set_state(state)


_TWISTER_START: Final = 24
_TWISTER_WORDS: Final = 624
"""Byte offset and number of the Mersenne Twister's words, 64 bits each, in the state of a torch generator."""
