"""What is said of the direction that costs less holds for delta itself, and changes no epsilon."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpsweep.accounting.individual import tail_bounds
from dpsweep.accounting.individual.contributions import RecordedContributions
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.individual.inversion import buckets
from dpsweep.accounting.individual.rdp import renyi_costs
from dpsweep.accounting.individual.spreading import spread_linearly
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.pld.loss import DIRECTIONS, Direction
from tests.known import known

DELTA = 1e-6


def exact(
    sample_rate: float, sigma: float, steps: int, direction: Direction, epsilon: float, pessimistic: bool
) -> float:
    """A bound on delta in one direction, by dp-accounting."""
    loss = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, pessimistic_estimate=pessimistic, value_discretization_interval=1e-3, sampling_prob=sample_rate
    )
    one = loss._pmf_remove if direction is Direction.REMOVE else loss._pmf_add
    return float(one.self_compose(steps).get_delta_for_epsilon(epsilon))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("contribution", [1.0, 0.6])
@pytest.mark.parametrize(("sample_rate", "sigma", "steps"), [(0.01, 1.2, 240), (0.05, 2.0, 500), (0.2, 1.0, 40)])
def test_a_bound_holds_and_is_found_where_delta_is_far_lower(
    sample_rate: float, sigma: float, steps: int, contribution: float, direction: Direction
) -> None:
    trace = Trace(10**6, (Segment(0, steps, PoissonSampling(sample_rate), sigma),))
    costs = RecordedContributions.checked([0], [[contribution]], trace).costs(spread_linearly)
    renyi = renyi_costs(costs, DELTA)
    (bucket,) = buckets(costs, renyi)
    answers = set()
    for epsilon in np.linspace(0.2, 1.2, 11) * renyi.epsilons[0]:
        proven = bool(
            tail_bounds.is_within(costs, bucket.rows, bucket.tilt, np.array([epsilon]), DELTA, direction).item()
        )
        noise = sigma / contribution
        if proven:
            assert exact(sample_rate, noise, steps, direction, epsilon, pessimistic=False) <= DELTA
        elif bucket.tilt <= tail_bounds._HIGHEST:
            assert exact(sample_rate, noise, steps, direction, epsilon, pessimistic=True) > 1e-3 * DELTA
        answers.add(proven)
    assert answers == {False, True}


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "trace",
    [
        Trace(10**6, (Segment(0, 240, PoissonSampling(0.01), 1.2),)),
        Trace(10**6, (Segment(0, 600, PoissonSampling(0.02), 1.0), Segment(600, 600, PoissonSampling(0.05), 1.5))),
        Trace(10**6, (Segment(0, 300, PoissonSampling(0.05), 1.0),), (PureRelease("size", 0.01),)),
        Trace(10**6, (Segment(0, 300, PoissonSampling(0.05), 1.0),), (GaussianRelease("histogram", 20.0),)),
    ],
)
def test_epsilons_are_those_of_both_spectra(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).uniform(0.01, 1.0, (40, 1)) * np.array([1.0, 0.7, 0.9])
    asked: list[np.ndarray] = []
    within = tail_bounds.is_within

    def noted(*arguments: object) -> np.ndarray:
        asked.append(within(*arguments))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr("dpsweep.accounting.individual.exact_composition.is_within", noted)
    found = individual_epsilons([0, 80, 160], rows, trace, DELTA, "pld")
    assert any(each.any() for each in asked)
    monkeypatch.setattr(tail_bounds, "_HIGHEST", 0.0)
    both = individual_epsilons([0, 80, 160], rows, trace, DELTA, "pld")
    np.testing.assert_array_equal(found.upper, both.upper)
    assert (known(found.lower) <= known(both.lower)).all()
