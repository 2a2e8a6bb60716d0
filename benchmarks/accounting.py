"""Time and accuracy of privacy accounting, compared with dp-accounting, Opacus, PLD_accounting and Opake.

    python benchmarks/accounting.py [--quick] [--json] [--task NAME]

Prints a markdown table, or with --json one object per comparison. All numbers are measured on this machine in one run;
nothing is extrapolated. If the peer would take hours, it computes only a sample: `ours_items` and `peer_items` are the
numbers of epsilons that each side computed, and `speedup` is the ratio of times per epsilon. `max_relative_gap` is the
largest |ours - peer| / peer over the epsilons that both computed. Our epsilon is an upper bound and comes with a
certified lower bound; `certified_gap` is the largest (upper - lower) / upper.

The peer's mixtures of Gaussians use its default grid of 1e-4, which takes seconds, for small groups only. A grid of
1e-3 for all groups gives the same epsilons (see the gap) ten times faster. PLD_accounting and Opake are measured where
they are installed; Opake needs Python 3.12.2 or later.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.events import dp_accounting_pld
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import PoissonSampling, RandomAllocationSampling
from dpsweep.accounting.mechanism.schedules import make_schedule, planned_trace
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import CertifiedEpsilon, epsilon_of_examples, epsilon_pld

P = ParamSpec("P")
T = TypeVar("T")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """One comparison. Times are in seconds for `ours_items` and `peer_items` epsilons; None if there is no peer."""

    task: str
    ours_s: float
    peer: str | None = None
    peer_s: float | None = None
    max_relative_gap: float | None = None
    certified_gap: float | None = None
    ours_items: int = 1
    peer_items: int = 1

    @property
    def speedup(self) -> float | None:
        return None if self.peer_s is None else (self.peer_s / self.peer_items) / (self.ours_s / self.ours_items)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "speedup": self.speedup}


def timed(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> tuple[T, float]:
    """Return the result of the call, and its elapsed seconds."""
    start = time.perf_counter()
    return function(*arguments, **named), time.perf_counter() - start


# -- the whole data set, under a schedule of many noise levels ---------------------------------------------------------

SCHEDULE_DELTA = 1e-5


def schedule(quick: bool) -> Iterator[Result]:
    """Many noise levels of a few steps; the peers get the same trace. Opacus adds its error of 0.01 to epsilon."""
    for levels, steps_each, peers in QUICK_SCHEDULES if quick else SCHEDULES:
        planned = make_schedule("exponential", 2.0, decay=0.7 / levels)
        trace = planned_trace(planned, PoissonSampling(0.01), levels, steps_each, 50_000)
        ours, ours_s = timed(epsilon_pld, trace, SCHEDULE_DELTA)
        certified = _certified(ours)
        if not peers:
            yield Result(f"schedule_{levels}x{steps_each}", ours_s, certified_gap=certified)
        for name in peers:
            value, peer_s = timed(SCHEDULE_PEERS[name], trace)
            gap = abs(ours.upper - value) / value
            yield Result(f"schedule_{levels}x{steps_each}", ours_s, name, peer_s, gap, certified)


def _dp_accounting_pld(trace: Trace) -> float:
    return dp_accounting_pld(trace, SCHEDULE_DELTA)


def _opacus_prv(trace: Trace) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(s.noise_multiplier, s.sampling.sample_rate, s.steps) for s in trace.segments]
    return float(accountant.get_epsilon(SCHEDULE_DELTA))


SCHEDULE_PEERS: Mapping[str, Callable[[Trace], float]] = {
    "dp-accounting PLD": _dp_accounting_pld,
    "Opacus PRV": _opacus_prv,
}
QUICK_SCHEDULES = ((20, 10, tuple(SCHEDULE_PEERS)),)
SCHEDULES = (
    (100, 10, tuple(SCHEDULE_PEERS)),
    (1000, 1, ()),
    (1000, 10, ("dp-accounting PLD",)),
)

# -- groups of k examples ----------------------------------------------------------------------------------------------

GROUP_DELTA = 1e-6


GROUP_GRIDS = ((1e-4, (1, 4)), (1e-3, (1, 4, 16, 64)))
QUICK_GROUP_GRIDS = ((1e-3, (4, 16)),)


def groups(quick: bool) -> Iterator[Result]:
    """T = 2000, q = 0.01, sigma = 1, delta = 1e-6 (paper B)."""
    trace = Trace(50_000, (Segment(0, 2000, PoissonSampling(0.01), 1.0),))
    for grid, sizes in QUICK_GROUP_GRIDS if quick else GROUP_GRIDS:
        for size in sizes:
            ours, ours_s = timed(epsilon_pld, trace, GROUP_DELTA, size)
            value, peer_s = timed(dp_accounting_pld, trace, GROUP_DELTA, size, grid)
            gap, certified = abs(ours.upper - value) / value, _certified(ours)
            yield Result(f"group_k{size}", ours_s, f"dp-accounting MoG, grid {grid:g}", peer_s, gap, certified)


def hard_groups(quick: bool) -> Iterator[Result]:
    """Little noise and large groups, without a peer: the peers need many minutes or report infinity."""
    for sigma, size in ((1.0, 64),) if quick else ((1.0, 256), (0.5, 64), (0.3, 256)):
        trace = Trace(50_000, (Segment(0, 2000, PoissonSampling(0.01), sigma),))
        ours, ours_s = timed(epsilon_pld, trace, GROUP_DELTA, size)
        gap = _certified(ours)
        yield Result(f"group_k{size}_sigma{sigma:g}", ours_s, certified_gap=gap)


# -- single examples ---------------------------------------------------------------------------------------------------

INDIVIDUAL_DELTA = 1e-5
INDIVIDUAL_RATE = 4096 / 50_000
LEVELS = 128


def contributions(rows: int, snapshots: int, levels: int | None = None) -> Array:
    """Contributions [rows, snapshots] in (0, 1]: a typical level per example that decreases during training."""
    generator = np.random.default_rng(0)
    typical = generator.beta(1.0, 1.5, size=(rows, 1))
    drift = np.linspace(1.2, 0.6, snapshots)
    values = np.clip(typical * drift * generator.uniform(0.7, 1.3, size=(rows, snapshots)), 0.01, 1.0)
    return values if levels is None else np.ceil(values * levels) / levels


def individual_trace(steps: int) -> Trace:
    """Return the trace of ``steps`` steps by which single examples are accounted."""
    return Trace(50_000, (Segment(0, steps, PoissonSampling(INDIVIDUAL_RATE), 2.5),))


def individual_rdp(quick: bool) -> Iterator[Result]:
    """1e7 contributions without rounding (paper A, Table 1: 26,000 s on five cores).

    The first peer evaluates the same bound exactly, step by step; dp-accounting's own fractional orders are looser.
    """
    rows, snapshots, sample = (20_000, 50, 1) if quick else (50_000, 200, 3)
    values, steps_each = contributions(rows, snapshots), 12
    trace, starts = individual_trace(steps_each * snapshots), np.arange(snapshots) * steps_each
    ours, ours_s = timed(individual_epsilons, starts, values, trace, INDIVIDUAL_DELTA, "rdp")
    chosen = np.random.default_rng(1).choice(rows, sample, replace=False)
    for name, peer in {
        "exact RDP, one by one": _exact_rdp,
        "dp-accounting RDP, one by one": _dp_accounting_rdp,
    }.items():
        found, peer_s = timed(_one_by_one, peer, values[chosen], steps_each)
        yield Result(
            f"individual_rdp_{rows * snapshots:.0e}",
            ours_s,
            name,
            peer_s,
            _gap(ours.upper[chosen], found),
            ours_items=rows,
            peer_items=sample,
        )


def _one_by_one(peer: Callable[[Array, int], float], rows: Array, steps_each: int) -> list[float]:
    return [peer(row, steps_each) for row in rows]


def _exact_rdp(row: Array, steps_each: int) -> float:
    sigmas = (2.5 / row).tolist()
    sampling = PoissonSampling(INDIVIDUAL_RATE)
    segments = (Segment(i * steps_each, steps_each, sampling, sigma) for i, sigma in enumerate(sigmas))
    return account(Trace(50_000, tuple(segments)), INDIVIDUAL_DELTA, "rdp").epsilon


def _dp_accounting_rdp(row: Array, steps_each: int) -> float:
    accountant = RdpAccountant()
    for contribution in row.tolist():
        accountant.compose(PoissonSampledDpEvent(INDIVIDUAL_RATE, GaussianDpEvent(2.5 / contribution)), steps_each)
    return float(accountant.get_epsilon(INDIVIDUAL_DELTA))


def individual_pld(quick: bool) -> Iterator[Result]:
    """60,000 examples x 300 snapshots, 6000 steps, 128 contribution levels, both directions.

    dp-accounting composes the PLDs of one example after the other. It does so once with precomputed PLDs of the levels
    that all examples share (their construction is not timed), and once with PLDs constructed for each example.
    """
    rows, snapshots, sample = (4_000, 30, 3) if quick else (60_000, 300, 10)
    values, steps_each = contributions(rows, snapshots, LEVELS), 20
    trace, starts = individual_trace(steps_each * snapshots), np.arange(snapshots) * steps_each
    ours, ours_s = timed(individual_epsilons, starts, values, trace, INDIVIDUAL_DELTA, "pld")
    assert ours.lower is not None  # Poisson batches have one
    certified = float(np.max((ours.upper - ours.lower) / ours.upper))
    chosen = np.random.default_rng(1).choice(rows, sample, replace=False)
    shared = {level: _level_pld(level) for level in np.unique(values[chosen]).tolist()}
    peers = {"shared": (chosen, shared.__getitem__), "own": (chosen[:1], _level_pld)}
    for name, (few, pld_of) in peers.items():
        found, peer_s = timed(_one_by_one, partial(_dp_accounting_pld_of, pld_of=pld_of), values[few], steps_each)
        yield Result(
            f"individual_pld_{rows}x{snapshots}",
            ours_s,
            f"dp-accounting PLD, one by one, {name} PLDs",
            peer_s,
            _gap(ours.upper[few], found),
            certified,
            ours_items=rows,
            peer_items=len(few),
        )


def _level_pld(contribution: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    return privacy_loss_distribution.from_gaussian_mechanism(
        2.5 / contribution, sampling_prob=INDIVIDUAL_RATE, value_discretization_interval=1e-4
    )


def _dp_accounting_pld_of(
    row: Array, steps_each: int, pld_of: Callable[[float], privacy_loss_distribution.PrivacyLossDistribution]
) -> float:
    levels, counts = np.unique(row, return_counts=True)
    parts = [pld_of(level).self_compose(int(n) * steps_each) for level, n in zip(levels.tolist(), counts, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(INDIVIDUAL_DELTA))


# -- random allocation -------------------------------------------------------------------------------------------------

Allocation = tuple[float, int, int, float]
"""Noise multiplier, steps of an epoch, epochs, delta."""
ALLOCATIONS: Sequence[Allocation] = ((1.0, 100, 1, 1e-6), (6.0, 100, 400, 1e-5), (1.0, 10_000, 1000, 1e-6))
ALLOCATION_LEVELS = (100, 1000)
"""Numbers of noise levels, of one epoch of 100 steps each."""
WITHOUT_PEERS = 10_000
"""Steps of an epoch for which the peers take many minutes."""


def allocation(quick: bool) -> Iterator[Result]:
    """Every example in one step of each epoch, also at many noise levels; the upper bounds of the peers."""
    for levels in ALLOCATION_LEVELS[:1] if quick else ALLOCATION_LEVELS:
        noise = np.linspace(12.0, 6.0, levels)
        segments = (Segment(100 * e, 100, RandomAllocationSampling(100), float(noise[e])) for e in range(levels))
        certain, seconds = timed(epsilon_pld, Trace(10**6, tuple(segments)), 1e-6)
        yield Result(f"allocation_{levels}_levels", seconds, certified_gap=_certified(certain))
    for case in ALLOCATIONS[:1] if quick else ALLOCATIONS:
        sigma, steps, epochs, delta = case
        sampling = RandomAllocationSampling(steps)
        trace = Trace(10**6, (Segment(0, steps * epochs, sampling, sigma),))
        ours, ours_s = timed(epsilon_pld, trace, delta)
        name, certified = f"allocation_sigma{sigma:g}_{steps}x{epochs}", _certified(ours)
        peers = {
            peer: found
            for peer, found in ALLOCATION_PEERS.items()
            if importlib.util.find_spec(peer) is not None and steps < WITHOUT_PEERS
        }
        if not peers:
            yield Result(name, ours_s, certified_gap=certified)
        for peer, found in peers.items():
            value, peer_s = timed(found, case)
            yield Result(name, ours_s, peer, peer_s, abs(ours.upper - value) / value, certified)


def individual_allocation(quick: bool) -> Iterator[Result]:
    """60,000 examples with a norm of their own in each of 300 epochs of 100 steps.

    Of ten of them, the gap is the distance from the composition of their blocks on a lattice.
    """
    rows, epochs, sample = (4_000, 30, 3) if quick else (60_000, 300, 10)
    values, starts = contributions(rows, epochs), 100 * np.arange(epochs)
    trace = Trace(60_000, (Segment(0, 100 * epochs, RandomAllocationSampling(100), 6.0),))
    ours, ours_s = timed(individual_epsilons, starts, values, trace, INDIVIDUAL_DELTA, "pld")
    chosen = np.random.default_rng(1).choice(rows, sample, replace=False)

    def one_by_one() -> list[float]:
        return [
            epsilon_of_examples(trace, starts.tolist(), values[[row]], INDIVIDUAL_DELTA).upper
            for row in chosen.tolist()
        ]

    found, own_s = timed(one_by_one)
    gap, name = _gap(ours.upper[chosen], found), f"individual_allocation_{rows}x{epochs}"
    yield Result(name, ours_s, "ours, on a lattice", own_s, gap, ours_items=rows, peer_items=sample)


def _pld_accounting(case: Allocation) -> float:
    """Return its upper bound; by one transform for several epochs, where its own search gives none within minutes."""
    from PLD_accounting import random_allocation_api as api
    from PLD_accounting import types

    sigma, steps, epochs, delta = case
    if epochs == 1:
        return float(api.gaussian_allocation_epsilon_range(delta=delta, sigma=sigma, num_steps=steps)[0])
    run = types.PrivacyParams(sigma=sigma, num_steps=steps, num_selected=1, num_epochs=epochs, delta=delta)
    transform = types.AllocationSchemeConfig(
        loss_discretization=1e-3, tail_truncation=1e-10, convolution_method=types.ConvolutionMethod.FFT
    )
    return float(api.gaussian_allocation_epsilon_configurable(params=run, config=transform))


def _opake(case: Allocation) -> float:
    from opake.dpsgd import accounting as opake

    sigma, steps, epochs, delta = case
    epoch = opake.k_out_of_t(opake.gaussian(sigma), k=1, t=steps, allocation="block")
    return float((epoch if epochs == 1 else epoch * epochs).epsilon_at(delta))


ALLOCATION_PEERS: Mapping[str, Callable[[Allocation], float]] = {"PLD_accounting": _pld_accounting, "opake": _opake}


def _certified(ours: CertifiedEpsilon) -> float:
    """Return the gap between the bounds, relative to the upper one; 1 without a lower one."""
    return (ours.upper - (ours.lower or 0.0)) / ours.upper


def _gap(ours: Array, peer: Sequence[float]) -> float:
    """Largest relative difference from the peer's epsilons."""
    expected = np.asarray(peer)
    return float(np.max(np.abs(ours - expected) / expected))


