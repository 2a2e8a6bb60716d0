"""Random allocation: bounds against the Gaussian, quadrature and simulation, which share no code with them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special

from dpsweep.accounting.accountants import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.gaussian import gaussian_epsilon
from dpsweep.accounting.mechanism import Segment, Trace
from dpsweep.accounting.pld import epsilon_of_allocation
from dpsweep.accounting.samplings import PoissonSampling

LONG = pytest.mark.long


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


@pytest.mark.parametrize(("sigma", "delta"), [(1.0, 1e-6), (0.6, 1e-3), (3.0, 1e-8)])
def test_two_steps_agree_with_quadrature(sigma: float, delta: float) -> None:
    found = epsilon_of_allocation(sigma, 2, 1, delta)
    assert found.lower is not None

    def exact(epsilon: float) -> float:
        return max(delta_of_two_steps(1 / sigma, epsilon, adding=adding) for adding in (False, True))

    assert exact(found.upper) <= delta * (1 + 1e-7)
    assert exact(found.lower) >= delta * (1 - 1e-7)
    assert found.upper - found.lower < 1e-3 * found.upper


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs"),
    [(1.0, 10, 3), pytest.param(0.8, 7, 1, marks=LONG), pytest.param(2.0, 40, 20, marks=LONG)],
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


def test_a_hundred_steps_cost_less_than_poisson_batches() -> None:
    """The interval of another package, PLD_accounting, is [.8547, .8652] here."""
    found = epsilon_of_allocation(1.0, 100, 1, 1e-6)
    assert found.lower is not None
    assert 0.8547 < found.lower < found.upper < 0.8652
    assert found.upper < found.lower * 1.001
    poisson = account(Trace(100, (Segment(0, 100, PoissonSampling(0.01), 1.0),)), 1e-6, "pld")
    assert found.upper < poisson.epsilon


def test_more_steps_and_more_noise_cost_less_and_epochs_add_up() -> None:
    costs = [epsilon_of_allocation(1.0, steps, 5, 1e-5) for steps in (1, 2, 10)]
    assert all(more.upper < (few.lower or 0.0) for few, more in itertools.pairwise(costs))
    assert epsilon_of_allocation(1.5, 10, 5, 1e-5).upper < (costs[-1].lower or 0.0)
    once, often = epsilon_of_allocation(1.0, 10, 1, 1e-5), costs[-1]
    assert (often.lower or 0.0) > once.upper
    assert epsilon_of_allocation(1.0, 10, 5, 1e-5, per_epoch=5) == epsilon_of_allocation(1.0, 2, 25, 1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"delta": 1.0}, "delta is 1"),
        ({"per_epoch": 3}, "per_epoch is 3, but must divide the 10 steps"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, float], said: str) -> None:
    usual = {"noise_multiplier": 1.0, "steps_per_epoch": 10, "epochs": 2, "delta": 1e-5}
    with pytest.raises(InvalidInput, match=said):
        epsilon_of_allocation(**{**usual, **changes})  # type: ignore[arg-type]
