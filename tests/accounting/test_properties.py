"""What must be true of any epsilon: it grows with exposure, and how a run is written down does not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpsweep.accounting import PoissonSampling, PrivacyEstimate, Segment, Trace, account, account_together
from dpsweep.accounting.pld import delta_pld
from tests.known import known

RATES = (1e-12, 1e-7, 1e-4, 0.01, 0.3, 1.0)
NOISES = (0.01, 0.3, 1.0, 7.0, 1e3)
LENGTHS = (1, 3, 100, 10_000, 10**7)
DELTAS = (1e-300, 1e-200, 1e-30, 1e-9, 1e-3, 0.5, 0.999)
METHODS = ("auto", "rdp", "rdp-classic", "strong", "pld")
RUN = {"rate": st.sampled_from(RATES), "noise": st.sampled_from(NOISES), "steps": st.sampled_from(LENGTHS)}
quickly = settings(max_examples=10, deadline=None, derandomize=True)


def run(rate: float, noise: float, steps: int) -> Trace:
    return Trace(10**9, (Segment(0, steps, PoissonSampling(rate), noise),))


def epsilon(trace: Trace, delta: float, method: str, group_size: int = 1) -> PrivacyEstimate:
    found = account(trace, delta, method, group_size)
    assert 0.0 <= (found.lower_epsilon or 0.0) <= found.epsilon < math.inf
    return found


def assert_not_cheaper(exposed: PrivacyEstimate, less: PrivacyEstimate) -> None:
    """Up to the certified gap of a method that has one: its upper bounds need not be monotone, the exact values are."""
    least = less.epsilon * (1.0 - 1e-6) if less.lower_epsilon is None else less.lower_epsilon
    assert exposed.epsilon >= min(least, less.epsilon)


@pytest.mark.long
@given(**RUN, delta=st.sampled_from(DELTAS), method=st.sampled_from(METHODS), other=st.data())
@quickly
def test_more_exposure_costs_no_less(
    rate: float, noise: float, steps: int, delta: float, method: str, other: st.DataObject
) -> None:
    assume(method != "pld" or delta >= 1e-250)
    cheap = epsilon(run(rate, noise, steps), delta, method)
    more = other.draw(st.sampled_from([each for each in RATES if each >= rate]))
    noisy = other.draw(st.sampled_from([each for each in NOISES if each <= noise]))
    long = other.draw(st.sampled_from([each for each in LENGTHS if each >= steps]))
    sure = other.draw(
        st.sampled_from([each for each in DELTAS if each <= delta and (each > 1e-250 or method != "pld")])
    )
    assert_not_cheaper(epsilon(run(more, noise, steps), delta, method), cheap)
    assert_not_cheaper(epsilon(run(rate, noisy, steps), delta, method), cheap)
    assert_not_cheaper(epsilon(run(rate, noise, long), delta, method), cheap)
    assert_not_cheaper(epsilon(run(rate, noise, steps), sure, method), cheap)


@pytest.mark.long
@given(**RUN, delta=st.sampled_from(DELTAS[1:]), size=st.integers(2, 5))
@quickly
def test_a_group_costs_no_less_than_its_members(rate: float, noise: float, steps: int, delta: float, size: int) -> None:
    one = epsilon(run(rate, noise, steps), delta, "pld", 1)
    assert_not_cheaper(epsilon(run(rate, noise, steps), delta, "pld", size), one)


@pytest.mark.long
@given(**RUN, delta=st.sampled_from(DELTAS), method=st.sampled_from(METHODS))
@quickly
def test_how_a_run_is_cut_into_segments_does_not_matter(
    rate: float, noise: float, steps: int, delta: float, method: str
) -> None:
    assume(steps > 1 and (method != "pld" or delta >= 1e-250))
    whole, half = run(rate, noise, steps), steps // 2
    first = whole.segments[0]
    cut = replace(whole, segments=(replace(first, steps=half), replace(first, start_step=half, steps=steps - half)))
    assert epsilon(cut, delta, method).epsilon == pytest.approx(epsilon(whole, delta, method).epsilon, rel=1e-9)


@given(rate=st.sampled_from(RATES), noise=st.sampled_from(NOISES[1:]), delta=st.sampled_from(DELTAS[1:]))
@quickly
def test_runs_together_cost_what_one_run_of_their_length_costs(rate: float, noise: float, delta: float) -> None:
    whole, parts = run(rate, noise, 35), [run(rate, noise, steps) for steps in (20, 5, 10)]
    together = account_together(parts, delta).epsilon
    assert together == pytest.approx(account_together(parts[::-1], delta).epsilon, rel=1e-9)
    exact = account(whole, delta, "pld")
    assert (exact.lower_epsilon or 0.0) <= together <= exact.epsilon * (1.0 + 1e-9)


@pytest.mark.long
@given(**RUN, epsilons=st.lists(st.sampled_from((0.0, 1e-6, 0.1, 2.0, 50.0)), min_size=2, max_size=2))
@quickly
def test_delta_falls_with_epsilon_and_its_bounds_enclose_it(
    rate: float, noise: float, steps: int, epsilons: list[float]
) -> None:
    low, high = (delta_pld(run(rate, noise, steps), each) for each in sorted(epsilons))
    assert 0.0 <= known(low.lower) <= low.upper <= 1.0
    assert known(high.lower) <= low.upper


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_auto_answers_where_lattices_do_not_reach(rate: float) -> None:
    claimed = account(run(rate, 1.0, 100), 1e-300)
    assert claimed.accountant == ("gdp" if rate == 1.0 else "rdp")
    assert claimed.epsilon >= account(run(rate, 1.0, 100), 1e-250, "pld").epsilon