TASKS: Mapping[str, Callable[[bool], Iterator[Result]]] = {
    "schedule": schedule,
    "groups": groups,
    "hard_groups": hard_groups,
    "individual_rdp": individual_rdp,
    "individual_pld": individual_pld,
    "allocation": allocation,
    "individual_allocation": individual_allocation,
}


COLUMNS = ("task", "ours", "peer", "peer time", "speed-up", "gap", "certified gap")


def markdown(cells: Sequence[str]) -> str:
    """Return a row of a markdown table."""
    return f"| {' | '.join(cells)} |"


def table_row(r: Result) -> str:
    """Return the table's row for one comparison."""
    per_ours, per_peer = (f" / {items:,}" if r.ours_items > 1 else "" for items in (r.ours_items, r.peer_items))
    return markdown(
        (
            r.task,
            f"{r.ours_s:.2f} s{per_ours}",
            r.peer or "-",
            "-" if r.peer_s is None else f"{r.peer_s:.2f} s{per_peer}",
            "-" if r.speedup is None else f"{r.speedup:,.0f}x",
            "-" if r.max_relative_gap is None else f"{r.max_relative_gap:.1e}",
            "-" if r.certified_gap is None else f"{r.certified_gap:.1e}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tasks, within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object per comparison and line")
    parser.add_argument("--task", choices=TASKS, action="append", help="only this task (repeatable)")
    options = parser.parse_args()
    if not options.json:
        print(markdown(COLUMNS), markdown(["---"] * len(COLUMNS)), sep="\n")
    for sampling in (PoissonSampling(0.1), RandomAllocationSampling(10)):  # loading on first use is not measured
        epsilon_pld(Trace(10, (Segment(0, 10, sampling, 1.0),)), 1e-5)
    for name in options.task or TASKS:
        for result in TASKS[name](options.quick):
            print(json.dumps(result.as_dict()) if options.json else table_row(result), flush=True)


if __name__ == "__main__":
    main()
