"""`pld` over the whole range of a trace: its work and memory; its bounds against dp-accounting and quadrature."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, stats

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import curve_of_examples
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.samplings import SMALLEST_RATE, PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import (
    SensitivityMixture,
    delta_pld,
    epsilon_of_examples,
    epsilon_pld,
    examples_law,
    group_law,
)
from dpsweep.accounting.pld.loss import Bound
from tests.accounting.work import counted
from tests.known import known

CASES = [  # sample rate, noise multiplier, steps, delta, group size
    (1e-7, 0.3, 1000, 1e-5, 1),
    (1e-8, 0.3, 1000, 1e-5, 1),
    (1e-6, 0.3, 1000, 1e-8, 1),
    (1e-8, 5.0, 1000, 1e-8, 1),
    (1e-10, 1.5, 1_000_000, 1e-8, 1),
    (1e-12, 1e-3, 10**9, 1e-6, 1),
    (SMALLEST_RATE, 12.0, 48_765, 1.2e-6, 1),
    (SMALLEST_RATE, 29.0, 1_433_635, 3.7e-4, 16),
    (1.7e-11, 0.147, 2_664_926, 0.0276, 1),
    (2.7e-10, 0.14, 224_325, 6.8e-6, 1),
    (1e-5, 1.7e7, 4_384_126, 1e-9, 1),
    (1e-3, 0.02, 6_818_677_418, 0.7, 1),
    (3.4e-6, 3.7, 1, 5.9e-195, 361),
    (0.3, 1.0, 100, 1e-6, 10_000),
    (3.7e-11, 0.21, 837, 8.3e-9, 6),
    (0.5, 1e9, 10**12, 1e-250, 1),
    (9.860142e-10, 0.009615, 6_704_120, 6.41e-4, 1),
]

MEASURE = """
import json, sys
from pathlib import Path
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.mechanism.samplings import SMALLEST_RATE, PoissonSampling
from tests.accounting.work import counted
for rate, sigma, steps, delta, size in json.loads(sys.argv[1]):
    trace = Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma),))
    with counted() as work:
        claimed = account(trace, delta, "pld", size)
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # of this program alone
    print(json.dumps([claimed.epsilon, claimed.lower_epsilon, claimed.accountant, work.points, peak]))
"""


MEASURE_MEMBERS = """
import json, os, sys
os.cpu_count = lambda: 16  # as many lattices are filled at the same time as on a larger machine
from pathlib import Path
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling
from tests.accounting.work import counted
segments, starts, members, delta = json.loads(sys.argv[1])
parts, step = [], 0
for rate, sigma, steps in segments:
    sampling = PoissonSampling(rate) if rate < 1.0 else FixedBatchSampling(34_031, int(rate))
    parts.append(Segment(step, steps, sampling, sigma))
    step += steps
with counted() as work:
    found = epsilon_of_examples(Trace(34_031, tuple(parts), (GaussianRelease("pca", 2.09),)), starts, members, delta)
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps([found.upper, work.points, peak]))
"""
LONG_LATTICES = (
    [[1.0, 0.5428, 62_787], [0.4118, 7026.0, 6_890_582], [2.3656e-9, 0.2799, 3_384_132]],
    [0, 847_392, 983_234],
    [[1.0, 1.0, 0.2836], [0.3811, 0.3191, 0.3488], [0.0966, 0.578, 0.0]],
    1.55e-221,
)
LONG_TABLES = (
    [[0.0060057, 0.032642, 469_816_868]],
    [0, 3982, 782_405, 805_820],
    [
        [0.3193, 0.6934, 0.0, 0.3386],
        [1.0, 0.5034, 0.3832, 1.0],
        [0.9033, 0.3035, 0.1154, 1.0],
        [0.6738, 0.547, 0.3826, 0.2844],
    ],
    1.98e-224,
)


def poisson(rate: float, sigma: float, steps: int) -> Trace:
    return Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma),))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("cases", [CASES[::9], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_trace_is_answered_in_a_gibibyte_by_few_points_and_not_above_renyi(
    cases: tuple[tuple[float, float, int, float, int], ...],
) -> None:
    command = [sys.executable, "-W", "error", "-c", MEASURE, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    for case, (upper, lower, accountant, points, kibibytes) in zip(cases, answers, strict=True):
        rate, sigma, steps, delta, size = case
        assert 0.0 <= lower <= upper < math.inf, case
        assert accountant in ("pld", "gdp", "rdp"), case
        assert points < 4e7, case
        assert kibibytes < 1 << 20, case
        if size == 1:
            assert upper <= account(poisson(rate, sigma, steps), delta, "rdp").epsilon * (1 + 1e-8), case


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        pytest.param(LONG_LATTICES, 8e7, id="long lattices", marks=pytest.mark.long),
        pytest.param(LONG_TABLES, 1e6, id="long tables"),
    ],
)
def test_members_of_extreme_traces_are_answered_in_a_gibibyte_by_few_points_on_any_number_of_cores(
    asked: tuple[object, ...], allowed: float
) -> None:
    command = [sys.executable, "-W", "error", "-c", MEASURE_MEMBERS, json.dumps(asked)]
    # glibc would otherwise hold what threads have freed, by chance up to three quarters of what is used.
    used = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=used)
    assert done.returncode == 0, done.stderr
    upper, points, kibibytes = json.loads(done.stdout)
    assert 0.0 <= upper < math.inf
    assert points < allowed
    assert kibibytes < 900 << 10  # of a gibibyte


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "interval", "rel"),
    [(1e-8, 5.0, 1000, 1e-8, 1e-10, 0.06), (1e-4, 5.0, 1000, 1e-4, 1e-7, 1e-3), (1e-6, 0.3, 1000, 1e-8, 1e-3, 1e-2)],
)
def test_tiny_sample_rates_agree_with_dp_accounting(
    rate: float, sigma: float, steps: int, delta: float, interval: float, rel: float
) -> None:
    """The peer's pessimistic estimate; at a rate of 1e-8 its tails alone cost it 5 %."""
    peer = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )
    theirs = peer.self_compose(steps).get_epsilon_for_delta(delta)
    claimed = account(poisson(rate, sigma, steps), delta, "pld")
    assert claimed.accountant == "pld"
    assert claimed.lower_epsilon <= theirs * (1 + 1e-6)
    assert claimed.epsilon == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize(("rate", "sigma", "epsilon"), [(1e-7, 0.3, 1e-3), (1e-6, 1.0, 1e-6), (1e-4, 2.0, 1e-4)])
