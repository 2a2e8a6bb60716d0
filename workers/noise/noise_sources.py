"""The registered noise sources. `dpsweep.workers.noise.gaussian_sources` implements them, and is imported when one is
made: commands that only ask whether a source is secret need no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from dpsweep.accounting.registry import lookup

if TYPE_CHECKING:
    import torch

    from dpsweep.workers.noise.gaussian_sources import NoiseSource


def _seeded(seed: int, device: torch.device) -> NoiseSource:
    from dpsweep.workers.noise.gaussian_sources import SeededNoise

    return SeededNoise(seed, device)


def _keyed(draws: int, seed: int, device: torch.device) -> NoiseSource:
    from dpsweep.workers.noise.gaussian_sources import KeyedNoise

    return KeyedNoise(device, draws)


@dataclass(frozen=True)
class NoiseSourceKind:
    """A kind of noise source. `make`: (seed of the trial, device) -> source.

    `is_secret`: whether noise, batches and all other random choices of the run come from secret keys, not from the
    seed. If not, the run is reproducible from its seed (research mode).
    """

    make: Callable[[int, torch.device], NoiseSource]
    is_secret: bool


NOISE_SOURCES: Final[Mapping[str, NoiseSourceKind]] = {
    "seeded": NoiseSourceKind(_seeded, is_secret=False),
    "os_entropy": NoiseSourceKind(partial(_keyed, 1), is_secret=True),
    "os_entropy_secure": NoiseSourceKind(partial(_keyed, 4), is_secret=True),
}


def noise_source_kind(name: str) -> NoiseSourceKind:
    """Return the kind of noise source called ``name``. Raises: InvalidInput naming the nearest valid name."""
    return lookup(NOISE_SOURCES, name, "noise source")


def make_noise_source(name: str, seed: int, device: torch.device) -> NoiseSource:
    """Return the noise source called ``name``; a secret one ignores ``seed``."""
    return noise_source_kind(name).make(seed, device)
