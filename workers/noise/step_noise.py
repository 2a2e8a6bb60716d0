"""The noise of the training steps, by the noise strategy of the trace.

The trainer asks for it once a step. Independent noise keeps nothing. Correlated noise z = C^-1 w keeps some of the
draws w or of the noise z of earlier steps, or sums of them, as doubles, in the checkpoint
(`dpsweep.accounting.mechanism.noise_strategies.Memory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np
import torch
from torch import Tensor

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.mechanism.buffered import Pairs
from dpsweep.accounting.mechanism.noise_strategies import (
    CorrelatedNoise,
    IndependentNoise,
    Memory,
    NoiseStrategy,
    Recurrence,
    require_known_noise,
)
from dpsweep.accounting.mechanism.toeplitz import Array, column_norm
from dpsweep.workers.noise.gaussian_sources import NoiseSource, one_thread


class NoisySum(NamedTuple):
    """A clipped sum with noise, and the standard deviation of the noise in each of its coordinates."""

    values: dict[str, Tensor]
    std: float


class StepNoise(Protocol):
    """Adds the noise of one step after the other.

    Guarantee: the noise of all steps is std times C^-1 w, with the standard deviation of the draws w as in the trace.
    """

    def released(self, values: Mapping[str, Tensor], std: float) -> NoisySum:
        """Return ``values`` with the noise of the next step, in new tensors.

        `std`: noise multiplier times sensitivity of this step. Where it changes with the sensitivity, the release is
        that of values over sensitivity, whose noise has the same standard deviation at every step.
        """
        ...

    @property
    def kept(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds of earlier steps, by its name there: a `Stateful`, or nothing."""
        ...


def make_step_noise(strategy: NoiseStrategy, source: NoiseSource) -> StepNoise:
    """Return the noise of the steps of a run with ``strategy``, drawn from ``source``.

    Raises: UnsupportedMechanism for a strategy that is not registered.
    """
    require_known_noise(strategy)
    return IndependentSteps(source) if isinstance(strategy, IndependentNoise) else CorrelatedSteps(strategy, source)


