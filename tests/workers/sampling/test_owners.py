"""Rows with several owners: every tiny population, whatever rows hold, keeps to the epsilon under fixed_graph."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from dpsweep.accounting import account
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.mechanism.units import User
from dpsweep.workers.data.owners import NOBODY, rows_of_owners

PEOPLE, ROWS, RATE, SIGMA = 3, 4, 0.3, 1.0
OWNERS = [own for size in (1, 2, 3) for own in itertools.combinations(range(PEOPLE), size)]
Law = tuple[float, ...]


@cache
def law_of_sum(held: tuple[int, ...]) -> Law:
    """Probabilities that the rows drawn into a batch, which hold -1, 0 or 1, sum to -`ROWS`, ..., `ROWS`."""
    law = np.zeros(2 * ROWS + 1)
    law[ROWS] = 1.0
    for value in held:
        law = (1.0 - RATE) * law + RATE * np.roll(law, value)
    return tuple(law.tolist())


@cache
def divergence(one: Law, other: Law, epsilon: float) -> float:
    """Hockey-stick divergence of one noisy sum against the other, both ways, by a sum over a fine grid."""
    places = np.arange(-ROWS - 8.0, ROWS + 8.0, 0.01)
    bell = np.exp(-0.5 * ((places[:, None] - np.arange(-ROWS, ROWS + 1)) / SIGMA) ** 2) / math.sqrt(2 * math.pi) / SIGMA
    p, q = bell @ np.array(one), bell @ np.array(other)
    return 0.01 * float(
        max(np.maximum(p - math.exp(epsilon) * q, 0).sum(), np.maximum(q - math.exp(epsilon) * p, 0).sum())
    )


@pytest.mark.parametrize("most", [1, 2])
def test_no_content_of_anybodys_rows_exceeds_the_claim(most: int) -> None:
    """All who-owns-which of four rows and three people, all that rows may hold, everybody's rows there or blank."""
    trace = Trace(ROWS, (Segment(0, 1, PoissonSampling(RATE), SIGMA),), adjacency="fixed_graph", unit=User(most))
    claims = [(delta, account(trace, delta)) for delta in (0.02, 0.1)]
    pairs = set[tuple[int, int]]()
    for graph in itertools.combinations_with_replacement(OWNERS, ROWS):
        owners = torch.tensor([[*own, NOBODY, NOBODY][:PEOPLE] for own in graph])
        kept = rows_of_owners(owners, most).tolist()
        for person in range(PEOPLE):
            own = [row for row in kept if person in graph[row]]
            assert len(own) <= most
            pairs.add((len(kept) - len(own), len(own)))
    assert max(own for _, own in pairs) == most
    worst = dict.fromkeys((delta for delta, _ in claims), 0.0)
    for other, mine in pairs:
        for held in itertools.product((-1, 1), repeat=other + mine):
            there, blank = law_of_sum(tuple(sorted(held))), law_of_sum(tuple(sorted(held[:other] + (0,) * mine)))
            for delta, claim in claims:
                worst[delta] = max(worst[delta], divergence(there, blank, claim.epsilon))
    for delta, claim in claims:
        assert claim.kind == "guarantee"
        assert worst[delta] <= delta * (1 + 1e-5)
        assert worst[delta] > 0.98 * delta, "one whose rows all hold the same attains it"
