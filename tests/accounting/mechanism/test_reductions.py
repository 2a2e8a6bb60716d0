"""Replaced records against closed forms, and what samplings with a maximum accept."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting import (
    FixedBatchSampling,
    GaussianRelease,
    InvalidInput,
    PoissonSampling,
    PureRelease,
    Sampling,
    Segment,
    ShuffledSampling,
    SideQuery,
    Trace,
    TruncatedPoissonSampling,
    UnsupportedMechanism,
    account,
    epsilon_of_examples,
    individual_epsilons,
    read_trace,
    write_trace,
)
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.mechanism.filters import GaussianFilter, RenyiFilter
from dpsweep.accounting.mechanism.samplings import sampling_of_sizes
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon

DELTA = 1e-5


def run(sampling: Sampling, sigma: float = 1.0, steps: int = 1000, size: int = 10_000) -> Trace:
    return Trace(size, (Segment(0, steps, sampling, sigma),))


def truncated(size: int, batch: int, most: int, sigma: float = 1.0, steps: int = 1000) -> Trace:
    return run(TruncatedPoissonSampling.of_sizes(size, batch, most), sigma, steps, size)


def test_what_a_trace_states_is_stored(tmp_path: Path) -> None:
    for stated in (truncated(1000, 50, 80), replace(run(PoissonSampling(1.0)), adjacency="replace_one")):
        write_trace(str(tmp_path / "trace.arrow"), stated)
        assert read_trace(str(tmp_path / "trace.arrow")) == stated


@pytest.mark.parametrize("most", [49, 1001])
def test_a_maximum_below_the_batch_or_above_the_data_is_refused(most: int) -> None:
    with pytest.raises(InvalidInput, match=f"max_batch_size is {most}, but must be between .* 50 and the 1000"):
        TruncatedPoissonSampling.of_sizes(1000, 50, most)


@pytest.mark.parametrize("method", ["fixed", "shuffle"])
def test_only_poisson_batches_have_a_maximum(method: str) -> None:
    with pytest.raises(InvalidInput, match=r"max_batch_size is 80, but .* leave it out, or choose the method poisson"):
        sampling_of_sizes(method, 1000, 50, 80)


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(0.5), FixedBatchSampling(100, 50), TruncatedPoissonSampling.of_sizes(100, 50, 80)],
)
def test_sampled_batches_are_refused_under_replace_one(sampling: Sampling) -> None:
    with pytest.raises(
        UnsupportedMechanism, match="no accounting under 'replace_one', which is proven only where noth"
    ):
        Trace(100, (Segment(0, 10, sampling, 1.0),), adjacency="replace_one")


@pytest.mark.parametrize("sampling", [PoissonSampling(1.0), FixedBatchSampling(100, 100), ShuffledSampling(10)])
@pytest.mark.parametrize("accountant", ["auto", "gdp", "pld", "rdp", "zcdp", "dp-accounting-pld"])
def test_a_replaced_record_counts_twice(sampling: Sampling, accountant: str) -> None:
    """The exact curve of the Gaussian with shift 2 sqrt(rounds) / sigma + the releases at twice their shift."""
    rounds = 1 if isinstance(sampling, ShuffledSampling) else 10
    segment = Segment(0, 10, sampling, 20.0, (SideQuery("counts", 50.0),))
    trace = Trace(100, (segment,), (GaussianRelease("mean", 30.0),), adjacency="replace_one")
    mu = 2.0 * math.sqrt(rounds * (1 / 20.0**2 + 1 / 50.0**2) + 1 / 30.0**2)
    exact = gaussian_epsilon(mu, DELTA)[0]
    found = account(trace, DELTA, accountant)
    loose = 1.0 if accountant in ("rdp", "zcdp") else 1e-2
    assert exact * (1 - 1e-9) <= found.epsilon * (1 + (accountant.startswith("dp-")) * 1e-3) <= exact * (1 + loose)
    assert found.adjacency == "replace_one"
    pair = account(trace, DELTA, "pld", 2).epsilon
    assert pair == pytest.approx(gaussian_epsilon(2 * mu, DELTA)[0], rel=1e-3)


def test_a_pure_release_counts_twice_under_replace_one() -> None:
    trace = Trace(100, releases=(PureRelease("choice", 0.4),), adjacency="replace_one")
    assert account(trace, DELTA).epsilon == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize("method", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", [PoissonSampling(1.0), ShuffledSampling(10)])
def test_a_replaced_example_costs_its_own_contribution_and_that_of_another(sampling: Sampling, method: str) -> None:
    """Not twice its own: a record that contributes nothing may be replaced by one that contributes in full."""
    trace = Trace(100, (Segment(0, 10, sampling, 20.0),), adjacency="replace_one")
    rounds = 1 if isinstance(sampling, ShuffledSampling) else 10
    upper = individual_epsilons([0], [[0.0], [0.5], [1.0]], trace, DELTA, method).upper
    exact = [gaussian_epsilon((1.0 + c) * math.sqrt(rounds) / 20.0, DELTA)[0] for c in (0.0, 0.5, 1.0)]
    assert (upper >= np.array(exact) * (1 - 1e-6)).all()
    if method == "pld":
        np.testing.assert_allclose(upper, exact, rtol=0.02)
    group = epsilon_of_examples(trace, [0], [[0.0], [0.5]], DELTA).upper
    assert group == pytest.approx(gaussian_epsilon(2.5 * math.sqrt(rounds) / 20.0, DELTA)[0], rel=0.01)


def test_filters_limit_neither_truncated_batches_nor_replaced_records() -> None:
    """An example that contributes nothing would cost something: it displaces others, or another takes its place."""
    with pytest.raises(UnsupportedMechanism, match=r"noisy Poisson batches .* not truncated Poisson batches"):
        replace(truncated(1000, 50, 80), filter=RenyiFilter(0.3, 6))
    with pytest.raises(UnsupportedMechanism, match="what takes its place under 'replace_one'"):
        replace(run(PoissonSampling(1.0)), adjacency="replace_one", filter=GaussianFilter(0.3))


def test_algorithm_2_is_not_for_replaced_records() -> None:
    trace = replace(run(PoissonSampling(1.0)), adjacency="replace_one")
    with pytest.raises(UnsupportedMechanism, match="not replace_one"):
        algorithm_2([0], [[0.5]], trace, DELTA)
