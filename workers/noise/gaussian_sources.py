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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.numerics.rounding import release_grid
from dpsweep.workers.noise.chacha import has_kernels
from dpsweep.workers.noise.gaussians import SharedChaChaGaussians


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
        """Return `added` applied to each of ``values``, with independent noise, in new tensors; all are on one
        device.
        """
        ...

    def standard(self, count: int) -> Iterator[Tensor]:
        """Yield ``count`` draws from N(0, 1) in consecutive pieces, float64 on the device that draws.

        Callers must not change them in place.
        """
        ...

    def rounded(self, noisy: Tensor, std: float) -> Tensor:
        """Return ``noisy``, float64 values with noise of ``std`` > 0, as they may be released."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SeededNoise:
    """Noise of research mode: a torch generator on the device, seeded by the trial's seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(derive_seed(seed, "noise"))

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        require_finite("noise std", std, at_least=0.0)
        return torch.randn(shape, generator=self._generator, device=self._generator.device).mul_(std)

    def added(self, values: Tensor, std: float) -> Tensor:
        return values + self.normal(tuple(values.shape), std).to(values)

    def added_to_each(self, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
        noise = [self.normal(tuple(each.shape), std).to(each) for each in values.values()]
        return dict(zip(values, torch._foreach_add(list(values.values()), noise), strict=True))

    def standard(self, count: int) -> Iterator[Tensor]:
        device = self._generator.device
        yield torch.randn(count, generator=self._generator, device=device, dtype=torch.float64)

    def rounded(self, noisy: Tensor, std: float) -> Tensor:
        """Return ``noisy`` itself: whoever knows the seed knows the noise."""
        return noisy

    def state(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class KeyedNoise:
    """Noise from a secret key, expanded to standard normal values by ChaCha20 (`dpsweep.workers.noise.gaussians`).

    draws: number of independent draws that are summed and divided by the square root of their number, which keeps the
    distribution; with four, recovering a draw from its rounding is infeasible.
    """

    def __init__(self, device: torch.device, draws: int = 1) -> None:
        self._device, self._draws = device, draws
        self._gaussians = SharedChaChaGaussians(device)

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
        """Return `added` applied to each of ``values``; all share one call, as its start costs more than a few
        draws.
        """
        if not values:
            return {}
        joined = self._add(torch.cat([each.flatten() for each in values.values()]), std)
        parts = joined.split([each.numel() for each in values.values()])
        return {name: part.view(each.shape).to(each) for part, (name, each) in zip(parts, values.items(), strict=True)}

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

    def standard(self, count: int) -> Iterator[Tensor]:
        for draws in self._gaussians.pieces(count, self._draws):
            yield draws if self._draws == 1 else draws / math.sqrt(self._draws)

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
