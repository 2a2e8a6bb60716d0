"""Sources of Gaussian noise, each with a state that a checkpoint can keep.

========================  ==========================================================================================
``seeded``                research mode: whoever knows the trial's seed can subtract the noise. For experiments only.
``os_entropy``            a 256-bit key from the operating system, expanded by SHAKE-256. For models that are released.
``os_entropy_secure``     the same, each value the scaled sum of four draws, so that no draw can be recovered from its
                          rounding (Holohan and Braghin, 2021, "Secure random sampling").
========================  ==========================================================================================

Sums with noise from a key are rounded to a public grid, so that their last bits do not tell the value either.
The key never leaves the private checkpoint; with it a resumed run repeats the noise of the undisturbed one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accounting.errors import require_finite
from accounting.keyed import KeyedStream
from accounting.registry import lookup
from accounting.rounding import release_grid

BLOCK: Final = 65_536
"""Draws made at a time: few enough for what they are made from to stay in a core's cache."""


class NoiseSource(Protocol):
    """Independent draws from N(0, std^2), reproducible from `state`.

    Guarantee: successive draws are independent of each other and of everything else in the run; std 0 gives exact
    zeros; std NaN, infinite or negative is `InvalidInput`.
    """

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """A float32 tensor of ``shape`` on the source's device."""
        ...

    def added(self, values: Tensor, std: float) -> Tensor:
        """values + noise, with the dtype and device of ``values``: the form in which private values are released."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SeededNoise:
    """Research mode: a torch generator on the device, seeded by the trial."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(derive_seed(seed, "noise"))

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        require_finite("noise std", std, at_least=0.0)
        return torch.randn(shape, generator=self._generator, device=self._generator.device).mul_(std)

    def added(self, values: Tensor, std: float) -> Tensor:
        return values + self.normal(tuple(values.shape), std).to(values)

    def state(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class KeyedNoise:
    """Noise from a secret key: Box and Muller make the uniform bits of its stream Gaussian.

    draws: each value is the sum of this many independent draws over the square root of their number, which is
    exactly as Gaussian; with four, recovering a draw from its rounding is infeasible.
    """

    def __init__(self, stream: KeyedStream, device: torch.device, draws: int = 1) -> None:
        self._stream, self._device, self._draws = stream, device, draws

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        return self._exact(shape, std).to(self._device, torch.float32)

    def added(self, values: Tensor, std: float) -> Tensor:
        """Added in double precision, beside which the grid is coarse, and rounded to it."""
        if std == 0.0:
            return values
        grid = release_grid(std)
        noisy = self._exact(tuple(values.shape), std).add_(values.cpu())
        return noisy.div_(grid).round_().mul_(grid).to(values)

    def _exact(self, shape: tuple[int, ...], std: float) -> Tensor:
        """float64, on the CPU."""
        require_finite("noise std", std, at_least=0.0)
        values, scale = torch.empty(math.prod(shape), dtype=torch.float64), std / math.sqrt(self._draws)
        with _one_thread():
            for block in torch.split(values, BLOCK // self._draws):
                count = self._draws * len(block)
                draws = _box_muller(self._stream.words(count + count % 2))[:count]
                torch.sum(draws.view(self._draws, -1), 0, out=block).mul_(scale)
        return values.view(shape)

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)


def _box_muller(words: npt.NDArray[np.uint64]) -> Tensor:
    """An even number of uniform 64-bit words to as many independent standard normal values, in double precision."""
    uniform = torch.from_numpy((words >> np.uint64(11)).astype(np.float64))
    radius, angle = uniform.add_(0.5).mul_(2.0**-53).chunk(2)  # in (0, 1): the logarithm is finite
    radius, angle = radius.log_().mul_(-2.0).sqrt_(), angle.mul_(2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are too small for several: on a busy machine, threads that wait for each other cost a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seeded(seed: int, device: torch.device) -> NoiseSource:
    return SeededNoise(seed, device)


def _os_entropy(seed: int, device: torch.device) -> NoiseSource:
    return KeyedNoise(KeyedStream.from_os(), device)


def _os_entropy_secure(seed: int, device: torch.device) -> NoiseSource:
    return KeyedNoise(KeyedStream.from_os(), device, draws=4)


@dataclass(frozen=True)
class NoiseSourceKind:
    """How to make a noise source, from the trial's seed and a device, and what it claims.

    is_secret: the noise comes from a key that nobody knows, so batches and all other random choices of the run must
    too, and the seed is ignored. Otherwise the run is reproducible from its seed: research mode.
    """

    make: Callable[[int, torch.device], NoiseSource]
    is_secret: bool


NOISE_SOURCES: Final[Mapping[str, NoiseSourceKind]] = {
    "seeded": NoiseSourceKind(_seeded, is_secret=False),
    "os_entropy": NoiseSourceKind(_os_entropy, is_secret=True),
    "os_entropy_secure": NoiseSourceKind(_os_entropy_secure, is_secret=True),
}


def noise_source_kind(name: str) -> NoiseSourceKind:
    """The noise source called ``name``, or `InvalidInput` naming the nearest valid one."""
    return lookup(NOISE_SOURCES, name, "noise source")


def make_noise_source(name: str, seed: int, device: torch.device) -> NoiseSource:
    """The noise source called ``name``; a secret one ignores ``seed``."""
    return noise_source_kind(name).make(seed, device)


def derive_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose, unrelated to those of other purposes and other seeds."""
    digest = hashlib.sha256(f"dpsweep:{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_torch(noise_source: str, seed: int, purpose: str) -> None:
    """Start torch's global generators, which models draw from, as by dropout; see `start_generator`.

    Those of CUDA devices take no more than 64 bits.
    """
    secret = noise_source_kind(noise_source).is_secret
    torch.manual_seed(int(KeyedStream.from_os().words(1)[0]) if secret else derive_seed(seed, purpose))
    start_generator(torch.default_generator, noise_source, seed, purpose)


def start_generator(generator: torch.Generator, noise_source: str, seed: int, purpose: str) -> None:
    """Start a generator of the CPU: from the trial's seed, or from a secret key where the noise source has one.

    One example more shifts what is drawn for all others of its batch: whoever knew those numbers would see the sum move
    by more than that example. The start is secret in all its 19,937 bits, of which `torch.Generator.manual_seed` takes
    32. But what follows from it is a Mersenne Twister's: no cryptographic stream.
    """
    if not noise_source_kind(noise_source).is_secret:
        generator.manual_seed(derive_seed(seed, purpose))
        return
    state = generator.manual_seed(0).get_state()
    words = KeyedStream.from_os().words(_TWISTER_WORDS) >> np.uint64(32)
    state.numpy()[_TWISTER_START : _TWISTER_START + words.nbytes] = words.view(np.uint8)
    generator.set_state(state)


_TWISTER_START: Final = 24
_TWISTER_WORDS: Final = 624
"""Where torch keeps the words of a Mersenne Twister in its state, each in 64 bits, and how many they are."""
