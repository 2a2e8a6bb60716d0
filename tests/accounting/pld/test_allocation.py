"""Random allocation: bounds against the Gaussian, quadrature and simulation, which share no code with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, special

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.calibration.parameter_search import calibrate_filter
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import PoissonSampling, RandomAllocationSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, SideQuery, Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.pld import CertifiedEpsilon, delta_pld, epsilon_of_examples, epsilon_pld, rounds_of_group
from tests.known import known

LONG = pytest.mark.long


def allocated(sigma: float, steps: int, epochs: int, per_epoch: int = 1) -> Trace:
    return Trace(10_000, (Segment(0, steps * epochs, RandomAllocationSampling(steps, per_epoch), sigma),))


def epsilon_of_allocation(
    noise_multiplier: float, steps_per_epoch: int, epochs: int, delta: float, per_epoch: int = 1
) -> CertifiedEpsilon:
    return epsilon_pld(allocated(noise_multiplier, steps_per_epoch, epochs, per_epoch), delta)


@pytest.mark.parametrize(("sigma", "epochs", "delta"), [(1.0, 1, 1e-6), (0.7, 3, 1e-9), (20.0, 500, 1e-5)])
def test_one_step_an_epoch_is_a_gaussian(sigma: float, epochs: int, delta: float) -> None:
    found = epsilon_of_allocation(sigma, 1, epochs, delta)
    upper, lower = gaussian_epsilon(math.sqrt(epochs) / sigma, delta)
    assert found.lower is not None
    assert found.lower <= upper
    assert lower <= found.upper
    assert found.upper - found.lower < 1e-3 * upper


def delta_of_two_steps(shift: float, epsilon: float, *, adding: bool) -> float:
    """Delta of an epoch of two steps: an integral over one ratio of an option on the other (Black and Scholes 1973)."""
    level = 2.0 * math.exp(epsilon)

    def call(strike: float) -> float:  # E[(Y - strike)+], Y lognormal of mean 1
        if strike <= 0.0:
            return 1.0 - strike
        at = -math.log(strike) / shift + shift / 2
        return float(special.ndtr(at) - strike * special.ndtr(at - shift))

    def inside(z: float) -> float:
        other = math.exp(shift * z - shift**2 / 2)
        if adding:  # E[(1 - e^eps M)+] by parity of puts and calls
            strike = 2.0 * math.exp(-epsilon) - other
            put = call(strike) - 1.0 + strike if strike > 0.0 else 0.0
            value = put * math.exp(epsilon) / 2.0
        else:
            value = call(level - other) / 2.0
        return value * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return float(integrate.quad(inside, -14, 14 + shift, limit=400, epsabs=1e-16, epsrel=1e-10)[0])


@pytest.mark.parametrize(
    ("sigma", "delta"), [(1.0, 1e-6), (0.6, 1e-3), (3.0, 1e-8), (400.0, 1e-4), (3000.0, 1e-6), (0.25, 1e-5)]
)
def test_two_steps_agree_with_quadrature(sigma: float, delta: float) -> None:
    found = epsilon_of_allocation(sigma, 2, 1, delta)
    assert found.lower is not None

    def exact(epsilon: float) -> float:
        return max(delta_of_two_steps(1 / sigma, epsilon, adding=adding) for adding in (False, True))

    assert exact(found.upper) <= delta * (1 + 1e-7)
    assert exact(found.lower) >= delta * (1 - 1e-7)
    assert found.upper - found.lower < 1e-4 * found.upper


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs", "delta"),
    [
        (3000.0, 10_000, 1, 1e-6),
        (9000.0, 1000, 1, 1e-6),
        (400.0, 1000, 100, 1e-6),
        (2416.0, 811, 3, 7.8e-6),
        (4996.0, 2467, 22, 6.9e-7),
        (6713.0, 6376, 87, 1.7e-10),
        (579.0, 9316, 402, 2.5e-12),
    ],
)
def test_many_ratios_near_one_are_a_gaussian(sigma: float, steps: int, epochs: int, delta: float) -> None:
    """Their mean is all but lognormal, with the same mean, variance and skewness; the bounds were up to 3e-3 apart."""
    found, width = epsilon_of_allocation(sigma, steps, epochs, delta), math.log1p(math.expm1(sigma**-2) / steps)
    upper, lower = gaussian_epsilon(math.sqrt(epochs * width), delta)
    assert found.lower is not None
    assert found.lower <= upper * (1 + 1e-6)
    assert lower <= found.upper * (1 + 1e-6)
    assert found.upper - found.lower < 3e-4 * found.lower


def test_near_the_total_variation_bounds_are_close_in_standard_deviations() -> None:
    found, width = epsilon_of_allocation(2558.0, 917, 79, 4.5e-5), math.sqrt(79 / 917) / 2558.0
    assert found.lower is not None
    assert 0.0 < found.lower < width / 50
    assert found.upper - found.lower < 4e-5 * width


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs"),
    [
        (1.0, 4, 2),
        pytest.param(1.0, 10, 3, marks=LONG),
        pytest.param(0.8, 7, 1, marks=LONG),
        pytest.param(2.0, 40, 20, marks=LONG),
    ],
)
def test_simulated_losses_lie_between_the_bounds(sigma: float, steps: int, epochs: int) -> None:
    """By importance: under P one of the steps has the example; losses of both directions, 50,000 runs."""
    draw, runs, delta = np.random.default_rng(1), 50_000, 1e-2
    losses = np.zeros((2, runs))
    for side in (0, 1):
        for _ in range(epochs):
            noise = draw.normal(size=(runs, steps)) / sigma
            if side == 0:
                noise[np.arange(runs), draw.integers(0, steps, runs)] += sigma**-2
            logs = noise - sigma**-2 / 2
            losses[side] += (1 - 2 * side) * (special.logsumexp(logs, axis=1) - math.log(steps))
    found = epsilon_of_allocation(sigma, steps, epochs, delta)
    assert found.lower is not None
    for epsilon, sign in ((found.upper, 1.0), (found.lower, -1.0)):
        values = np.maximum(-np.expm1(epsilon - losses), 0.0)
        means, errors = values.mean(axis=1), values.std(axis=1) / math.sqrt(runs)
        worse = int(means.argmax())
        assert sign * (means[worse] - delta) <= 4.5 * errors[worse]


@LONG
def test_a_hundred_steps_cost_less_than_poisson_batches() -> None:
    """The interval of another package, PLD_accounting, is [.8547, .8652] here."""
    found = epsilon_of_allocation(1.0, 100, 1, 1e-6)
    assert found.lower is not None
    assert 0.8547 < found.lower < found.upper < 0.8652
    assert found.upper < found.lower * 1.001
    poisson = account(Trace(100, (Segment(0, 100, PoissonSampling(0.01), 1.0),)), 1e-6, "pld")
    assert found.upper < poisson.epsilon


@LONG
def test_more_steps_and_more_noise_cost_less_and_epochs_add_up() -> None:
    costs = [epsilon_of_allocation(1.0, steps, 5, 1e-5) for steps in (1, 2, 10)]
    assert all(more.upper < (few.lower or 0.0) for few, more in itertools.pairwise(costs))
    assert epsilon_of_allocation(1.5, 10, 5, 1e-5).upper < (costs[-1].lower or 0.0)
    once, often = epsilon_of_allocation(1.0, 10, 1, 1e-5), costs[-1]
    assert (often.lower or 0.0) > once.upper
    assert epsilon_of_allocation(1.0, 10, 5, 1e-5, per_epoch=5) == epsilon_of_allocation(1.0, 2, 25, 1e-5)


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs", "delta"), [(0.25, 2, 1, 1e-9), (0.2, 100, 10, 1e-5), (0.25, 10_000, 300, 1e-20)]
)
def test_strong_shifts_cost_a_gaussian_less_the_log_of_the_steps(
    sigma: float, steps: int, epochs: int, delta: float
) -> None:
    """M is at least one of its ratios over t.

    So delta(epsilon) is at least that of the Gaussian of revealed steps at epsilon + epochs * ln t.
    """
    found = epsilon_of_allocation(sigma, steps, epochs, delta)
    revealed, revealed_lower = gaussian_epsilon(math.sqrt(epochs) / sigma, delta)
    assert revealed_lower - epochs * math.log(steps) <= found.upper < revealed
    assert found.upper - known(found.lower) < 3e-4 * found.upper
    assert steps > 100 or found.upper == pytest.approx(revealed - epochs * math.log(steps), rel=1e-3)


def test_shifts_beyond_those_told_are_bounded_from_above_alone() -> None:
    strong = epsilon_of_allocation(0.19, 10, 2, 1e-5)
    assert strong.lower is None
    assert strong.upper == pytest.approx(gaussian_epsilon(math.sqrt(2) / 0.19, 1e-5)[0])
    weak = epsilon_of_allocation(1e6, 10, 2, 1e-9)
    assert weak.lower is None
    assert 0.0 <= weak.upper <= epsilon_of_allocation(1e4, 10, 2, 1e-9).upper


def test_an_unfinished_block_costs_at_most_a_whole_one() -> None:
    whole, cut = epsilon_pld(allocated(1.0, 4, 2), 1e-4), epsilon_pld(allocated(1.0, 4, 2).until(5), 1e-4)
    assert (cut.upper, cut.lower) == (whole.upper, None)
    assert epsilon_pld(allocated(1.0, 4, 2).until(4), 1e-4) == epsilon_pld(allocated(1.0, 4, 1), 1e-4)


def test_noise_that_changes_within_a_block_counts_as_the_lowest() -> None:
    sampling = RandomAllocationSampling(4)
    mixed = Trace(100, (Segment(0, 6, sampling, 2.0), Segment(6, 2, sampling, 1.0)))
    apart = Trace(100, (Segment(0, 4, sampling, 2.0), Segment(4, 4, sampling, 1.0)))
    found, exact = epsilon_pld(mixed, 1e-4), epsilon_pld(apart, 1e-4)
    assert (found.upper, found.lower) == (exact.upper, None)
    assert exact.lower is not None
    assert exact.lower <= exact.upper < exact.lower * 1.002


@LONG
def test_side_queries_and_releases_count() -> None:
    """Queries on one batch are one Gaussian, and a release on all the data is composed with the epochs."""
    base = allocated(1.0, 5, 2)
    (segment,) = base.segments
    side = Trace(100, (Segment(0, 10, segment.sampling, 2.0, (SideQuery("count", 2.0),)),))
    alone = allocated(math.sqrt(2.0), 5, 2)
    assert epsilon_pld(side, 1e-5).upper == pytest.approx(epsilon_pld(alone, 1e-5).upper, rel=1e-6)
    released = Trace(100, base.segments, (GaussianRelease("count", 3.0),))
    with_it, without = epsilon_pld(released, 1e-5), epsilon_pld(base, 1e-5)
    assert without.upper < (with_it.lower or 0.0) <= with_it.upper
    assert with_it.upper <= without.upper + gaussian_epsilon(1 / 3.0, 1e-5)[0]


@LONG
def test_runs_together_and_delta_agree_with_one_run() -> None:
    run = allocated(1.5, 6, 3)
    found = epsilon_pld(run, 1e-5)
    delta = delta_pld(run, found.upper)
    assert known(delta.lower) <= 1e-5 * 1.001
    assert delta.upper == pytest.approx(1e-5, rel=0.02)
    both = account_together([run, run], 1e-5)
    assert both.epsilon == pytest.approx(epsilon_pld(allocated(1.5, 6, 6), 1e-5).upper, rel=1e-3)
    beside = account_together([run, Trace(100, (Segment(0, 10, PoissonSampling(0.1), 2.0),))], 1e-5)
    assert found.upper < beside.epsilon < 2 * found.upper
    chosen = replace(run, selection=RandomTrials(5))
    assert account(chosen, 1e-5).epsilon == account_selection(run, RandomTrials(5), 1e-5, "pld").epsilon > found.upper
    assert account_together([run, chosen], 1e-5).accountant == "selection-sum"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: rounds_of_group(run, 2), "groups of 2 in randomly allocated batches have no common round"),
        (lambda run: account(run, 1e-5, "rdp"), "by privacy loss distributions alone; use the accountant 'pld'"),
        (lambda run: account(run, 1e-5, "dp-accounting-pld"), "by privacy loss distributions alone"),
        (lambda run: epsilon_of_examples(run, [0], [[1.0], [1.0]], 1e-5), "groups of 2 in randomly allocated batches"),
        (lambda run: calibrate_filter(run, 1.0, 1e-5), "a filter limits the contributions"),
        (lambda run: account_selection(run, RandomTrials(5), 1e-5, "rdp"), "by privacy loss distributions alone"),
        (lambda run: replace(run, adjacency="replace_one"), "no accounting under 'replace_one'"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(ask: Callable[[Trace], object], said: str) -> None:
    with pytest.raises(UnsupportedMechanism, match=said):
        ask(allocated(1.0, 5, 2))


def test_impossible_epochs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="per_epoch is 3, but must divide the 10 steps"):
        RandomAllocationSampling(10, 3)
    with pytest.raises(InvalidInput, match="per_epoch is 11, but must be at most 10"):
        RandomAllocationSampling(10, 11)
