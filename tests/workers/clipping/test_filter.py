"""Clipping by a filter: no history of norms, however adversarial, makes an example cost more than its budget."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.parameter_search import calibrate_filter
from dpsweep.accounting.mechanism.filters import GaussianFilter, IndividualFilter, RenyiFilter
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.workers.clipping import ClippingMethod, Examples, PublicFacts, make_clipping
from dpsweep.workers.spec import Component
from tests.known import known

Array = NDArray[np.float64]
DELTA = 1e-5
WEIGHT = 1.0 - 2e-7
"""The float32 weights of gradients are rounded by as much, which the trainer's noise allows for (`NORM_ERROR`)."""


def renyi_divergence(order: int, sample_rate: float, precision: float) -> float:
    """Of one step with u = (contribution / sigma)^2, by the binomial sum in 50 digits (Mironov et al. 2019)."""
    with mpmath.workdps(50):
        q, u = mpmath.mpf(sample_rate), mpmath.mpf(precision)
        terms = (
            mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp((k * k - k) * u / 2)
            for k in range(order + 1)
        )
        return float(mpmath.log(mpmath.fsum(terms)) / (order - 1))


def filtered_contributions(
    limit: IndividualFilter, sample_rate: float, norms: Array, sigmas: Array, bound: float = 1.0
) -> Array:
    """[steps, examples]: what the method lets examples with these norms [steps, examples] add, over the sensitivity."""
    count = norms.shape[1]
    rows = torch.arange(count)
    facts = PublicFacts(("all",), ("w",), dataset_size=count, batch_size=count)
    method: ClippingMethod = make_clipping(Component("filter", {"bound": bound, "epsilon": 1.0}))
    state, added = method.start(bound, facts), []
    for current, sigma in zip(norms, sigmas, strict=True):
        everyone = Examples(torch.from_numpy(current).float(), torch.zeros_like(rows), rows)
        prices = limit.prices(sample_rate, float(sigma))
        before = method.used_up(state, prices)
        state = method.pay(method.refresh(state, everyone), prices)
        rule = method.decide(state, torch.zeros(0, dtype=torch.float64), facts)
        huge = replace(everyone, norms=torch.full_like(everyone.norms, 1e6))
        added.append((rule.weights(huge).double() * 1e6 / rule.sensitivity).numpy())
        assert not added[-1][before.numpy()].any(), "who has left stays away"
    return np.array(added)


_norm = st.one_of(st.sampled_from([0.0, 1e-6, 1.0, 1e9, math.inf, math.nan]), st.floats(0.0, 2.0))


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    history=st.lists(st.lists(_norm, min_size=3, max_size=3), min_size=1, max_size=25),
    sigma=st.floats(0.4, 5.0),
    decay=st.floats(0.8, 1.0),
    sample_rate=st.sampled_from([1e-3, 0.05, 0.4, 1.0]),
    order=st.sampled_from([2, 3, 8, 33]),
    share=st.floats(1e-3, 3.0),
    bound=st.sampled_from([1e-3, 1.0, 7.3]),
)
def test_no_history_of_norms_costs_more_than_the_budget(
    history: list[list[float]], sigma: float, decay: float, sample_rate: float, order: int, share: float, bound: float
) -> None:
    """Composed in 50 digits from what each example could have added at every step, and the same of full batches."""
    norms, sigmas = bound * np.array(history), np.float64(sigma) * np.power(decay, np.arange(float(len(history))))
    budget = share * len(history) / 5.0 * renyi_divergence(order, sample_rate, sigma**-2)
    added = filtered_contributions(RenyiFilter(budget, order), sample_rate, norms, sigmas, bound) * WEIGHT
    precisions = np.square(added / sigmas[:, None])
    spent = [math.fsum(renyi_divergence(order, sample_rate, u) for u in column) for column in precisions.T]
    assert max(spent) <= budget
    if sample_rate == 1.0:
        squared = filtered_contributions(GaussianFilter(share), 1.0, norms, sigmas, bound) * WEIGHT
        assert np.square(squared / sigmas[:, None]).sum(axis=0).max() <= share


@pytest.mark.parametrize(("sample_rate", "limit"), [(0.02, RenyiFilter(0.05, 8)), (1.0, GaussianFilter(50.5))])
def test_an_example_contributes_in_full_then_what_is_left_then_nothing(
    sample_rate: float, limit: IndividualFilter
) -> None:
    """The first has small gradients and lasts; the second leaves when its budget has paid for full contributions."""
    sigmas = np.full(500, 1.0)
    added = filtered_contributions(limit, sample_rate, np.tile([0.05, 3.0], (500, 1)), sigmas)
    assert added[:, 0] == pytest.approx(0.05, rel=1e-6)
    full = int((added[:, 1] > 0.999999).sum())
    step = limit.prices(sample_rate, 1.0).cost(1.0)
    assert full == int(limit.budget / step)
    assert 0.0 < added[full, 1] < 1.0
    assert not added[full + 1 :, 1].any()
    assert limit.prices(sample_rate, 1.0).cost(added[:, 1]).sum() == pytest.approx(limit.budget, rel=1e-5)