def test_one_step_at_a_tiny_rate_is_not_under_stated(rate: float, sigma: float, epsilon: float) -> None:
    """delta(eps) = q Phi-bar((c - 1)/s) - (e^eps - 1 + q) Phi-bar(c/s) where the loss at c is eps."""
    growth = math.expm1(epsilon)
    cut = sigma**2 * math.log((growth + rate) / rate) + 0.5
    norm = stats.norm(0, sigma)
    exact = float(rate * norm.sf(cut - 1) - (growth + rate) * norm.sf(cut))
    claimed = epsilon_pld(poisson(rate, sigma, 1), exact)
    assert known(claimed.lower) <= epsilon * (1 + 1e-6)
    assert epsilon * (1 - 1e-6) <= claimed.upper


def test_delta_above_the_total_variation_costs_nothing() -> None:
    step = 2 * stats.norm.cdf(0.5 / 5.0) - 1
    assert account(poisson(1e-8, 5.0, 1000), 1e-5 * step * 1.001, "pld").epsilon == 0.0
    barely = account(poisson(1e-8, 5.0, 1), 1e-8 * step * 0.9, "pld")
    assert barely.epsilon > 0.0


def test_a_bound_that_is_not_of_a_loss_distribution_says_so() -> None:
    weak = account(poisson(0.2, 1e-5, 1000), 1e-6, "pld")
    assert (weak.accountant, weak.kind) == ("gdp", "guarantee")
    many = account(poisson(2.7e-10, 0.14, 224_325), 6.8e-6, "pld")
    assert many.epsilon <= account(poisson(2.7e-10, 0.14, 224_325), 6.8e-6, "rdp").epsilon * (1 + 1e-8)


def test_delta_of_the_smallest_rate() -> None:
    claimed = delta_pld(poisson(SMALLEST_RATE, 1.0, 10), 0.5)
    assert 0.0 <= known(claimed.lower) <= claimed.upper <= 10 * SMALLEST_RATE


def test_delta_of_groups_that_nothing_protects() -> None:
    """The saddle point puts delta above e^709 there, which is no double."""
    trace = Trace(50_000, (Segment(0, 10_000, PoissonSampling(1e-3), 0.01),))
    assert known(delta_pld(trace, 1.0, 8).lower) <= 1.0 == delta_pld(trace, 1.0, 8).upper


@pytest.mark.parametrize("rate", [0.99 * SMALLEST_RATE, 2.6e-17, 1e-30, 1e-99])
def test_smaller_rates_are_refused(rate: float) -> None:
    with pytest.raises(InvalidInput, match=r"sample_rate is .*, but must be at least 1e-12"):
        poisson(rate, 1.0, 10)