class IndependentSteps:
    """Fresh noise at every step."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source

    def released(self, values: Mapping[str, Tensor], std: float) -> NoisySum:
        return NoisySum(self._source.added_to_each(values, std), std)

    @property
    def kept(self) -> Mapping[str, Any]:
        return {}


class CorrelatedSteps:
    """Noise C^-1 w by the memory of the strategy.

    Guarantee: rounding errors of z do not add up. z_t is stored as a double, and C z in exact arithmetic differs from
    the draws w by the rounding of one step, with buffers by that of the steps which they remember. The released value
    is rounded to a public grid that is far coarser (docs/accounting-proofs.md, "Correlated noise").
    """

    def __init__(self, strategy: CorrelatedNoise, source: NoiseSource) -> None:
        self._source, self._step = source, 0
        self._use(strategy.memory(), column_norm(strategy.column()))
        self._spread = np.sqrt(np.cumsum(strategy.noising_column() ** 2))

    def _use(self, memory: Memory, norm: float) -> None:
        """`norm`: at least that of a column of C; the draws' standard deviation over that of independent noise."""
        self._norm, self._kept = norm, _earlier(memory)

    def released(self, values: Mapping[str, Tensor], std: float) -> NoisySum:
        require_finite("noise std", std, at_least=0.0)
        joined = torch.cat([each.flatten() for each in values.values()])
        scale = std * self._norm
        spread = scale * float(self._spread[min(self._step, len(self._spread) - 1)])
        start = 0
        with one_thread():
            for draws in self._source.standard(len(joined)):
                part = joined[start : start + len(draws)]
                noise = self._kept.noise(draws, self._step, start, len(joined))
                if scale > 0.0:
                    part.copy_(self._source.rounded(noise.mul(scale).add_(part.to(noise.device)), spread))
                start += len(draws)
        self._step += 1
        parts = joined.split([each.numel() for each in values.values()])
        shaped = {
            name: part.view(each.shape).to(each) for part, (name, each) in zip(parts, values.items(), strict=True)
        }
        return NoisySum(shaped, spread)

    @property
    def kept(self) -> Mapping[str, Any]:
        return {"earlier noise": self}

    def state(self) -> dict[str, Any]:
        coefficients = {name: value.tolist() for name, value in vars(self._kept.memory).items()}
        return {"step": self._step, "rows": self._kept.rows, "norm": self._norm, **coefficients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the coefficients of the state, which another machine may compute with other last bits."""
        memory = self._kept.memory
        self._use(type(memory)(**{name: np.array(state[name]) for name in vars(memory)}), state["norm"])
        self._step, self._kept.rows = state["step"], state["rows"].clone()


class _Earlier(Protocol):
    """Values of earlier steps, a column for each weight."""

    rows: Tensor
    """[kept, weights], doubles on the device of the draws."""

    @property
    def memory(self) -> Memory: ...

    def noise(self, draws: Tensor, step: int, start: int, size: int) -> Tensor:
        """Return z of the weights from ``start`` on, given their draws [n], and keep what later steps need.

        size: number of all weights. Draws and noise have the unit in which a column of C has norm 1.
        """
        ...


def _earlier(memory: Memory) -> _Earlier:
    """Return the values of no step yet."""
    match memory:
        case Recurrence():
            return _EarlierSteps(memory)
        case Pairs():
            return _EarlierSums(memory)
        case _:
            assert_never(memory)


class _EarlierSteps:
    """Row i of the rows holds the draws of the last step t with t mod (number of draws kept) = i; rows of noise follow,
    likewise.
    """

    def __init__(self, memory: Recurrence) -> None:
        self.memory, self.rows = memory, torch.zeros(0, 0, dtype=torch.float64)
        self._draws, self._noises = len(memory.of_draws) - 1, len(memory.of_noise) - 1
        self._weights = torch.from_numpy(_weights(memory))

    def noise(self, draws: Tensor, step: int, start: int, size: int) -> Tensor:
        self.rows, self._weights = _rows_for(self.rows, self.memory, draws, size), self._weights.to(draws.device)
        rows = self.rows[:, start : start + len(draws)]
        noise = draws * float(self.memory.of_draws[0] / self.memory.of_noise[0])
        if len(rows):
            noise.addmv_(rows.t(), self._weights[step % len(self._weights)])
        if self._draws:
            rows[step % self._draws] = draws
        if self._noises:
            rows[self._draws + step % self._noises] = noise
        return noise


class _EarlierSums:
    """Row k of the rows is buffer k."""

    def __init__(self, memory: Pairs) -> None:
        self.memory, self.rows = memory, torch.zeros(0, 0, dtype=torch.float64)
        self._decays, self._weights = torch.from_numpy(memory.decays)[:, None], torch.from_numpy(memory.weights)

    def noise(self, draws: Tensor, step: int, start: int, size: int) -> Tensor:
        self.rows = _rows_for(self.rows, self.memory, draws, size)
        self._decays, self._weights = self._decays.to(draws.device), self._weights.to(draws.device)
        rows = self.rows[:, start : start + len(draws)]
        noise = torch.addmv(draws, rows.t(), self._weights, alpha=-1.0)
        rows.mul_(self._decays).add_(noise)
        return noise


def _rows_for(rows: Tensor, memory: Memory, draws: Tensor, size: int) -> Tensor:
    """Return ``rows`` for ``size`` weights on the device of ``draws``, or new ones of zeros."""
    if rows.shape == (memory.kept, size) and rows.device == draws.device:
        return rows
    return torch.zeros(memory.kept, size, dtype=torch.float64, device=draws.device)


def _weights(recurrence: Recurrence) -> Array:
    """Return the weights [period, rows] of the rows kept, at each step of a period."""
    draws, noises = recurrence.of_draws, recurrence.of_noise
    period = math.lcm(max(len(draws) - 1, 1), max(len(noises) - 1, 1))
    return np.stack(
        [np.concatenate((_turned(draws, step), -_turned(noises, step))) / noises[0] for step in range(period)]
    )


def _turned(coefficients: Array, step: int) -> Array:
    """Return the coefficient of each row at ``step``: that of age i is in row (step - i) modulo the rows."""
    size = len(coefficients) - 1
    turned = np.empty(size)
    turned[(step - np.arange(1, size + 1)) % max(size, 1)] = coefficients[1:]
    return turned
