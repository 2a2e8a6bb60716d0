"""Laws of the loss of blocks of random allocation, on the lattice of a composition.

Many noise levels lie between few nodes (`dpsweep.accounting.pld.block_levels`).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from dpsweep.accounting.pld.allocation import COARSE, HEAVY, law_of_block, on_lattice
from dpsweep.accounting.pld.allocation_transform import EvenLaw
from dpsweep.accounting.pld.block_levels import Beside, Level, between_nodes, drawn
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.lattice import LatticePlan
from dpsweep.accounting.pld.loss import LatticeLoss
from dpsweep.accounting.pld.saddlepoint import cumulants
from dpsweep.accounting.pld.sensitivity import AllocatedRound

Found = TypeVar("Found")

_THREADS: Final = 8
_ALLOWED: Final = 5e-5
"""About what bounds on epsilon may differ by because of nodes, relative to it."""
_EXCESS: Final = 1e-10
"""Most that laws from below may have too much, all together, tilted and relative; with more, nodes are not used.

Tilted mass is up to 1e5 times delta where the plan's tilt is well below the saddle point's.
"""
MOST_LEFT: Final = 1e-3
"""Most that one of them may have too much."""
_HELD: Final = 64
"""Pairs of nodes whose laws are held at the same losses."""


@dataclass(frozen=True)
class BlockLaw:
    """The law of the loss of a block from above and below, and from above in the other direction if it is asked for.

    left: log of the tilted mass that ``lower`` may have too much, which is at most `MOST_LEFT` before it is tilted. It
    may have its mass at infinity too much, too.
    """

    upper: LatticeLoss
    lower: LatticeLoss
    opposite: LatticeLoss | None
    left: float = -math.inf


@dataclass(frozen=True)
class _Node:
    """Laws of a node's mean, and of its loss from above; opposite: in the other direction, if it is asked for."""

    above: EvenLaw
    below: EvenLaw
    upper: LatticeLoss
    opposite: LatticeLoss | None


def laws_of_blocks(rounds: GroupRounds, plan: LatticePlan) -> Callable[[AllocatedRound], BlockLaw]:
    """Return the laws of each block of ``rounds``."""
    levels, nodes = _at_nodes(rounds, plan, lambda block: _node(block, plan, heavy=0.0))
    excess = _EXCESS / rounds.count

    @functools.lru_cache(_HELD)
    def beside(nearer: AllocatedRound, farther: AllocatedRound) -> Beside:
        return Beside.of(nodes[nearer].below, nodes[farther].above, plan.direction)

    def extended(level: Level) -> tuple[LatticeLoss, float] | None:
        for at in level.below:
            pair = beside(at.nearer, at.farther)
            masses, left = pair.beyond(at.share)
            weights = np.exp(np.minimum(plan.tilt * pair.losses, 700.0))
            of_left = float(left @ weights)
            if left.sum() <= MOST_LEFT and of_left <= excess * float(masses @ weights):
                law = pair.lowered(masses, at.share, plan.spacing)
                return law, math.log(of_left) if of_left else -math.inf
        return None

    def of_block(block: AllocatedRound) -> BlockLaw:
        level = levels.get(block)
        lower = None if level is None else extended(level)
        if level is None or lower is None:
            return _alone(block, plan)
        weaker, stronger, opposite = nodes[level.weaker], nodes[level.stronger], None
        if weaker.opposite is not None and stronger.opposite is not None:
            opposite = drawn(weaker.opposite, stronger.opposite, level.share)
        return BlockLaw(drawn(weaker.upper, stronger.upper, level.share), lower[0], opposite, lower[1])

    return of_block


def laws_from_above(rounds: GroupRounds, plan: LatticePlan) -> Callable[[AllocatedRound], LatticeLoss]:
    """Return the law of each block of ``rounds`` from above."""
    levels, nodes = _at_nodes(rounds, plan, lambda block: _from_above(block, plan, heavy=0.0))

    def of_block(block: AllocatedRound) -> LatticeLoss:
        level = levels.get(block)
        if level is None:
            return _from_above(block, plan)
        return drawn(nodes[level.weaker], nodes[level.stronger], level.share)

    return of_block


def _at_nodes(
    rounds: GroupRounds, plan: LatticePlan, law: Callable[[AllocatedRound], Found]
) -> tuple[Mapping[AllocatedRound, Level], Mapping[AllocatedRound, Found]]:
    """Return where blocks lie between nodes, and the laws of the nodes, on all cores."""
    if not rounds.allocated:
        return {}, {}
    table = cumulants(GroupRounds(allocated=rounds.allocated), plan.direction, plan.tail)
    levels = between_nodes(rounds.allocated, table, plan, _ALLOWED)
    nodes = list(dict.fromkeys(node for level in levels.values() for node in level.nodes))

    def found(node: AllocatedRound) -> Found:
        with np.errstate(all="ignore"):  # each thread has its own
            return law(node)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return levels, dict(zip(nodes, pool.map(found, nodes), strict=True))


def _alone(block: AllocatedRound, plan: LatticePlan) -> BlockLaw:
    node = _node(block, plan, HEAVY)
    return BlockLaw(node.upper, on_lattice(node.below, plan.spacing, plan.direction, "lower"), node.opposite)


def _node(block: AllocatedRound, plan: LatticePlan, heavy: float) -> _Node:
    above = law_of_block(block, plan.direction, plan.tail, "upper", plan.tilt, heavy=heavy)
    below = law_of_block(block, plan.direction, plan.tail, "lower", plan.tilt, heavy=heavy)
    opposite = None
    if plan.opposite is not None:
        other = plan.direction.opposite
        law = law_of_block(block, other, plan.tail, "upper", plan.opposite, instead=COARSE, heavy=heavy)
        opposite = on_lattice(law, plan.spacing, other, "upper")
    return _Node(above, below, on_lattice(above, plan.spacing, plan.direction, "upper"), opposite)


def _from_above(block: AllocatedRound, plan: LatticePlan, heavy: float = HEAVY) -> LatticeLoss:
    law = law_of_block(block, plan.direction, plan.tail, "upper", plan.tilt, heavy=heavy)
    return on_lattice(law, plan.spacing, plan.direction, "upper")
