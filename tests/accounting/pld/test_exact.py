"""Closed forms of one sampled round and of pure releases, against 60 digits and enumeration."""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import PureRelease, Segment, Trace
from dpsweep.accounting.pld import delta_pld, epsilon_pld
from dpsweep.accounting.pld.exact import exact_deltas, exact_epsilon
from dpsweep.accounting.pld.group_rounds import rounds_of_group
from tests.known import known


def epsilons(trace: Trace, delta: float) -> tuple[float, float]:
    """(upper, lower) epsilon of a trace whose lower bound is known."""
    found = epsilon_pld(trace, delta)
    return found.upper, known(found.lower)


def one_step(sample_rate: float, noise_multiplier: float) -> Trace:
    return Trace(10**12, (Segment(0, 1, PoissonSampling(sample_rate), noise_multiplier),))


def delta_in_60_digits(sample_rate: float, noise_multiplier: float, epsilon: float) -> mpmath.mpf:
    """The worse direction, by the half lines beyond the outputs at which the loss is epsilon and -epsilon."""
    with mpmath.workdps(60):
        q, shift, factor = mpmath.mpf(sample_rate), 1 / mpmath.mpf(noise_multiplier), mpmath.exp(mpmath.mpf(epsilon))

        def tail(z: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(z / mpmath.sqrt(2)) / 2

        x = mpmath.log((factor - 1 + q) / q) / shift + shift / 2
        removed = q * tail(x - shift) + (1 - q) * tail(x) - factor * tail(x)
        odds = (1 / factor - 1 + q) / q
        if odds <= 0:
            return removed
        y = mpmath.log(odds) / shift + shift / 2
        return max(removed, tail(-y) - factor * (q * tail(shift - y) + (1 - q) * tail(-y)))


@settings(max_examples=60, deadline=None)
@given(st.floats(-12, -0.01), st.floats(-0.7, 2.5), st.floats(-6, 1.5))
def test_bounds_of_one_round_enclose_sixty_digits(log_rate: float, log_noise: float, log_epsilon: float) -> None:
    rate, noise, epsilon = 10**log_rate, 10**log_noise, 10**log_epsilon
    deltas = known(exact_deltas(rounds_of_group(one_step(rate, noise))))
    upper, lower = deltas(epsilon)
    assert lower <= delta_in_60_digits(rate, noise, epsilon) <= upper


def test_one_rare_step_at_a_tiny_delta_is_tight() -> None:
    """It was bounded by Renyi divergences alone: 1.767."""
    upper, lower = epsilons(one_step(4.7e-7, 2.1), 1e-100)
    assert upper == pytest.approx(0.00865254399, rel=1e-8)
    assert lower == pytest.approx(upper, rel=1e-8)
    assert delta_in_60_digits(4.7e-7, 2.1, upper) <= 1e-100 < delta_in_60_digits(4.7e-7, 2.1, lower)


def test_a_few_rare_steps_cost_at_least_one() -> None:
    cost, least = epsilons(one_step(4.7e-7, 2.1), 1e-100)
    upper, lower = epsilons(Trace(10**12, (Segment(0, 2, PoissonSampling(4.7e-7), 2.1),)), 1e-100)
    assert least <= lower <= upper < 1.2 * cost


@pytest.mark.parametrize("costs", [(1.5, 1.5), (0.1, 0.1, 0.1), (0.5, 0.7, 0.7, 2.0)])
def test_pure_releases_together_are_exact(costs: tuple[float, ...]) -> None:
    trace = Trace(1000, (), tuple(PureRelease(f"release {i}", epsilon) for i, epsilon in enumerate(costs)))
    for epsilon in (0.0, 0.3, 0.9 * sum(costs)):
        by_hand = 0.0
        for signs in itertools.product((1, -1), repeat=len(costs)):
            loss = sum(sign * e for sign, e in zip(signs, costs, strict=True))
            weight = math.prod(1 / (1 + math.exp(-sign * e)) for sign, e in zip(signs, costs, strict=True))
            by_hand += weight * max(0.0, -math.expm1(epsilon - loss))
        found = delta_pld(trace, epsilon)
        assert known(found.lower) <= by_hand * (1 + 1e-14)
        assert by_hand * (1 - 1e-14) <= found.upper <= by_hand * (1 + 1e-9) + 1e-14
    beyond = delta_pld(trace, math.nextafter(math.fsum(costs), 10.0))
    assert (beyond.upper, beyond.lower) == (0.0, 0.0)


def test_pure_releases_cost_their_sum_but_for_delta() -> None:
    trace = Trace(1000, (), (PureRelease("a", 1.5), PureRelease("b", 1.5)))
    assert delta_pld(trace, 3.0).upper == 0.0
    upper, lower = epsilons(trace, 1e-9)
    assert lower <= upper <= 3.0
    assert upper == pytest.approx(3.0, abs=1e-8)


def test_other_runs_have_no_closed_form() -> None:
    both = Trace(1000, (Segment(0, 1, PoissonSampling(0.1), 1.0),), (PureRelease("a", 1.0),))
    twice = Trace(1000, (Segment(0, 2, PoissonSampling(0.1), 1.0),))
    many = Trace(1000, (), tuple(PureRelease(f"r{i}", 0.01 * (i + 1)) for i in range(30)))
    assert [exact_deltas(rounds_of_group(trace)) for trace in (both, twice, many)] == [None] * 3


def test_the_epsilon_of_a_delta_that_is_never_reached_is_infinite() -> None:
    assert exact_epsilon(lambda epsilon: (0.5, 0.0), 0.1) == (math.inf, 0.0)
