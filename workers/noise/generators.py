"""Seeds of torch's own generators, from the trial's seed or from secret keys."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from dpsweep.accounting.records.keystream import KeyedStream
from dpsweep.workers.noise.gaussian_sources import derive_seed
from dpsweep.workers.noise.noise_sources import noise_source_kind


def seed_torch(noise_source: str, seed: int, purpose: str) -> None:
    """Seed torch's global generators, from which models draw (dropout, for instance); see `start_generator`.

    CUDA generators get at most 64 bits of seed, which is all that they take.
    """
    secret = noise_source_kind(noise_source).is_secret
    torch.manual_seed(int(KeyedStream.from_os().words(1)[0]) if secret else derive_seed(seed, purpose))
    start_generator(torch.default_generator, noise_source, seed, purpose)


def start_generator(generator: torch.Generator, noise_source: str, seed: int, purpose: str) -> None:
    """Seed a CPU generator from the trial's seed, or from a secret key if the noise source is secret.

    Why secret: one more example in a batch shifts the draws of all others in it. For an adversary who knows the
    draws, the sum changes by more than the contribution of one example. All 19,937 bits of the initial state are
    secret; `torch.Generator.manual_seed` takes 32. The generator is a Mersenne Twister, which is not cryptographic.
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
"""Byte offset and number of the Mersenne Twister's words, 64 bits each, in the state of a torch generator."""
