"""Random traces with a question about each: what does one example, a group, or a group of given examples lose?

Traces are ordinary (rates, noise and lengths as people train with) or extreme (anything that a trace accepts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpsweep.accounting.mechanism.noise_strategies import (
    BandedNoise,
    BufferedNoise,
    InverseRootNoise,
    LambdaNoise,
    NoiseStrategy,
)
from dpsweep.accounting.mechanism.samplings import (
    Adjacency,
    CyclicPoissonSampling,
    FixedBatchSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, Segment, SideQuery, Trace
from dpsweep.accounting.mechanism.units import User
from tests.fuzz.rounds import Members, full_members

Unit = Literal["example", "group", "rows", "members", "user"]
"""One example that contributes in full, a group of such, rows with contributions of their own, or these together.

``user``: the rows that the trace keeps of a user, all in full.
"""

_UNITS: Sequence[Unit] = ("example", "group", "rows", "group", "members", "example", "group", "members")
LARGEST_GROUP = 64


@dataclass(frozen=True)
class Case:
    """One question about one trace; ``members`` are the rows whose privacy it is about."""

    kind: str
    index: int
    trace: Trace
    delta: float
    unit: Unit
    members: Members

    @property
    def row(self) -> str:
        """Its line of the table."""
        return f"{self.kind}, {self.unit}"


def case_of(seed: int, index: int) -> Case:
    """The case with this number, whatever other cases are drawn."""
    kind = list(_KINDS)[index % len(_KINDS)]
    return case_of_kind(kind, _OWN.get(kind, _UNITS[index // len(_KINDS) % len(_UNITS)]), seed, index)


def case_of_kind(kind: str, unit: Unit, seed: int, index: int) -> Case:
    """The case of this kind and unit that is drawn from seed and number."""
    rng = np.random.default_rng([seed, index])
    trace, delta = _KINDS[kind](rng)
    return Case(kind, index, trace, delta, unit, _members(rng, trace, unit))


def _members(rng: np.random.Generator, trace: Trace, unit: Unit) -> Members:
    if unit == "example":
        return full_members(1)
    if unit == "user":
        return full_members(trace.unit.rows)
    if unit == "group":
        return full_members(min(int(rng.choice([2, 3, 5, 8, 16, 33, LARGEST_GROUP])), trace.dataset_size))
    snapshots = int(rng.integers(1, min(trace.steps, 4) + 1)) if trace.steps else 1
    later = 1 + rng.choice(max(min(trace.steps, 10**6) - 1, 1), snapshots - 1, replace=False)
    steps = (0, *sorted(int(step) for step in later))
    shape = (int(rng.integers(2, 5)), snapshots)
    values = np.minimum(rng.lognormal(-1.0, 1.0, shape), 1.0)
    values[rng.random(shape) < 0.1] = 0.0
    values[0] = np.where(rng.random(snapshots) < 0.5, 1.0, values[0])
    return Members(steps, tuple(tuple(float(np.float32(value)) for value in row) for row in values))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _whole(rng: np.random.Generator, low: int, high: int) -> int:
    return round(_log_uniform(rng, low, high))


def _delta(rng: np.random.Generator) -> float:
    return float(rng.choice([1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 0.05]))


def _releases(rng: np.random.Generator) -> tuple[Release, ...]:
    drawn: list[Release] = []
    if rng.random() < 0.25:
        drawn.append(GaussianRelease("pca", _log_uniform(rng, 2.0, 50.0)))
    if rng.random() < 0.15:
        drawn.append(PureRelease("choice", _log_uniform(rng, 0.01, 2.0)))
    return tuple(drawn)


def _run(rng: np.random.Generator, samplings: Sequence[Sampling], longest: int) -> tuple[Segment, ...]:
    """Segments with noise, side queries and lengths of their own."""
    segments: list[Segment] = []
    for sampling in samplings:
        sides = (SideQuery("counts", _log_uniform(rng, 2.0, 30.0)),) if rng.random() < 0.2 else ()
        start = segments[-1].start_step + segments[-1].steps if segments else 0
        weight = max(1.0, math.sqrt(sampling.sample_rate * longest / 10.0))  # long runs have more noise
        sigma = _log_uniform(rng, 0.5, 4.0) * (weight if sampling.sample_rate > 0.05 else 1.0)
        segments.append(Segment(start, _whole(rng, 1, longest), sampling, sigma, sides))
    return tuple(segments)


def _count(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 2, 3]))


def _poisson(rng: np.random.Generator) -> tuple[Trace, float]:
    samplings = [PoissonSampling(_log_uniform(rng, 1e-4, 0.6)) for _ in range(_count(rng))]
    adjacency: Adjacency = "add_remove" if rng.random() < 0.5 else "zero_out"
    return Trace(50_000, _run(rng, samplings, 3000), _releases(rng), adjacency), _delta(rng)


def _fixed(rng: np.random.Generator) -> tuple[Trace, float]:
    size = _whole(rng, 100, 100_000)
    samplings = [FixedBatchSampling(size, _whole(rng, 1, size // 2)) for _ in range(_count(rng))]
    return Trace(size, _run(rng, samplings, 1000), _releases(rng)), _delta(rng)


def _shuffled(rng: np.random.Generator) -> tuple[Trace, float]:
    samplings = [ShuffledSampling(_whole(rng, 1, 100)) for _ in range(_count(rng))]
    if rng.random() < 0.5:
        samplings = samplings[:1] * len(samplings)
    return Trace(1000, _run(rng, samplings, 500), _releases(rng), "zero_out"), _delta(rng)


def _mixed(rng: np.random.Generator) -> tuple[Trace, float]:
    rate = PoissonSampling(_log_uniform(rng, 1e-3, 0.3))
    if rng.random() < 0.5:
        samplings: list[Sampling] = [rate, ShuffledSampling(_whole(rng, 1, 50)), PoissonSampling(1.0)]
        adjacency: Adjacency = "zero_out"
    else:
        samplings = [rate, FixedBatchSampling(5000, _whole(rng, 10, 1000)), PoissonSampling(1.0)]
        adjacency = "add_remove"
    order = [samplings[place] for place in rng.permutation(3)]
    return Trace(5000, _run(rng, order, 300), _releases(rng), adjacency), _delta(rng)


def _replaced(rng: np.random.Generator) -> tuple[Trace, float]:
    kinds: list[Sampling] = [PoissonSampling(1.0), FixedBatchSampling(1000, 1000), ShuffledSampling(_whole(rng, 1, 50))]
    samplings = [kinds[int(rng.integers(3))] for _ in range(_count(rng))]
    return Trace(1000, _run(rng, samplings, 300), _releases(rng), "replace_one"), _delta(rng)


def _follows(rng: np.random.Generator) -> tuple[Trace, float]:
    made = (_poisson, _fixed, _shuffled)[int(rng.integers(3))]
    trace, delta = made(rng)
    fields = {"adjacency": trace.adjacency, "noise_follows_results": True}
    return Trace(trace.dataset_size, trace.segments, trace.releases, **fields), delta  # type: ignore[arg-type]


def _truncated(rng: np.random.Generator) -> tuple[Trace, float]:
    size = int(rng.integers(3, 30))
    batch = int(rng.integers(1, size))
    most = int(rng.integers(batch, size + 1))
    sampling = TruncatedPoissonSampling.of_sizes(size, batch, most)
    segment = Segment(0, int(rng.integers(1, 9)), sampling, _log_uniform(rng, 0.5, 4.0))
    return Trace(size, (segment,)), float(rng.choice([1e-5, 1e-4, 1e-2]))


def _users(rng: np.random.Generator) -> tuple[Trace, float]:
    samplings = [PoissonSampling(_log_uniform(rng, 1e-4, 0.6)) for _ in range(_count(rng))]
    rows = int(rng.choice([1, 2, 3, 5, 8, 16, 33, LARGEST_GROUP]))
    return Trace(50_000, _run(rng, samplings, 1000), _releases(rng), unit=User(rows)), _delta(rng)


def _allocated(rng: np.random.Generator) -> tuple[Trace, float]:
    block, blocks = int(rng.integers(1, 4)), _whole(rng, 1, 20)
    sampling = RandomAllocationSampling(block * (each := int(rng.integers(1, 6))), each)
    unfinished = int(rng.integers(0, block)) if rng.random() < 0.3 else 0
    sides = (SideQuery("counts", _log_uniform(rng, 2.0, 30.0)),) if rng.random() < 0.2 else ()
    sigma = _log_uniform(rng, 0.3, 50.0) * math.sqrt(blocks)
    adjacency: Adjacency = "add_remove" if rng.random() < 0.5 else "zero_out"
    segment = Segment(0, block * blocks + unfinished, sampling, sigma, sides)
    return Trace(1000, (segment,), (), adjacency), _delta(rng)


def _correlated(rng: np.random.Generator) -> tuple[Trace, float]:
    steps, sigma = _whole(rng, 1, 300), _log_uniform(rng, 0.5, 8.0)
    if rng.random() < 0.5:
        cycle = _whole(rng, 1, 16)
        turns = CyclicPoissonSampling(cycle, _log_uniform(rng, 1e-3, 1.0))
        banded = BandedNoise(int(rng.integers(1, min(cycle, steps) + 1)), steps)
        adjacency: Adjacency = "add_remove" if rng.random() < 0.5 else "zero_out"
        return Trace(1000, (Segment(0, steps, turns, sigma),), (), adjacency, strategy=banded), _delta(rng)
    apart, bands = _whole(rng, 1, 60), _whole(rng, 1, 24)
    strategies: Sequence[Callable[[], NoiseStrategy]] = (
        lambda: BandedNoise(bands, steps),
        lambda: InverseRootNoise(bands, steps),
        lambda: LambdaNoise(float(rng.random()), steps),
        lambda: BufferedNoise(int(rng.integers(1, 4)), steps, min(apart, steps)),
    )
    strategy = strategies[int(rng.integers(4))]()
    segment = Segment(0, steps, FixedOrderSampling(apart), sigma * math.sqrt(1.0 + steps / apart))
    return Trace(1000, (segment,), (), "zero_out", strategy=strategy), _delta(rng)


def _extreme(rng: np.random.Generator) -> tuple[Trace, float]:
    segments: list[Segment] = []
    size = _whole(rng, 10, 10**9)
    for _ in range(_count(rng)):
        start = segments[-1].start_step + segments[-1].steps if segments else 0
        sampling: Sampling = PoissonSampling(_log_uniform(rng, 1e-12, 1.0))
        if rng.random() < 0.2:
            sampling = FixedBatchSampling(size, _whole(rng, 1, size))
        segments.append(Segment(start, _whole(rng, 1, 10**9), sampling, _log_uniform(rng, 1e-6, 1e9)))
    return Trace(size, tuple(segments), _releases(rng)), _log_uniform(rng, 1e-240, 0.9)


_KINDS: Mapping[str, Callable[[np.random.Generator], tuple[Trace, float]]] = {
    "poisson": _poisson,
    "fixed": _fixed,
    "shuffled": _shuffled,
    "mixed": _mixed,
    "replace-one": _replaced,
    "follows results": _follows,
    "truncated": _truncated,
    "extreme": _extreme,
    "users": _users,
    "allocated": _allocated,
    "correlated": _correlated,
    "allocated, each": _allocated,
}
_OWN: Mapping[str, Unit] = {
    "truncated": "example",
    "users": "user",
    "allocated": "example",
    "correlated": "example",
    "allocated, each": "rows",
}
"""Kinds of which one question alone is asked."""
