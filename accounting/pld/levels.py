"""Rounds at many noise levels from the rounds at few of them: each of the others lies between two of the few.

Guarantee: let the sensitivities of a round be fixed multiples of the largest one, x. Under Q, the expectation of any
convex function of its likelihood ratio is convex in erf(x / sqrt(6)), also that of random allocation with the shift x
(docs/accounting-proofs.md, "Many noise levels"). So a public draw between rounds at a smaller and at a larger x, linear
in that coordinate, dominates the round at x. The choice of the few decides how close a bound is, not whether it
holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from scipy import special

from dpsweep.accounting.numerics.gaussian import LEVEL_SCALE
from dpsweep.accounting.pld.saddlepoint import Cumulants
from dpsweep.accounting.pld.sensitivity import AllocatedRound, Array, RoundLaw

AnyRound = RoundLaw | AllocatedRound

_DIGITS: Final = 13
"""Decimals by which sensitivities of one kind are told from others, over the largest."""
_NEAREST: Final = 1e-5
"""Least distance of two levels that others lie between, relative to their coordinate."""
MARGIN: Final = 1e-9
"""Added to the share of the stronger round, far above its error from rounding."""


@dataclass(frozen=True)
class Between:
    """A public draw: the round `stronger` with the probability `share`, else `weaker`."""

    weaker: AnyRound
    stronger: AnyRound
    share: float


@dataclass(frozen=True)
class _Kind:
    """Rounds that differ only in their noise, ascending by the largest sensitivity of each; `sizes`: [rounds]."""

    rounds: tuple[AnyRound, ...]
    sizes: Array

    @property
    def places(self) -> Array:
        """The coordinate in which draws are linear; shape [rounds]."""
        return coordinate(self.sizes, float(self.sizes[0]))


def from_few(
    rounds: Iterable[AnyRound], table: Cumulants, tilt: float, allowed: float
) -> Mapping[AnyRound, AnyRound | Between]:
    """Return what dominates each of ``rounds``: itself, or a draw between two of them, which are few in all.

    The cumulants of rounds of one kind at ``tilt`` grow together by about the share ``allowed``. table: of some of the
    rounds at least.
    """
    known = {each: place for place, each in enumerate(table.rounds)}
    logs = table.each(tilt)
    found: dict[AnyRound, AnyRound | Between] = {}
    for kind in _kinds(rounds):
        rows = [place for place, each in enumerate(kind.rounds) if each in known]
        entries = [known[kind.rounds[row]] for row in rows]
        chosen = _chosen(kind.places[rows], logs[entries], table.counts[entries], allowed) if rows else ()
        nodes = sorted({0, len(kind.rounds) - 1, *(rows[place] for place in chosen)})
        found.update(_placed(kind, nodes))
    return found


def _kinds(rounds: Iterable[AnyRound]) -> list[_Kind]:
    alike: dict[object, list[tuple[AnyRound, Array]]] = defaultdict(list)
    for each in rounds:
        if isinstance(each, AllocatedRound):
            alike[each.steps].append((each, np.array([each.shift])))
        else:
            shifts = np.concatenate([mixture.sensitivities for _, mixture in each.cases])
            chances = tuple((chance, mixture.probabilities, mixture.missing) for chance, mixture in each.cases)
            alike[each.dropped, chances, _shape(shifts)].append((each, shifts))
    found = []
    for levels in alike.values():
        sizes = np.array([float(shifts.max()) for _, shifts in levels])
        order = np.argsort(sizes, kind="stable")
        found.append(_Kind(tuple(levels[place][0] for place in order), sizes[order]))
    return found


def _shape(shifts: Array) -> tuple[float, ...]:
    """Return the sensitivities over the largest, without the last digits, which are rounded."""
    return tuple(np.round(shifts / shifts.max(), _DIGITS).tolist())


def coordinate(sizes: Array, least: float) -> Array:
    """Return erf(x / sqrt(6)) of each size x, less 1 where it is near 1."""
    scaled = sizes / LEVEL_SCALE
    return np.asarray(special.erf(scaled) if least < 1.0 else -special.erfc(scaled), dtype=np.float64)


def _chosen(places: Array, logs: Array, counts: Array, allowed: float) -> Sequence[int]:
    """Return which of the levels others may lie between; arrays are [levels], and ascend. logs: of moments."""
    moments = np.expm1(logs)
    weights = counts / (1.0 + moments)
    sums = np.cumsum([weights, weights * places, weights * moments, counts * logs], axis=1)
    nodes, last = [0], len(places) - 1
    while (first := nodes[-1]) < last:
        weight, place, moment, log = sums[:, first:last] - sums[:, [first]]  # of the levels before each next node
        slopes = (moments[first + 1 :] - moments[first]) / (places[first + 1 :] - places[first])
        excess = slopes * (place - places[first] * weight) + moments[first] * weight - moment
        nodes.append(first + 1 + int(np.flatnonzero(excess <= allowed * log)[-1]))
    return nodes


def _placed(kind: _Kind, nodes: Sequence[int]) -> Iterator[tuple[AnyRound, AnyRound | Between]]:
    yield from ((kind.rounds[node], kind.rounds[node]) for node in nodes)
    for weaker, stronger in pairwise(nodes):
        places = coordinate(kind.sizes[weaker : stronger + 1], float(kind.sizes[weaker]))
        low, high = float(places[0]), float(places[-1])
        shares = (places - low) / (high - low) + MARGIN if high - low > _NEAREST * abs(low) else np.ones(len(places))
        for at in range(weaker + 1, stronger):
            share = min(float(shares[at - weaker]), 1.0)
            yield kind.rounds[at], Between(kind.rounds[weaker], kind.rounds[stronger], share)
