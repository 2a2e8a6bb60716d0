"""How the noise of a run is correlated over its steps: a closed sum of strategies.

Noise of step t is z_t = sum_s C^-1[t, s] w_s with independent Gaussian draws w_s and a lower triangular Toeplitz matrix
C. Sums over many steps then have less noise than with independent draws. Every accountant matches `NoiseStrategy`
completely, or refuses what it does not know by name. To add a strategy, write a class and name it in `NoiseStrategy`
and `STRATEGIES`.

The noise multiplier of a correlated run is the standard deviation of the draws w over the clipping bound and over the
largest norm of a column of C. That norm is the sensitivity for one participation (docs/accounting.md, "Correlated
noise").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import numpy as np

from dpsweep.accounting.errors import UnsupportedMechanism, keep_finite, keep_whole
from dpsweep.accounting.mechanism.buffered import Pairs, best_buffered
from dpsweep.accounting.mechanism.toeplitz import (
    Array,
    best_banded,
    inverse_column,
    inverse_square_root_column,
    prefix_errors,
)
from dpsweep.accounting.registry import build, lookup

LARGEST_STEPS: Final = 10**6
"""Most steps of a run with correlated noise: its matrix has as many rows."""
MOST_BANDS: Final = 256
"""Most diagonals that a strategy may name: a trainer keeps as many earlier draws."""
MOST_BUFFERS: Final = 8
"""Most buffers of a strategy: from 6 to 8 the error of 10,000 steps falls by 1e-4 of it."""


@dataclass(frozen=True)
class Recurrence:
    """C^-1 as a recurrence, by which a trainer makes the noise of a step from few earlier values.

    of_noise[0] z_t = sum_i of_draws[i] w_(t-i) - sum_(j >= 1) of_noise[j] z_(t-j), where values before step 0 are 0.
    """

    of_draws: Array
    of_noise: Array

    @property
    def kept(self) -> int:
        """Number of earlier draws and noises of every weight that a trainer keeps, as doubles."""
        return len(self.of_draws) + len(self.of_noise) - 2

    @property
    def keeps_draws_alone(self) -> bool:
        """Return whether noise follows from the draws of the last steps, whatever was before them."""
        return len(self.of_noise) == 1


Memory = Recurrence | Pairs
"""How a trainer makes the noise of a step from earlier values."""


@final
@dataclass(frozen=True)
class IndependentNoise:
    """C is the identity: fresh noise at every step, which needs no state."""

    stored_name: ClassVar[str] = "independent"
    words: ClassVar[str] = "independent noise"

    def column(self) -> Array:
        """Return the first column of C, up to its last entry that differs from 0."""
        return np.ones(1)

    def noising_column(self) -> Array:
        """Return the first column of C^-1, up to its last entry that differs from 0."""
        return np.ones(1)

    def memory(self) -> Memory:
        """Return z = w, which keeps nothing."""
        return Recurrence(np.ones(1), np.ones(1))


@final
@dataclass(frozen=True)
class BandedNoise:
    """C has ``bands`` diagonals, those with the least mean squared error of the prefix sums of ``steps`` steps.

    BandMF: Choquette-Choo et al., arXiv 2306.08153; McKenna, arXiv 2405.15913.
    """

    stored_name: ClassVar[str] = "banded"
    words: ClassVar[str] = "banded noise"

    bands: int
    steps: int

    def __post_init__(self) -> None:
        _keep_sizes(self)

    def column(self) -> Array:
        """Return the first column of C, up to its last entry that differs from 0."""
        return np.array(best_banded(self.bands, self.steps))

    def memory(self) -> Memory:
        """Return C z = w, which keeps the noise of ``bands`` - 1 steps."""
        return Recurrence(np.ones(1), self.column())

    def noising_column(self) -> Array:
        """Return the first column of C^-1 [steps]."""
        return inverse_column(self.column(), self.steps)


@final
@dataclass(frozen=True)
class InverseRootNoise:
    """C^-1 has ``bands`` diagonals, from the inverse square root of prefix sums: BISR, arXiv 2505.12128."""

    stored_name: ClassVar[str] = "bisr"
    words: ClassVar[str] = "noise of a banded inverse square root"

    bands: int
    steps: int

    def __post_init__(self) -> None:
        _keep_sizes(self)

    def column(self) -> Array:
        """Return the first column of C [steps]."""
        return inverse_column(self.noising_column(), self.steps)

    def noising_column(self) -> Array:
        """Return the first column of C^-1, up to its last entry that differs from 0."""
        return inverse_square_root_column(min(self.bands, self.steps))

    def memory(self) -> Memory:
        """Return z = C^-1 w, which keeps the draws of ``bands`` - 1 steps."""
        return Recurrence(self.noising_column(), np.ones(1))


@final
@dataclass(frozen=True)
class LambdaNoise:
    """z_t = w_t - decay w_(t-1): the noise of a step takes off a part of that of the step before (DP-lambda-CGD)."""

    stored_name: ClassVar[str] = "lambda_cgd"
    words: ClassVar[str] = "noise that takes off a part of that of the step before"

    decay: float
    steps: int

    def __post_init__(self) -> None:
        keep_finite(self, "decay", "decay of correlated noise", at_least=0.0, at_most=1.0)
        keep_whole(self, "steps", "steps of correlated noise", at_least=1, at_most=LARGEST_STEPS)

    def column(self) -> Array:
        """Return the first column of C [steps]: the powers of the decay."""
        return np.asarray(self.decay ** np.arange(self.steps), dtype=np.float64)

    def noising_column(self) -> Array:
        """Return the first column of C^-1, up to its last entry that may differ from 0."""
        return np.array([1.0, -self.decay])

    def memory(self) -> Memory:
        """Return z = C^-1 w, which keeps the draws of one step."""
        return Recurrence(self.noising_column(), np.ones(1))


@final
@dataclass(frozen=True)
class BufferedNoise:
    """C is a buffered linear Toeplitz matrix with ``buffers`` decays and the least mean squared error of prefix sums.

    apart: steps between two participations of an example that it is fitted to, ``steps`` for one participation. Any
    other order of batches is accounted for as it is.

    BLT: Dvijotham et al., arXiv 2404.16706; McMahan, Xu and Zhang, arXiv 2408.08868.
    """

    stored_name: ClassVar[str] = "blt"
    words: ClassVar[str] = "noise of buffered linear Toeplitz matrices"

    buffers: int
    steps: int
    apart: int

    def __post_init__(self) -> None:
        keep_whole(self, "buffers", "buffers of correlated noise", at_least=1, at_most=MOST_BUFFERS)
        keep_whole(self, "steps", "steps of correlated noise", at_least=1, at_most=LARGEST_STEPS)
        keep_whole(self, "apart", "steps between participations", at_least=1, at_most=LARGEST_STEPS)

    @property
    def pairs(self) -> Pairs:
        """Return weights and decays of C."""
        return best_buffered(self.buffers, self.steps, self.apart)

    def column(self) -> Array:
        """Return the first column of C [steps]."""
        return self.pairs.column(self.steps)

    def noising_column(self) -> Array:
        """Return the first column of C^-1 [steps]."""
        return self.pairs.inverse().column(self.steps)

    def memory(self) -> Memory:
        """Return C z = w by its buffers."""
        return self.pairs


CorrelatedNoise = BandedNoise | InverseRootNoise | LambdaNoise | BufferedNoise
"""Strategies with a matrix of as many rows as the run has steps."""

NoiseStrategy = IndependentNoise | CorrelatedNoise
"""Every noise strategy that accountants and the file of a trace may name."""

INDEPENDENT: Final = IndependentNoise()

STRATEGIES: Final[Mapping[str, Callable[..., NoiseStrategy]]] = {
    IndependentNoise.stored_name: IndependentNoise,
    BandedNoise.stored_name: BandedNoise,
    InverseRootNoise.stored_name: InverseRootNoise,
    LambdaNoise.stored_name: LambdaNoise,
    BufferedNoise.stored_name: BufferedNoise,
}
"""Noise strategies by their name in files and on the command line."""

CORRELATED: Final[Mapping[str, Callable[..., NoiseStrategy]]] = {
    name: strategy for name, strategy in STRATEGIES.items() if name != IndependentNoise.stored_name
}
"""Noise strategies that a sweep file may name, beside schedules."""


def _keep_sizes(strategy: BandedNoise | InverseRootNoise) -> None:
    keep_whole(strategy, "bands", "bands of correlated noise", at_least=1, at_most=MOST_BANDS)
    keep_whole(strategy, "steps", "steps of correlated noise", at_least=1, at_most=LARGEST_STEPS)


def bands_of(strategy: CorrelatedNoise) -> int:
    """Return the number of diagonals of C that differ from 0."""
    return int(np.flatnonzero(strategy.column())[-1]) + 1


def kept_bytes(strategy: NoiseStrategy) -> int:
    """Return the bytes that a trainer keeps of earlier noise for each trainable weight; 0 for independent noise."""
    return 8 * strategy.memory().kept


def prefix_sum_errors(strategy: NoiseStrategy, steps: int, noise_multiplier: float) -> tuple[float, float]:
    """Return mean and maximum over the steps of the squared error of the sum of all gradients up to each step.

    Unit: squared clipping bounds, per coordinate. Independent noise has (steps + 1) / 2 and steps times sigma^2.
    """
    mean, largest = prefix_errors(strategy.column(), strategy.noising_column(), steps)
    return mean * noise_multiplier**2, largest * noise_multiplier**2


def require_known_noise(strategy: NoiseStrategy) -> None:
    """Raise `UnsupportedMechanism` for noise whose correlation no accountant knows."""
    if not isinstance(strategy, NoiseStrategy):
        raise UnsupportedMechanism(
            f"no accountant knows the noise strategy {type(strategy).__name__}; valid: {', '.join(STRATEGIES)}"
        )


def make_strategy(name: str, params: Mapping[str, Any], steps: int, apart: int) -> NoiseStrategy:
    """Return the strategy ``name`` with ``params`` for a run of ``steps`` steps.

    apart: steps between two participations of an example, ``steps`` for one participation.

    Raises: InvalidInput with the nearest valid word for an unknown name or key.
    """
    known = inspect.signature(lookup(STRATEGIES, name, "noise strategy")).parameters
    context = {key: value for key, value in {"steps": steps, "apart": apart}.items() if key in known}
    return build(STRATEGIES, name, params, "noise strategy", **context)
