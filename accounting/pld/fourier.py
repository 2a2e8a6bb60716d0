"""Composition of lattice losses in the frequency domain, with every error accounted for.

All rounds' laws are put on one circular lattice of N points. Each law w is tilted, w_i exp(theta l_i) / M(theta), so
that the composed, tilted law is centred at the epsilon of interest. Then delta, however small, is a sum of numbers of
the same size, and the error of the transform (relative to the largest entry) is relative to delta. In tilted terms

    delta(eps) = M(theta) sum_{l > eps} exp(-theta l) (1 - exp(eps - l)) W(l).

Error terms, each a bound (docs/accounting-proofs.md, "What certified means"):

- infinity: union bound over the rounds of the mass that the discretisation put at +infinity (upper only).
- lost: mass above the window may be missing from the sum (upper only): a Chernoff bound at another tilt.
- aliasing: mass outside the window may be counted inside it (lower only): Chernoff bounds at two other tilts.
- transform: an FFT output errs by at most 4 eps log2(N) times the sum of its inputs; T rounds add up.
- masses: a round's edges err by E in total (tilted). An edge's error moves mass between the cells beside it, and within
  a cell between its nodes. So the round's law errs by at most a factor 1 + 2 (1 + theta) (exp(theta h) - 1) E. The
  differences of edges, and of a cell's masses under both measures, are rounded by a few ulps of the cell. The second
  decides how much of the cell goes to its upper node: a factor 1 + 16 eps (1 + (exp(theta h) - 1) / (1 - exp(-h))).
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Protocol, Self, TypeVar

import numpy as np
from scipy import fft

from dpsweep.accounting.pld.allocation import COARSE, by_doubling, on_lattice
from dpsweep.accounting.pld.allocation_transform import Spectrum, powered
from dpsweep.accounting.pld.block_laws import MOST_LEFT, BlockLaw, laws_from_above, laws_of_blocks
from dpsweep.accounting.pld.curve import Composed, Curve
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import LatticePlan, transform_error
from dpsweep.accounting.pld.levels import AnyRound, Between
from dpsweep.accounting.pld.loss import (
    MAX_ATOMS,
    Bound,
    LatticeLoss,
    RoundTable,
    lower_offset,
    table_length,
    tabulate_round,
)
from dpsweep.accounting.pld.saddlepoint import log_peak
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array, RoundLaw, SensitivityMixture

_EPS = float(np.finfo(np.float64).eps)
_CHUNKS = 8  # fixed, so that the order of products, and so every bit, does not depend on the number of cores
_POINTS_AT_ONCE = 1 << 20  # points of all lattices that are filled at the same time, at some 300 bytes each
_POINTS_ALONE = 1 << 14  # points of all rounds together below which starting threads takes longer than filling lattices
_POINTS_HELD = 1 << 23  # points of all lattices that a growing composition holds, at 8 bytes each


@dataclass(frozen=True)
class _Factor:
    """A product of tilted spectra with its error bounds; factors multiply."""

    spectrum: Spectrum
    rounds: int
    offset: float  # shift of the lattice, in spacings: the sum of the fractional parts of the laws' starts
    log_mgf: float  # at the tilt
    log_up: float  # at tilt + up
    log_down: float  # at tilt - down
    infinity: float
    rounding: float  # bound on the relative error of all masses
    excess: float = 0.0  # of a bound from below: tilted mass that may be too much, relative to that from above

    def __mul__(self, other: _Factor) -> _Factor:
        return _Factor(
            self.spectrum * other.spectrum,
            self.rounds + other.rounds,
            self.offset + other.offset,
            self.log_mgf + other.log_mgf,
            self.log_up + other.log_up,
            self.log_down + other.log_down,
            self.infinity + other.infinity,
            self.rounding + other.rounding,
            self.excess + other.excess,
        )

    def power(self, count: int) -> _Factor:
        """Return ``count``-fold composition with itself, by squaring."""
        scaled = (self.offset, self.log_mgf, self.log_up, self.log_down, self.infinity, self.rounding, self.excess)
        return _Factor(powered(self.spectrum, count), count * self.rounds, *(count * value for value in scaled))


@dataclass(frozen=True)
class _Factors:
    """Both bounds' factors, and log E[exp(opposite tilt * loss)] of the other direction's upper bound."""

    upper: _Factor
    lower: _Factor
    log_opposite: float = 0.0
    opposite_infinity: float = 0.0

    def __mul__(self, other: _Factors) -> _Factors:
        return _Factors(
            self.upper * other.upper,
            self.lower * other.lower,
            self.log_opposite + other.log_opposite,
            self.opposite_infinity + other.opposite_infinity,
        )

    def power(self, count: int) -> _Factors:
        return _Factors(
            self.upper.power(count), self.lower.power(count), count * self.log_opposite, count * self.opposite_infinity
        )


class _Composable(Protocol):
    def __mul__(self, other: Self) -> Self: ...

    def power(self, count: int) -> Self: ...


Product = TypeVar("Product", bound=_Composable)


def compose(rounds: GroupRounds, plan: LatticePlan) -> Composed:
    """Compose all rounds from above and below; the result is certified for any plan."""
    return _composed(rounds, plan, _factors_of)


def compose_from_above(rounds: GroupRounds, plan: LatticePlan) -> Composed:
    """Compose as `compose` at half the cost; the curve from below proves nothing."""
    return _composed(rounds, plan, _factors_from_above)


def _composed(rounds: GroupRounds, plan: LatticePlan, of_law: Callable[[RoundLaw, LatticePlan], _Factors]) -> Composed:
    laws = laws_of_blocks(rounds, plan)
    total = _product(
        rounds,
        plan,
        lambda law: of_law(law, plan),
        lambda epsilon: _randomised_response(epsilon, plan),
        lambda block: _factors_of_block(laws(block), plan),
    )
    return Composed(
        upper=_curve(total.upper, plan, "upper"),
        lower=_curve(_with_excess(total.lower, total.upper), plan, "lower"),
        opposite_tilt=plan.opposite,
        log_opposite=total.log_opposite,
        opposite_infinity=total.opposite_infinity,
    )


def _with_excess(lower: _Factor, upper: _Factor) -> _Factor:
    """Return a bound from below whose excess is relative to itself.

    Proof: the law L_i of a block may have a mass w_i too much, at most `MOST_LEFT`, and s_i times the mass m_i at
    infinity of a law from above (`dpsweep.accounting.pld.block_levels`). Replace true rounds by these laws one after
    the other. Each step raises delta by at most the hockey stick of the excess of L_i, composed with rounds already
    replaced and with true ones. The true ones are dominated by laws from above. Let K be the log moment of these at the
    tilt theta, w_i have W_i times their moment, and exp(r_i) >= 1 be what the moment of L_i has over theirs. By
    Chernoff's bound, all steps raise delta by at most

        (exp(sum (W_i + r_i)) - 1) exp(K - theta eps) max_u exp(-theta u) (1 - exp(-u)).

    To it come sum w_i times their mass at infinity, and exp(sum s_i m_i) - 1. All is subtracted from the lower delta.
    """
    if not lower.excess:
        return lower
    excess = math.expm1(lower.excess) * math.exp(upper.log_mgf - lower.log_mgf)
    return replace(lower, excess=excess, infinity=lower.infinity + MOST_LEFT * lower.rounds * upper.infinity)


def compose_upper(rounds: GroupRounds, plan: LatticePlan) -> Curve:
    """Return `compose` for the upper bound of one direction only, at less than half the cost."""

    def of_round(law: RoundLaw) -> _Factor:
        return _factors((_from_above(law, plan),), plan)[0]

    def of_pure(epsilon: float) -> _Factor:
        return _randomised_response(epsilon, plan).upper

    laws = laws_from_above(rounds, plan)

    def of_block(block: AllocatedRound) -> _Factor:
        return _factors((laws(block),), plan)[0]

    total = _product(rounds, plan, of_round, of_pure, of_block)
    return _curve(total, plan, "upper")


def _from_above(law: RoundLaw, plan: LatticePlan) -> LatticeLoss:
    return _tabulated(law_rounded_up(law, plan.tail), plan).law(plan.direction, "upper")


def law_rounded_up(law: RoundLaw, tail: float) -> RoundLaw:
    """Return a law that dominates this one, as every composition from above rounds it up. tail: mass that it drops."""
    return law.truncated(tail).pooled(MAX_ATOMS, "upper")


def _tabulated(law: RoundLaw, plan: LatticePlan, offset: float = 0.0) -> RoundTable:
    return tabulate_round(law, plan.spacing, plan.direction, plan.tail, plan.floor, offset)


@dataclass(frozen=True)
class UpperProduct:
    """Rounds composed from above, to which more can be added.

    of_round: factor and mean tilted loss of one round; many are held. mean: of all rounds together.
    """

    plan: LatticePlan
    of_round: Callable[[AnyRound], tuple[_Factor, float]]
    total: _Factor | None = None
    mean: float = 0.0

    @classmethod
    def begun(cls, gaussian: float, pure: Sequence[float], plan: LatticePlan) -> UpperProduct:
        """Return the composition of all single releases: a plain Gaussian mechanism, if any, and pure releases."""
        held = functools.lru_cache(max(2, _POINTS_HELD // plan.points))
        nothing = cls(plan, held(functools.partial(_with_mean, plan=plan)))
        begun = nothing.then_gaussian(gaussian) if gaussian else nothing
        for epsilon in pure:
            factor = _randomised_response(epsilon, plan).upper
            begun = replace(begun, total=factor if begun.total is None else begun.total * factor)
        return begun

    def then_gaussian(self, shift: float) -> UpperProduct:
        """Return the composition with a plain Gaussian mechanism, whose mean moves by ``shift`` standard deviations."""
        return self.then([RoundLaw.certain(SensitivityMixture((shift,), (1.0,)))], 1)

    def then(self, rounds: Sequence[AnyRound | Between], count: int) -> UpperProduct:
        """Return the composition with ``count`` further rounds of each of ``rounds``."""
        factors, means = zip(*map(self._factor, rounds), strict=True)
        power = _times(factors).power(count)
        total = power if self.total is None else self.total * power
        return replace(self, total=total, mean=self.mean + count * sum(means))

    def curve(self, centre: float) -> Curve:
        """Return the bound on delta around the epsilon ``centre``; certified for any centre."""
        assert self.total is not None
        bottom = min(self.mean, centre) - (self.plan.centre - self.plan.bottom)
        top = bottom + (self.plan.points - 2) * self.plan.spacing
        within = min(centre, top)  # a window that begins at the mean may end before the centre, where delta is tiny
        return _curve(self.total, replace(self.plan, centre=within, bottom=bottom), "upper")

    def _factor(self, one: AnyRound | Between) -> tuple[_Factor, float]:
        if isinstance(one, Between):
            return _drawn(self.of_round(one.weaker), self.of_round(one.stronger), one.share)
        return self.of_round(one)


def _drawn(one: tuple[_Factor, float], other: tuple[_Factor, float], share: float) -> tuple[_Factor, float]:
    """Return the factor of a public draw: ``other`` with the probability ``share``, else ``one``; and its mean."""
    if share == 1.0:
        return other
    (first, first_mean), (second, second_mean) = one, other
    logs = (math.log1p(-share), math.log(share))

    def mixed(of_first: float, of_second: float) -> float:
        return float(np.logaddexp(logs[0] + of_first, logs[1] + of_second))

    log_mgf = mixed(first.log_mgf, second.log_mgf)
    weights = math.exp(logs[0] + first.log_mgf - log_mgf), math.exp(logs[1] + second.log_mgf - log_mgf)
    factor = _Factor(
        spectrum=weights[0] * first.spectrum + weights[1] * second.spectrum,
        rounds=first.rounds + second.rounds,  # both transforms err
        offset=first.offset,
        log_mgf=log_mgf,
        log_up=mixed(first.log_up, second.log_up),
        log_down=mixed(first.log_down, second.log_down),
        infinity=(1.0 - share) * first.infinity + share * second.infinity,
        rounding=max(first.rounding, second.rounding),
    )
    return factor, weights[0] * first_mean + weights[1] * second_mean


def _with_mean(law: AnyRound, plan: LatticePlan) -> tuple[_Factor, float]:
    if isinstance(law, AllocatedRound):
        rounded = on_lattice(by_doubling(law, plan.tail, "upper", COARSE), plan.spacing, plan.direction, "upper")
    else:
        rounded = _from_above(law, plan)
    factor = _factors((rounded,), plan)[0]
    with np.errstate(divide="ignore"):
        weights = np.exp(np.log(rounded.probabilities) + plan.tilt * rounded.losses - factor.log_mgf)
    return factor, float(weights @ rounded.losses)


def _product(
    rounds: GroupRounds,
    plan: LatticePlan,
    of_round: Callable[[RoundLaw], Product],
    of_pure: Callable[[float], Product],
    of_allocated: Callable[[AllocatedRound], Product],
) -> Product:
    """Return the product of all rounds' factors, on all cores, or on fewer if long lattices would take too much
    memory.
    """
    gaussian = ((RoundLaw.certain(SensitivityMixture((rounds.gaussian,), (1.0,))), 1),) if rounds.gaussian else ()
    laws = rounds.laws + gaussian
    chunks = [laws[start :: min(_CHUNKS, len(laws))] for start in range(min(_CHUNKS, len(laws)))]

    def of_blocks(chunk: Sequence[tuple[AllocatedRound, int]]) -> Product:
        with np.errstate(all="ignore"):
            return _times(of_allocated(block).power(count) for block, count in chunk)

    def product(chunk: Sequence[tuple[RoundLaw, int]]) -> Product:
        equal = groupby(sorted(chunk, key=lambda pair: pair[1]), key=lambda pair: pair[1])
        once = ((count, (of_round(law) for law, _ in pairs)) for count, pairs in equal)
        with np.errstate(all="ignore"):  # each thread has its own
            powers: list[Product] = [_times(few).power(count) for count, few in once]
            return _times(powers)

    size = min(_CHUNKS, len(rounds.allocated))
    blocks = [rounds.allocated[start::size] for start in range(size)]
    mixtures = (mixture for law, _ in laws for _, mixture in law.cases)
    longest = max(mixtures, key=lambda one: one.sensitivities[-1], default=None)
    points = table_length(longest, plan.spacing, plan.direction, plan.tail, plan.floor) if longest else 0
    threads = min(_CHUNKS, os.cpu_count() or 1, _POINTS_AT_ONCE // max(points, plan.points))
    if len(laws) * max(points, plan.points) <= _POINTS_ALONE and len(rounds.allocated) <= _CHUNKS:
        return _times(chain(map(product, chunks), map(of_pure, rounds.pure), map(of_blocks, blocks)))
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        return _times(chain(pool.map(product, chunks), map(of_pure, rounds.pure), pool.map(of_blocks, blocks)))


def _times(products: Iterable[Product]) -> Product:
    return functools.reduce(operator.mul, products)


def _factors_of(law: RoundLaw, plan: LatticePlan) -> _Factors:
    kept, rounded = law_rounded_up(law, plan.tail), law.rounded_down(plan.tail).pooled(MAX_ATOMS, "lower")
    table, offset = _tabulated(kept, plan), lower_offset(rounded, plan.spacing)
    lower_table = table if kept == rounded and offset == 0.0 else _tabulated(rounded, plan, offset)
    upper, lower = _factors((table.law(plan.direction, "upper"), lower_table.law(plan.direction, "lower")), plan)
    return _with_opposite(upper, _at_least_nothing(lower, plan), _opposite(table, plan), plan)


def _at_least_nothing(lower: _Factor, plan: LatticePlan) -> _Factor:
    """Return the round from below, or no round where the tilted mass says that rounding down costs more than the round.

    Leaving out a round is post-processing, so it bounds from below, too.
    """
    if not lower.log_mgf < 0.0:
        return lower
    (nothing,) = _factors((LatticeLoss(plan.spacing, 0.0, np.ones(1), 0.0, np.zeros(1)),), plan)
    return nothing


def _factors_from_above(law: RoundLaw, plan: LatticePlan) -> _Factors:
    table = _tabulated(law_rounded_up(law, plan.tail), plan)
    (upper,) = _factors((table.law(plan.direction, "upper"),), plan)
    lower = replace(upper, infinity=math.inf)  # all of it may be too much
    return _with_opposite(upper, lower, _opposite(table, plan), plan)


def _factors_of_block(found: BlockLaw, plan: LatticePlan) -> _Factors:
    upper, lower = _factors((found.upper, found.lower), plan)
    if math.isfinite(found.left):
        excess = math.exp(found.left - upper.log_mgf) + max(lower.log_mgf - upper.log_mgf, 0.0)
        lower = replace(lower, excess=excess)
    return _with_opposite(upper, lower, found.opposite, plan)


def _opposite(table: RoundTable, plan: LatticePlan) -> LatticeLoss | None:
    return None if plan.opposite is None else table.law(plan.direction.opposite, "upper")


def _with_opposite(upper: _Factor, lower: _Factor, opposite: LatticeLoss | None, plan: LatticePlan) -> _Factors:
    if opposite is None or plan.opposite is None:
        return _Factors(upper, lower, math.inf)
    log_opposite = _log_mgf(opposite.probabilities, opposite.losses, plan.opposite)
    return _Factors(upper, lower, log_opposite, opposite.infinity_mass)


def _randomised_response(epsilon: float, plan: LatticePlan) -> _Factors:
    """Return the losses +-epsilon with odds exp(epsilon), which dominates every (epsilon, 0)-DP mechanism (Kairouz et
    al., 2015).

    Upper: each atom is spread over its two nodes, keeping its mass under both measures. Lower: each is rounded down, on
    a lattice with a node just below +epsilon.
    """
    spacing, start = plan.spacing, int(np.floor(-epsilon / plan.spacing)) - 1
    spread, rounded = np.zeros((2, int(np.ceil(epsilon / spacing)) - start + 3))
    below = epsilon * (1 - 8 * _EPS) / spacing
    offset = below - math.floor(below)
    for loss, place in ((-epsilon, math.floor(-epsilon / spacing - offset)), (epsilon, math.floor(below))):
        mass, node = 1 / (1 + np.exp(-loss)), int(np.floor(loss / spacing))
        raised = mass * np.expm1(node * spacing - loss) / np.expm1(-spacing)
        spread[node - start : node - start + 2] += (mass - raised, raised)
        rounded[place - start] += mass
    rounding = 8 * _EPS * (1 + epsilon / spacing) * np.ones_like(spread) * spread
    upper = LatticeLoss(spacing, start, spread, 0.0, rounding)
    lower = LatticeLoss(spacing, start + offset, rounded, 0.0, rounding)
    from_above, from_below = _factors((upper, lower), plan)
    return _with_opposite(from_above, _at_least_nothing(from_below, plan), upper, plan)


def _factors(laws: Sequence[LatticeLoss], plan: LatticePlan) -> list[_Factor]:
    """Return the factors of the laws, tilted; one transform computes all spectra, which is faster than one each."""
    with np.errstate(divide="ignore"):
        exponents = [np.log(law.probabilities) + plan.tilt * law.losses for law in laws]
    totals = [_log_sum(exponent) for exponent in exponents]
    tilted = (np.exp(exponent - total) for exponent, total in zip(exponents, totals, strict=True))
    rings = [_ring(law.start, weights, plan.points) for law, weights in zip(laws, tilted, strict=True)]
    spectra = fft.rfft(np.array(rings))
    return [_factor(*parts, plan) for parts in zip(laws, exponents, totals, spectra, strict=True)]


def _ring(start: float, weights: Array, points: int) -> Array:
    """Wrap ``weights``, the first at node floor(start), around a ring of ``points``."""
    first = int(np.floor(start)) % points
    laps = -(-(first + len(weights)) // points)
    ring = np.zeros(laps * points)
    ring[first : first + len(weights)] = weights
    return np.asarray(ring.reshape(laps, points).sum(axis=0))


def _factor(law: LatticeLoss, exponents: Array, log_total: float, spectrum: Spectrum, plan: LatticePlan) -> _Factor:
    losses = law.losses
    raised = float(np.expm1(plan.tilt * plan.spacing))  # by which a tilted mass grows when it moves up one node
    of_edges = float(np.exp(_log_mgf(law.rounding, losses, plan.tilt) - log_total)) * (1 + plan.tilt)
    of_cells = 16 * _EPS * (1 + raised / -float(np.expm1(-plan.spacing)))
    return _Factor(
        spectrum=spectrum,
        rounds=1,
        offset=law.start - float(np.floor(law.start)),
        log_mgf=log_total,
        log_up=_log_sum(exponents + plan.up * losses),
        log_down=_log_sum(exponents - plan.down * losses),
        infinity=law.infinity_mass,
        rounding=of_edges * min(1.0, 2 * raised) + of_cells,
    )


def _log_mgf(masses: Array, losses: Array, tilt: float) -> float:
    with np.errstate(divide="ignore"):
        return _log_sum(np.log(masses) + tilt * losses)


def _log_sum(exponents: Array) -> float:
    """log sum(exp(exponents)), without overflow or underflow."""
    peak = float(np.max(exponents))
    return peak + float(np.log(np.sum(np.exp(exponents - peak)))) if peak > -math.inf else peak


def _curve(total: _Factor, plan: LatticePlan, bound: Bound) -> Curve:
    """Invert the spectrum, cut the ring open at the window's bottom and sum from the top."""
    theta, spacing, points, centre = plan.tilt, plan.spacing, plan.points, plan.centre
    ring, offset = fft.irfft(total.spectrum, points), total.offset
    lowest = int(np.ceil(plan.bottom / spacing - offset))
    losses = np.asarray((lowest + offset + np.arange(points)) * spacing, dtype=np.float64)
    law = np.roll(ring, -(lowest % points))
    reach = min(40 / theta, 600 / (1 + theta)) + 2 * spacing  # where exp(theta (centre - loss)) is a double
    kept = losses >= centre - reach
    losses, law = losses[kept], law[kept]
    at, beyond = _sums(losses, law, plan, int(np.count_nonzero(losses <= centre + reach)))
    losses = losses[: len(at)]
    top = (lowest + offset + points) * spacing
    per_epsilon = transform_error(total.rounds, theta, spacing, points)
    lost: Array | float = 0.0
    if bound == "lower":
        peak = np.exp(log_peak(theta))
        above = np.exp(np.minimum(0.0, total.log_up - total.log_mgf - plan.up * (losses + points * spacing)))
        below = np.exp(min(0.0, total.log_down - total.log_mgf + plan.down * (lowest + offset) * spacing))
        per_epsilon = per_epsilon + peak * (above + below + total.excess)
    else:
        distance = np.maximum(top - losses, np.log1p(1 / theta))  # exp(-theta u) (1 - exp(-u)) is largest there
        tail = min(0.0, total.log_up - total.log_mgf - plan.up * top)
        lost = np.exp(-theta * (losses - centre + distance) + tail) * -np.expm1(-distance)
    relative = np.expm1(min(total.rounding, 700.0)) + 16 * _EPS * (
        total.rounds + abs(total.log_mgf) + theta * abs(centre) + points
    )
    return Curve(
        bound=bound,
        losses=losses,
        at=at,
        beyond=beyond,
        centre=centre,
        tilt=theta,
        log_scale=total.log_mgf - theta * centre,
        infinity=total.infinity,
        additive=np.exp(-theta * (losses - centre)) * per_epsilon + lost,
        relative=float(relative),
    )


def _sums(losses: Array, law: Array, plan: LatticePlan, asked: int) -> tuple[Array, Array]:
    """`Curve.at` and `Curve.beyond` at the first ``asked`` losses, from the tilted law of all losses.

    1 - exp(-k h) is the sum of (1 - exp(-h)) exp(-m h) over m < k, so that ``at`` is a sum of ``beyond``.
    """
    last, distances = losses[asked - 1], losses - plan.centre
    top = np.sum((np.exp(-plan.tilt * distances) * law * -np.expm1(last - losses))[asked:])
    far = np.cumsum((np.exp(-(plan.tilt + 1) * distances) * law)[::-1])[::-1]
    beyond = np.exp(distances[:asked]) * far[:asked]
    above = np.cumsum(np.append(beyond[1:], 0.0)[::-1])[::-1]
    return top - np.expm1(-plan.spacing) * above, beyond
