"""The noise of the training steps, by the noise strategy of the trace.

The trainer asks for it once a step. Independent noise keeps nothing. Correlated noise z = C^-1 w keeps some of the
draws w or of the noise z of earlier steps, or sums of them, as doubles
(`dpsweep.accounting.mechanism.noise_strategies.Memory`). Ranks divide the weights among them, and each stores its own
noise and sums in a checkpoint; draws are made again from their key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, assert_never

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
from dpsweep.workers.noise.gaussian_sources import NoiseSource, StepDraws, met_by

EARLIER: Final = "earlier noise"
"""Name in a checkpoint of what noise is correlated with."""


class NoisySum(NamedTuple):
    """A clipped sum with noise, and the standard deviation of the noise in each of its coordinates."""

    values: dict[str, Tensor]
    std: float


class NoiseInTurn(NamedTuple):
    """As `NoisySum`, of flat tensors that are made one after the other. Take all before the next step."""

    values: Iterator[Tensor]
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

    def in_turn(self, values: Iterable[Tensor], count: int, std: float) -> NoiseInTurn:
        """Return the bits of `released` for flat tensors that come one after the other, ``count`` entries in all.

        They may be overwritten.
        """
        ...

    def divide(self, others: OtherShares) -> None:
        """Compute the noise together with other ranks from here on, to the same bits."""
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

    def in_turn(self, values: Iterable[Tensor], count: int, std: float) -> NoiseInTurn:
        return NoiseInTurn(self._source.added_in_turn(values, count, std), std)

    def divide(self, others: OtherShares) -> None:
        return None

    @property
    def kept(self) -> Mapping[str, Any]:
        return {}


class NoiseShare:
    """Noise z = C^-1 w of one rank's pieces of the weights, and what it takes of earlier steps.

    Piece j belongs to rank j modulo the number of ranks. Its noise comes from its own draws and rows alone, so that it
    has the same bits at any rank. Draws and noise have the unit in which a column of C has norm 1.
    """

    def __init__(self, memory: Memory, draws: StepDraws) -> None:
        self.step, self._draws, self._kept = 0, draws, _earlier(memory)
        self._rank, self._ranks, self._rows = 0, 1, dict[int, Tensor]()

    def divide(self, rank: int, ranks: int) -> None:
        """Keep what belongs to ``rank``."""
        self._rank, self._ranks = rank, ranks
        self._rows = {piece: rows for piece, rows in self._rows.items() if piece % ranks == rank}

    def others_have_some(self, count: int) -> bool:
        """Return whether other ranks have pieces of ``count`` weights."""
        return self._ranks > 1 and count > self._draws.most

    def noise(self, count: int) -> Iterator[tuple[list[int], Tensor]]:
        """Take a step. For each round of pieces, one for each rank, yield their sizes, and z [size] of this rank's.

        count: number of all weights.
        """
        for piece, sizes in self._rounds(count):
            size, noise = sizes[self._rank], self._empty(0)
            if size:
                draws = self._drawn(self.step, piece, size)
                noise = self._kept.noise(self._rows_of(piece, size), draws, self.step)
            yield sizes, noise
        self.step += 1

    def _rounds(self, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield this rank's piece of each round, and the sizes of the pieces of all ranks."""
        most = self._draws.most
        for first in range(0, -(-count // most), self._ranks):
            yield first + self._rank, [min(most, max(0, count - most * (first + rank))) for rank in range(self._ranks)]

    def _rows_of(self, piece: int, size: int) -> Tensor:
        """Return the rows of a piece; new ones where it has none, with the draws of the last steps."""
        if piece not in self._rows:
            assert self.repeats_draws or not self.step, "a checkpoint holds all other rows"
            self._rows[piece] = rows = self._empty(self._kept.memory.kept, size)
            for step in range(max(0, self.step - len(rows)), self.step):
                rows[step % len(rows)] = self._drawn(step, piece, size)
        return self._rows[piece]

    def _drawn(self, step: int, piece: int, size: int) -> Tensor:
        return self._draws.draw(step, piece * self._draws.most, size)

    def _empty(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._draws.device)

    @property
    def repeats_draws(self) -> bool:
        """Return whether rows are draws alone. They are made again, in place of stored ones: that is cheaper."""
        memory = self._kept.memory
        return isinstance(memory, Recurrence) and memory.keeps_draws_alone

    @property
    def rows(self) -> dict[int, Tensor]:
        """The rows [kept, size] of this rank's pieces, by piece; none where `repeats_draws`."""
        return {} if self.repeats_draws else dict(self._rows)

    def in_own_pieces(self, rows: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Return the rows of all pieces in pieces of the size drawn here, which differs between kinds of devices."""
        if not rows or rows[0].shape[1] == self._draws.most:
            return rows
        whole = torch.cat([rows[piece] for piece in sorted(rows)], 1)
        return dict(enumerate(whole.split(self._draws.most, 1)))

    def take(self, rows: Mapping[int, Tensor]) -> None:
        """Continue with stored ``rows``, as far as they belong to this rank."""
        self._rows |= {
            piece: each.to(self._draws.device).clone()
            for piece, each in rows.items()
            if piece % self._ranks == self._rank
        }

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs at this rank."""
        coefficients = {name: value.tolist() for name, value in vars(self._kept.memory).items()}
        return {"step": self.step, "rows": self.rows, "draws": self._draws.state(), **coefficients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the coefficients of the state, which another machine may compute with other last bits."""
        memory = self._kept.memory
        self._kept = _earlier(type(memory)(**{name: np.array(state[name]) for name in vars(memory)}))
        self.step = state["step"]
        self._draws.restore(state["draws"])
        self._rows = {}
        self.take(state["rows"])


class OtherShares(Protocol):
    """The shares of the noise at other ranks, which take the same steps."""

    ranks: int
    """Their number, this one included."""

    def noise(self, own: NoiseShare, count: int) -> Iterator[Tensor]:
        """Take a step at all ranks, and yield z of consecutive weights, ``count`` in all."""
        ...

    def store(self, step: int) -> tuple[bytes, ...]:
        """Have each other rank store its rows for a checkpoint after ``step`` steps; return the files' digests."""
        ...


class Nobody:
    """No other ranks."""

    ranks = 1

    def noise(self, own: NoiseShare, count: int) -> Iterator[Tensor]:
        return (noise for _, noise in own.noise(count))

    def store(self, step: int) -> tuple[bytes, ...]:
        return ()


def share_of_rank(
    strategy: NoiseStrategy, source: NoiseSource, stored: Mapping[str, Any], rank: int, ranks: int
) -> NoiseShare | None:
    """Return what a rank keeps of earlier noise, by the states that a checkpoint holds; None for independent noise."""
    if isinstance(strategy, IndependentNoise):
        return None
    share = NoiseShare(strategy.memory(), source.draws_of_steps())
    share.divide(rank, ranks)
    share.restore(stored[EARLIER])
    return share


class CorrelatedSteps:
    """Noise C^-1 w by the memory of the strategy.

    Guarantee: rounding errors of z do not add up. z_t is stored as a double, and C z in exact arithmetic differs from
    the draws w by the rounding of one step, with buffers by that of the steps which they remember. With b bands that is
    at most (b + 1) 2^-53 sum_j |c_j z_(t-j)|. With buffers s_k, decays l_k and weights o_k it is at most 2^-52 sum_k
    o_k / (1 - l_k) max |s_k|. The released value is rounded to a public grid that is far coarser
    (docs/accounting-proofs.md, "Correlated noise").
    """

    def __init__(self, strategy: CorrelatedNoise, source: NoiseSource) -> None:
        self._source, self._count = source, 0
        self._share = NoiseShare(strategy.memory(), source.draws_of_steps())
        self._others: OtherShares = Nobody()
        self._norm = column_norm(strategy.column())
        """At least the norm of a column of C; the draws' standard deviation over that of independent noise."""
        self._spread = np.sqrt(np.cumsum(strategy.noising_column() ** 2))

    def divide(self, others: OtherShares) -> None:
        self._others = others
        self._share.divide(0, others.ranks)

    def released(self, values: Mapping[str, Tensor], std: float) -> NoisySum:
        joined = torch.cat([each.flatten() for each in values.values()])
        noisy, spread = self.in_turn([joined], len(joined), std)
        (joined,) = noisy
        parts = joined.split([each.numel() for each in values.values()])
        shaped = {
            name: part.view(each.shape).to(each) for part, (name, each) in zip(parts, values.items(), strict=True)
        }
        return NoisySum(shaped, spread)

    def in_turn(self, values: Iterable[Tensor], count: int, std: float) -> NoiseInTurn:
        require_finite("noise std", std, at_least=0.0)
        scale, self._count = std * self._norm, count
        spread = scale * float(self._spread[min(self._share.step, len(self._spread) - 1)])

        def add(part: Tensor, noise: Tensor) -> None:
            if scale > 0.0:
                part.copy_(self._source.rounded(noise.mul(scale).add_(part.to(noise.device)), spread))

        return NoiseInTurn(met_by(values, self._shares.noise(self._share, count), add), spread)

    @property
    def _shares(self) -> OtherShares:
        return self._others if self._share.others_have_some(self._count) else Nobody()

    @property
    def kept(self) -> Mapping[str, Any]:
        return {EARLIER: self}

    def state(self) -> dict[str, Any]:
        others = () if self._share.repeats_draws else self._shares.store(self._share.step)
        return {"norm": self._norm, "count": self._count, "others": others, **self._share.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norm, self._count = state["norm"], state["count"]
        here = state if state["others"] else {**state, "rows": self._share.in_own_pieces(state["rows"])}
        self._share.restore(here)


class _Earlier(Protocol):
    """How z of a step follows from its draws [n] and from rows [kept, n] of earlier steps, doubles on one device."""

    @property
    def memory(self) -> Memory: ...

    def noise(self, rows: Tensor, draws: Tensor, step: int) -> Tensor:
        """Return z [n], and change ``rows`` to those that later steps need."""
        ...


def _earlier(memory: Memory) -> _Earlier:
    match memory:
        case Recurrence():
            return _EarlierSteps(memory)
        case Pairs():
            return _EarlierSums(memory)
        case _:
            assert_never(memory)


class _EarlierSteps:
    """Row i holds the draws of the last step t with t mod (draws kept) = i; rows of noise follow, likewise."""

    def __init__(self, memory: Recurrence) -> None:
        self.memory = memory
        self._draws, self._noises = len(memory.of_draws) - 1, len(memory.of_noise) - 1
        self._weights = torch.from_numpy(_weights(memory))

    def noise(self, rows: Tensor, draws: Tensor, step: int) -> Tensor:
        self._weights = self._weights.to(draws.device)
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
        self.memory = memory
        self._decays, self._weights = torch.from_numpy(memory.decays)[:, None], torch.from_numpy(memory.weights)

    def noise(self, rows: Tensor, draws: Tensor, step: int) -> Tensor:
        self._decays, self._weights = self._decays.to(draws.device), self._weights.to(draws.device)
        noise = torch.addmv(draws, rows.t(), self._weights, alpha=-1.0)
        rows.mul_(self._decays).add_(noise)
        return noise


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
