"""A fast, uncertified approximation of delta(epsilon), used to choose tilt, lattice and window.

The cumulant generating function K of the composed loss is summed over the rounds by quadrature over the outputs. Then
delta(epsilon) = (1 / 2 pi i) integral exp(K(z) - z epsilon) / (z (z + 1)) dz is approximated at its saddle point
(Alghamdi et al., "The saddle-point method in differential privacy", 2023). No guarantee rests on it: the composition is
certified for any tilt, lattice and window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.pld.allocation import quadrature
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.loss import MAX_ATOMS, Direction, loss_at, output_range, tail_share
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array, RoundLaw

Law = TypeVar("Law")

_POINTS = 128  # outputs per table
_ROWS = 128  # most tables; with more rounds, neighbours in order of strength share one
_BLOCKS = 32  # the same for blocks of random allocation
_TILTS = (1e-4, 1e14)  # range in which saddle points are sought


@dataclass(frozen=True)
class Cumulants:
    """K(z) = log E[exp(z loss)] of a composed loss in one direction, and its first two derivatives."""

    direction: Direction
    log_weights: Array  # [rounds, points]: log density of Q at the outputs plus logs of their spacing and of the case
    losses: Array  # [rounds, points]: log P / Q at the outputs, of all cases side by side
    counts: Array  # [rounds]
    gaussian: float
    pure: Array  # [pure releases]
    atoms: int  # largest number of sensitivities of a mixture
    rounds: tuple[RoundLaw | AllocatedRound, ...]  # [rounds]: of which the tables are

    @property
    def highest(self) -> float:
        """The largest loss in the tables."""
        return float(np.max(self.direction.sign * self.losses, initial=-np.inf))

    def values(self, tilts: Array) -> Array:
        """Return K at each of several tilts; shape [tilts]."""
        exponents = self.log_weights + self.direction.power(tilts)[:, None, None] * self.losses
        peaks = exponents.max(axis=2)
        logs = np.log(np.exp(exponents - peaks[:, :, None]).sum(axis=2)) + peaks
        of_pure = np.maximum(np.outer(1.0 + tilts, self.pure), np.outer(-tilts, self.pure))
        of_pure += np.log1p(np.exp(-np.abs(np.outer(1.0 + 2.0 * tilts, self.pure))))
        of_pure -= np.log1p(np.exp(-self.pure)) + self.pure
        gaussian = self.gaussian**2 / 2.0 * tilts * (1.0 + tilts)
        return np.asarray(logs @ self.counts + gaussian + of_pure.sum(axis=1))

    def sparser(self, most: int) -> Cumulants:
        """Return about the same of at most ``most`` of the tables, each with the counts of those that it stands for."""
        stride = -(-len(self.counts) // most) if len(self.counts) else 1
        middles = range(stride // 2, len(self.counts), stride)
        starts = np.arange(0, len(self.counts), stride)[: len(middles)]
        return replace(
            self,
            log_weights=self.log_weights[middles],
            losses=self.losses[middles],
            counts=np.add.reduceat(self.counts, starts) if len(starts) else self.counts,
            rounds=tuple(self.rounds[place] for place in middles),
        )

    def each(self, tilt: float) -> Array:
        """Return log E[exp(tilt loss)] of one round of each table; shape [rounds]."""
        exponents = self.log_weights + self.direction.power(tilt) * self.losses
        peaks = exponents.max(axis=1)
        return np.asarray(np.log(np.exp(exponents - peaks[:, None]).sum(axis=1)) + peaks)

    def below(self, loss: float) -> Cumulants:
        """Return the same without larger losses of single rounds."""
        return replace(self, log_weights=np.where(self.direction.sign * self.losses > loss, -np.inf, self.log_weights))

    def sticks(self, epsilon: float) -> tuple[Array, Array]:
        """Return delta(epsilon) of one round of each table alone, and how fast that falls; both [rounds]."""
        losses = self.direction.sign * self.losses
        masses = np.exp(self.log_weights + self.direction.power(0.0) * self.losses) * (losses > epsilon)
        rates = (masses * np.exp(np.minimum(epsilon - losses, 0.0))).sum(axis=1)
        return masses.sum(axis=1) - rates, rates

    def __call__(self, tilt: float) -> tuple[float, float, float]:
        # E_P[e^{z L}] = E_Q[e^{(1 + z) L}], and E_Q[e^{-z L}] in the add direction.
        exponents = self.log_weights + self.direction.power(tilt) * self.losses
        peaks = exponents.max(axis=1, keepdims=True)
        weights = np.exp(exponents - peaks)
        totals = weights.sum(axis=1)
        means = (weights * self.losses).sum(axis=1) / totals
        squares = (weights * (self.losses - means[:, None]) ** 2).sum(axis=1) / totals
        value = float(self.counts @ (np.log(totals) + peaks[:, 0]))
        first, second = float(self.direction.sign * (self.counts @ means)), float(self.counts @ squares)
        half = self.gaussian**2 / 2
        value, first, second = value + half * tilt * (1 + tilt), first + half * (1 + 2 * tilt), second + 2 * half
        if len(self.pure):
            odds = np.exp(-np.abs(self.pure * (1 + 2 * tilt)))
            signs = np.sign(1 + 2 * tilt)
            log_sum = np.maximum((1 + tilt) * self.pure, -tilt * self.pure) + np.log1p(odds)
            value += float(np.sum(log_sum - np.log1p(np.exp(-self.pure)) - self.pure))
            first += float(np.sum(signs * self.pure * (1 - odds) / (1 + odds)))
            second += float(np.sum(self.pure**2 * 4 * odds / (1 + odds) ** 2))
        return value, first, second


def cumulants(rounds: GroupRounds, direction: Direction, tail: float, most: int = _ROWS) -> Cumulants:
    """Return quadrature tables of all rounds, at most about ``most`` of laws and as many of blocks.

    tail: the probability cut off the outputs on either side.
    """
    laws, counts = _representatives(rounds.laws, most)
    cases, atoms = max((len(law.cases) for law in laws), default=1), 1
    log_weights, losses = np.full((len(laws), cases, _POINTS), -np.inf), np.zeros((len(laws), cases, _POINTS))
    for row, law in enumerate(laws):
        kept = law.truncated(tail).pooled(MAX_ATOMS, "upper")
        atoms = max(atoms, kept.atoms)
        for place, (probability, mixture) in enumerate(kept.cases):
            own_tail = tail_share(tail, probability)
            low, high = output_range(mixture, direction, own_tail, own_tail)
            outputs = np.linspace(low, high, _POINTS)
            losses[row, place] = loss_at(mixture, outputs)
            spacing = (high - low) / (_POINTS - 1) / np.sqrt(2 * np.pi)
            log_weights[row, place] = -(outputs**2) / 2 + np.log(probability * spacing)
    weights_of_all, losses_of_all = (table.reshape(len(laws), cases * _POINTS) for table in (log_weights, losses))
    of_blocks: list[AllocatedRound] = []
    if rounds.allocated:
        ordered = sorted(rounds.allocated, key=lambda pair: (pair[0].steps, pair[0].shift))
        of_blocks, counts_of = _in_stretches(ordered, _stretches(ordered, min(most, _BLOCKS)))
        blocks = [quadrature(block, tail) for block in of_blocks]
        longest = max(weights_of_all.shape[1], *(len(found) for found, _ in blocks))
        losses_of_all = np.vstack(
            [_padded(losses_of_all, longest, 0.0), *(_padded(b[0][None], longest, 0.0) for b in blocks)]
        )
        weights_of_all = np.vstack(
            [_padded(weights_of_all, longest, -np.inf), *(_padded(b[1][None], longest, -np.inf) for b in blocks)]
        )
        counts = np.append(counts, counts_of)
    pure = np.asarray(rounds.pure)
    return Cumulants(
        direction, weights_of_all, losses_of_all, counts, rounds.gaussian, pure, atoms, (*laws, *of_blocks)
    )


def _padded(table: Array, length: int, value: float) -> Array:
    """Return the table [rows, points] with ``value`` in further columns, up to ``length``."""
    return np.pad(table, ((0, 0), (0, length - table.shape[1])), constant_values=value)


def _representatives(laws: Sequence[tuple[RoundLaw, int]], most: int) -> tuple[list[RoundLaw], Array]:
    """At most about ``most`` laws, each standing for a block of similar ones, and the blocks' counts."""
    ordered = sorted(laws, key=lambda pair: [(p, m.probabilities, m.sensitivities) for p, m in pair[0].cases])
    stride = -(-len(ordered) // most) if ordered else 1
    return _in_stretches(ordered, range(0, len(ordered), stride))


def _in_stretches(ordered: Sequence[tuple[Law, int]], starts: Sequence[int]) -> tuple[list[Law], Array]:
    """Return the middle of each stretch of ``ordered``, and its count."""
    blocks = [ordered[start:stop] for start, stop in pairwise((*starts, len(ordered)))]
    counts = np.array([sum(count for _, count in block) for block in blocks], dtype=np.float64)
    return [block[len(block) // 2][0] for block in blocks], counts


def _stretches(ordered: Sequence[tuple[AllocatedRound, int]], most: int) -> Sequence[int]:
    """Return where each of about ``most`` stretches of similar blocks starts.

    Half of them are even in numbers, and half in logs of variances of the ratio: few strong blocks may cost most.
    """
    if len(ordered) <= most:
        return range(len(ordered))
    counts = np.cumsum([count for _, count in ordered], dtype=np.float64)
    logs = [math.log(math.expm1(min(block.shift**2, 700.0)) / block.steps) for block, _ in ordered]
    grown = np.cumsum(np.abs(np.diff(logs, prepend=logs[0])))
    places = 0.5 * most * (counts / counts[-1] + grown / max(float(grown[-1]), 1e-300))
    return np.flatnonzero(np.diff(np.floor(places), prepend=-1.0)).tolist()


@dataclass(frozen=True)
class Saddle:
    """The saddle point ``tilt`` z > 0 at ``epsilon``, and the approximate log(delta) there."""

    tilt: float
    epsilon: float
    log_delta: float


def saddle_at_delta(generating: Cumulants, log_delta: float) -> Saddle:
    """Return the saddle at which delta is exp(log_delta); if its epsilon were not positive, the saddle at epsilon 0."""
    found = _solve(lambda tilt: log_delta - _at(generating, tilt).log_delta)
    saddle = _at(generating, found)
    return saddle if saddle.epsilon > 0.0 else saddle_at_epsilon(generating, 0.0)


def saddle_at_epsilon(generating: Cumulants, epsilon: float) -> Saddle:
    """Return the saddle at ``epsilon``."""
    found = _at(generating, _solve(lambda tilt: _at(generating, tilt).epsilon - epsilon))
    return Saddle(found.tilt, epsilon, found.log_delta)


def centres(generating: Cumulants, epsilon: float, log_delta: float) -> Iterator[Saddle]:
    """Yield the saddles at which a composition may be centred for its delta at ``epsilon``, the best first.

    The losses of one direction may all lie below that epsilon, where no lattice is fine enough. So the second saddle is
    where delta is exp(log_delta), which may be that of the other direction: an upper bound holds at larger epsilons.
    Their ``log_delta`` is at most the one given, because a window for a larger delta resolves no smaller one.
    """
    for saddle in (saddle_at_epsilon(generating, epsilon), saddle_at_delta(generating, log_delta)):
        yield replace(saddle, log_delta=min(saddle.log_delta, log_delta))


def chernoff_tilt(generating: Cumulants, saddle: Saddle) -> float | None:
    """Return a tilt whose Chernoff bound on delta, at the saddle's epsilon, is well below the saddle's delta.

    If there is none, the tilt of the lowest bound, or None if that bound is not below the saddle's delta.
    """
    tilts = saddle.tilt * np.geomspace(1 / 16, 256.0, 25)
    bounds = generating.values(tilts) - tilts * saddle.epsilon + [log_peak(tilt) for tilt in tilts]
    enough = np.nonzero(bounds < saddle.log_delta - 1.0)[0]
    best = int(enough[0] if len(enough) else np.argmin(bounds))
    return float(tilts[best]) if bounds[best] < saddle.log_delta else None


def log_peak(tilt: float) -> float:
    """Return log of the maximum over u of exp(-tilt u) (1 - exp(-u))."""
    return float(-tilt * np.log1p(1 / tilt) - np.log1p(tilt))


def _at(generating: Cumulants, tilt: float) -> Saddle:
    value, first, second = generating(tilt)
    epsilon = first - 1 / tilt - 1 / (1 + tilt)
    curvature = second + tilt**-2 + (1 + tilt) ** -2
    log_delta = value - tilt * epsilon - np.log(tilt) - np.log1p(tilt) - np.log(2 * np.pi * curvature) / 2
    return Saddle(tilt, epsilon, float(log_delta))


def _solve(increasing: Callable[[float], float]) -> float:
    """Return the tilt where an increasing function crosses zero, or the nearer end of `_TILTS`."""

    def at(log_tilt: float) -> float:
        return increasing(float(np.exp(log_tilt)))

    low, high = np.log(_TILTS[0]), np.log(_TILTS[1])
    if not at(low) < 0.0:
        return _TILTS[0]
    if not at(high) > 0.0:
        return _TILTS[1]
    return float(np.exp(root(at, low, high, absolute=1e-3)))
