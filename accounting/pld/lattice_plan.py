"""How rounds are composed on a lattice, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dpsweep.accounting.pld.loss import Direction

OPPOSITE: Final[Mapping[Direction, Direction]] = {"remove": "add", "add": "remove"}


@dataclass(frozen=True)
class LatticePlan:
    """How to compose: lattice ``spacing`` and ``points``, the window's first loss ``bottom``, and the tilts.

    tilt: theta. log_delta: of the delta of interest, about. up, down: the Chernoff bounds on aliasing use the tilts
    theta + up and theta - down. centre: the epsilon of interest. tail: probability that a round may lose to infinity.
    floor: probability of the least losses; a round may round them up, or drop them for the lower bound. opposite: tilt
    of the Chernoff bound on the other direction, None if no such bound is good enough.
    """

    direction: Direction
    spacing: float
    points: int
    bottom: float
    tilt: float
    log_delta: float
    up: float
    down: float
    centre: float
    tail: float
    floor: float
    opposite: float | None