def planned(sample_rate: float, sigma: float, steps: int) -> Trace:
    return Trace(1000, (Segment(0, steps, PoissonSampling(sample_rate), sigma),))


SPACING = 0.002
LOSSES = np.arange(-12.0, 24.0, SPACING)


def _law_of_step(sample_rate: float, sigma: float, contribution: float, adding: bool) -> tuple[Array, Array]:
    """Losses of one step and their probabilities: of with against without, or the other way, by quadrature."""
    x = np.linspace(-12.0 * sigma, 1.0 + 12.0 * sigma, 20_001)
    without = np.exp(-0.5 * (x / sigma) ** 2)
    inside = np.exp(-0.5 * ((x - contribution) / sigma) ** 2)
    with_it = (1.0 - sample_rate) * without + sample_rate * inside
    first, second = (with_it, without) if adding else (without, with_it)
    return np.log(first) - np.log(second), first / first.sum()


def _excess_of_who_stops(law: list[tuple[Array, Array]], epsilon: float, stop: float) -> float:
    """E[(1 - e^(epsilon - L))_+] of an example that contributes to these steps until its loss is above ``stop``."""
    going = np.where(np.abs(LOSSES) < SPACING / 2, 1.0, 0.0)
    total, size = 0.0, 1 << (2 * len(LOSSES)).bit_length()
    origin = int(np.argmin(np.abs(LOSSES)))
    for losses, weights in law:
        cells = np.clip(np.rint(losses / SPACING).astype(int) + origin, 0, len(LOSSES) - 1)
        kernel = np.bincount(cells, weights, len(LOSSES))
        whole = np.fft.irfft(np.fft.rfft(going, size) * np.fft.rfft(kernel, size), size)
        going = np.maximum(whole[origin : origin + len(LOSSES)], 0.0)
        left = np.where(stop < LOSSES, going, 0.0)
        total += float(left @ np.maximum(-np.expm1(np.minimum(epsilon - LOSSES, 0.0)), 0.0))
        going -= left
    return total + float(going @ np.maximum(-np.expm1(np.minimum(epsilon - LOSSES, 0.0)), 0.0))


@pytest.mark.parametrize("adding", [True, False])
@pytest.mark.parametrize(("sample_rate", "sigma", "steps"), [(1.0, 4.0, 150), (0.2, 1.2, 150)])
def test_an_example_that_reacts_to_its_loss_stays_within_delta(
    sample_rate: float, sigma: float, steps: int, adding: bool
) -> None:
    """The run of an adversary who stops when it is ahead, under the filter, on two data sets that differ in it.

    The plan has more steps than a budget of epsilon 3 pays for, so the filter ends its contributions if it does not.
    """
    epsilon = 3.0
    limit = calibrate_filter(planned(sample_rate, sigma, steps), epsilon, DELTA)
    trace = replace(planned(sample_rate, sigma, steps), filter=limit)
    assert account(trace, DELTA).epsilon <= epsilon < account(replace(trace, filter=None), DELTA).epsilon
    added = filtered_contributions(limit, sample_rate, np.full((steps, 1), 9.0), np.full(steps, sigma))[:, 0]
    laws = {c: _law_of_step(sample_rate, sigma, c, adding) for c in set(added[added > 0.0])}
    law = [laws[c] for c in added[added > 0.0]]
    found = [_excess_of_who_stops(law, epsilon, stop) for stop in (0.5 * epsilon, epsilon, 1.2 * epsilon, math.inf)]
    assert max(found) <= DELTA
    if sample_rate == 1.0:
        assert max(found) > 0.9 * DELTA, "Gaussian filters lose nothing"


@pytest.mark.parametrize("bound", [3.0, 7.3, 1e-3])
def test_what_is_charged_is_not_below_the_cost_of_the_float32_bound(bound: float) -> None:
    """One step: the bound by which each example is clipped, over the sensitivity, in float64."""
    norms = torch.linspace(0.01, 0.99, 200) * bound
    rows = torch.arange(len(norms))
    facts = PublicFacts(("all",), ("w",), dataset_size=len(rows), batch_size=len(rows))
    method: ClippingMethod = make_clipping(Component("filter", {"bound": bound, "epsilon": 1.0}))
    state = method.refresh(method.start(bound, facts), Examples(norms, torch.zeros_like(rows), rows))
    paid = method.pay(state, GaussianFilter(10.0).prices(1.0, 1.0))
    assert (known(paid.spent).numpy() >= np.square(known(paid.granted).double().numpy() / bound)).all()