@pytest.mark.long
def test_steps_of_hardly_any_loss_are_inverted_in_a_few_iterations() -> None:
    """Where rounding alone moves an output by more than a double's precision, Newton's method has nothing to gain."""
    steps = Segment(0, 4, PoissonSampling(0.48254), 1.767e8), Segment(4, 57_102, PoissonSampling(2.6358e-11), 1034.7)
    with counted() as work:
        claimed = account(Trace(468_356, steps), 8.1e-121, "pld", 8)
    assert 0 < work.newton < 40  # 60 for one law alone where only the size of a step ends them
    assert 0.0 < claimed.epsilon < 1e-6


def test_pooled_mixtures_are_on_their_side() -> None:
    mixture = group_law(PoissonSampling(0.3), 3000).scaled(0.1)
    sides: tuple[tuple[int, Bound], ...] = ((1, "upper"), (-1, "lower"))
    for epsilon_side, bound in sides:
        pooled = mixture.pooled(100, bound)
        assert len(pooled.sensitivities) <= 101
        assert math.fsum(pooled.probabilities) == pytest.approx(1.0)
        for value in (0.0, 80.0, 90.0, 91.03, 100.0):  # Pr[sensitivity > value]
            above = [sum(p for a, p in zip(m.sensitivities, m.probabilities, strict=True) if a > value + 1e-9)
                     for m in (pooled, mixture)]  # fmt: skip
            assert epsilon_side * (above[0] - above[1]) >= -1e-12


def exact_delta(mixture: SensitivityMixture, epsilon: float) -> float:
    atoms, weights = np.asarray(mixture.sensitivities), np.asarray(mixture.probabilities)

    def excess(x: float) -> float:
        return max(float(weights @ stats.norm.pdf(x - atoms)) - math.exp(epsilon) * stats.norm.pdf(x), 0.0)

    return float(integrate.quad(excess, -12, 14, limit=500, epsabs=1e-14)[0])


def test_members_of_small_contribution_cost_little() -> None:
    """A thousand members of a millionth each beside one: their sum's law is binomial, enumerated here."""
    contributions = np.array([1.0] + [1e-6] * 1000)[:, None]
    many = epsilon_of_examples(poisson(0.01, 1.0, 1000), [0], contributions, 1e-5)
    alone = epsilon_pld(poisson(0.01, 1.0, 1000), 1e-5)
    assert known(alone.lower) <= many.upper <= 1.01 * alone.upper
    values = np.concatenate([np.arange(60) * 1e-3, 1.0 + np.arange(60) * 1e-3])
    counts = stats.binom.pmf(np.arange(60), 1000, 0.01)
    law = SensitivityMixture(tuple(values), tuple(np.concatenate([0.99 * counts, 0.01 * counts]) / counts.sum()))
    delta = exact_delta(law, 0.5)
    members = np.array([1.0] + [1e-3] * 1000)[:, None]
    claimed = epsilon_of_examples(poisson(0.01, 1.0, 1), [0], members, delta)
    assert 0.5 * (1 - 1e-6) <= claimed.upper <= 0.5 * 1.01


@pytest.mark.parametrize("contribution", [5e-324, 1e-310, 1e-160])
def test_a_contribution_whose_square_underflows_costs_next_to_nothing(contribution: float) -> None:
    trace, given = poisson(0.1, 1.0, 10), [[contribution]]
    assert 0.0 <= epsilon_of_examples(trace, [0], given, 1e-200).upper < 1e-6
    assert 0.0 < curve_of_examples(trace, [0], given).advantage.upper < 1e-99


def test_the_law_of_small_and_large_members_is_rounded_up() -> None:
    members = [1.0, 0.4, 1e-3, 3.3e-5, 2e-9]
    mixture = examples_law(PoissonSampling(0.3), members, 1 / 512)
    subsets = [(sum(c for i, c in enumerate(members) if code >> i & 1), code.bit_count()) for code in range(32)]
    for value in (0.0, 1e-9, 3e-5, 1e-3, 0.4, 1.0, 1.001, 1.4):
        exact = sum(0.3**drawn * 0.7 ** (5 - drawn) for total, drawn in subsets if total > value * (1 + 1e-12))
        ours = sum(p for a, p in zip(mixture.sensitivities, mixture.probabilities, strict=True) if a > value)
        assert ours >= exact * (1 - 1e-12)
    assert mixture.sensitivities[-1] <= 1.4 + 2 / 512 + 2e-3


def test_users_of_small_contributions_pay_no_more_than_any_user_of_as_many_records() -> None:
    """The least losses of their steps lie far left of the table from which outputs are sought."""
    own = np.append(np.ones(3), 10.0 ** np.random.default_rng(29).uniform(-5.0, 0.0, 8))
    trace = poisson(0.1, 1.29, 300)
    found = epsilon_of_examples(trace, [0], own[:, None], 1e-5)
    assert found.method == "pld"
    assert found.upper <= epsilon_pld(trace, 1e-5, len(own)).upper
