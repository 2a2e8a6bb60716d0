"""One round against numerical integration, and the laws of group sensitivities against enumeration."""

import itertools
import math
import tracemalloc
from typing import Any, cast

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, Sampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from dpsweep.accounting.pld import (
    LatticeLoss,
    SensitivityMixture,
    discretise,
    epsilon_of_examples,
    epsilon_pld,
    examples_law,
    group_epsilons,
    group_law,
    grows_at_least_linearly,
    linear_growth,
    vadhan_epsilon,
)
from dpsweep.accounting.pld.loss import DIRECTIONS, Bound, Direction
from tests.fuzz.closed_forms import gaussian
from tests.known import known

MIXTURES = {
    "subsampled": group_law(PoissonSampling(0.01), 1).scaled(1 / 0.8),
    "tiny rate": group_law(PoissonSampling(1e-5), 1).scaled(1.0),
    "group": group_law(PoissonSampling(0.1), 4).scaled(1 / 0.7),
    "wide group": group_law(PoissonSampling(0.05), 8).scaled(1 / 0.3),
    "almost plain": group_law(PoissonSampling(0.99), 1).scaled(1 / 2),
    "plain": group_law(PoissonSampling(1.0), 2).scaled(1 / 3),
    "fixed batch": group_law(FixedBatchSampling(20, 5), 3).scaled(2 / 1.5),
    "given examples": examples_law(PoissonSampling(0.3), [0.3, 0.7, 0.21], 0.1).scaled(1 / 0.9),
}


def hockey_stick(mixture: SensitivityMixture, epsilon: float, direction: Direction) -> float:
    """max(0, P - e^eps Q) integrated with mpmath at 30 digits; the set where it is positive is a half-line."""
    with mpmath.workdps(30):
        atoms = list(zip(mixture.sensitivities, mixture.probabilities, strict=True))

        def ratio(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.fsum(p * mpmath.exp(a * x - mpmath.mpf(a) ** 2 / 2) for a, p in atoms)

        def upper_tail(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.fsum(p * mpmath.ncdf(a - x) for a, p in atoms)

        sign = 1 if direction is Direction.REMOVE else -1
        target = mpmath.exp(sign * epsilon)
        low, high = mpmath.mpf(-60), mpmath.mpf(200)
        if ratio(low) >= target:
            cut = low
        else:
            for _ in range(120):
                middle = (low + high) / 2
                low, high = (middle, high) if ratio(middle) < target else (low, middle)
            cut = high
        growth = mpmath.exp(epsilon)
        if direction is Direction.REMOVE:
            return float(upper_tail(cut) - growth * mpmath.ncdf(-cut))
        return float(max(0, mpmath.ncdf(cut) - growth * (1 - upper_tail(cut)))) if cut > -60 else 0.0


def delta_of(law: LatticeLoss, epsilon: float) -> float:
    above = law.losses > epsilon
    return law.infinity_mass + float(law.probabilities[above] @ -np.expm1(epsilon - law.losses[above]))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_discretised_losses_bracket_the_exact_divergence(name: str, direction: Direction) -> None:
    mixture = MIXTURES[name]
    scale = 1e-5 if name == "tiny rate" else 1.0
    upper, lower = (discretise(mixture, 1e-2 * scale, direction, bound) for bound in ("upper", "lower"))
    for epsilon in (0.0, 0.013, 0.5, 2.0, 6.0):
        exact = hockey_stick(mixture, epsilon * scale, direction)
        assert delta_of(upper, epsilon * scale) >= exact * (1 - 1e-10) - upper.rounding.sum()
        assert delta_of(lower, epsilon * scale) <= exact * (1 + 1e-10) + lower.rounding.sum()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_upper_bound_is_exact_on_the_lattice(direction: Direction) -> None:
    law = discretise(MIXTURES["group"], 1e-2, direction, "upper")
    for epsilon in (0.0, 0.05, 0.1):
        assert delta_of(law, epsilon) == pytest.approx(hockey_stick(MIXTURES["group"], epsilon, direction), rel=1e-9)


def test_both_bounds_converge_quadratically() -> None:
    exact = hockey_stick(MIXTURES["group"], 0.505, Direction.REMOVE)
    for bound in ("upper", "lower"):
        coarse, fine = (
            abs(delta_of(discretise(MIXTURES["group"], h, Direction.REMOVE, bound), 0.505) - exact)
            for h in (0.02, 0.005)
        )
        assert fine < coarse / 8 or fine < 1e-12


@pytest.mark.parametrize("bound", ["upper", "lower"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_truncated_groups_stay_on_their_side(direction: Direction, bound: Bound) -> None:
    mixture = group_law(PoissonSampling(0.05), 30).scaled(1.0)
    law = discretise(mixture, 1e-2, direction, bound, tail=1e-4)  # cuts many sensitivities off
    exact = hockey_stick(mixture, 0.5, direction)
    assert delta_of(law, 0.5) >= exact if bound == "upper" else delta_of(law, 0.5) <= exact
    assert delta_of(law, 0.5) == pytest.approx(exact, rel=0.02)


def test_words_are_directions_and_no_others() -> None:
    """A misspelt one would be taken for the other direction, or for the other bound."""
    mixture: Any = MIXTURES["group"]
    for direction in DIRECTIONS:
        named, meant = (discretise(mixture, 1e-2, each, "upper") for each in (cast(Any, direction.value), direction))
        np.testing.assert_array_equal(named.probabilities, meant.probabilities)
    for words in (("Remove", "upper"), ("add", "Upper"), (None, "lower")):
        with pytest.raises(InvalidInput, match="must be 'remove' or 'add', and 'upper' or 'lower'"):
            discretise(mixture, 1e-2, *cast(Any, words))


def test_dual_measure_has_mass_one() -> None:
    law = discretise(MIXTURES["wide group"], 1e-2, Direction.REMOVE, "upper")
    assert float(law.probabilities @ np.exp(-law.losses)) == pytest.approx(1.0, abs=1e-9)
    assert law.infinity_mass < 1e-18


@given(size=st.integers(1, 300), rate=st.floats(1e-6, 0.999))
@settings(max_examples=40, deadline=None)
def test_poisson_groups_are_binomial(size: int, rate: float) -> None:
    mixture = group_law(PoissonSampling(rate), size)
    expected = stats.binom.pmf(np.asarray(mixture.sensitivities), size, rate)
    np.testing.assert_allclose(mixture.probabilities, expected, rtol=1e-9)
    assert 0.0 <= mixture.missing < 1e-280


@given(data=st.data(), dataset_size=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_fixed_batch_groups_are_hypergeometric(data: st.DataObject, dataset_size: int) -> None:
    size = data.draw(st.integers(1, dataset_size))
    batch = data.draw(st.integers(1, dataset_size))
    mixture = group_law(FixedBatchSampling(dataset_size, batch), size)
    expected = stats.hypergeom.pmf(np.asarray(mixture.sensitivities), dataset_size, size, batch)
    np.testing.assert_allclose(mixture.probabilities, expected, rtol=1e-7)


CONTRIBUTIONS = (0.31, 0.7, 0.25, 1.0)


def test_given_examples_enumerated_poisson() -> None:
    mixture = examples_law(PoissonSampling(0.3), CONTRIBUTIONS, 0.05)
    expected: dict[int, float] = {}
    for drawn in itertools.product((0, 1), repeat=4):
        units = sum(b * math.ceil(c / 0.05 - 1e-9) for b, c in zip(drawn, CONTRIBUTIONS, strict=True))
        expected[units] = expected.get(units, 0.0) + 0.3 ** sum(drawn) * 0.7 ** (4 - sum(drawn))
    assert [round(a / 0.05) for a in mixture.sensitivities] == sorted(expected)
    np.testing.assert_allclose(mixture.probabilities, [expected[u] for u in sorted(expected)], rtol=1e-12)


def test_given_examples_enumerated_without_replacement() -> None:
    mixture = examples_law(FixedBatchSampling(7, 3), CONTRIBUTIONS, 0.05)
    expected: dict[int, float] = {}
    for batch in itertools.combinations(range(7), 3):
        units = sum(math.ceil(CONTRIBUTIONS[i] / 0.05 - 1e-9) for i in batch if i < 4)
        expected[units] = expected.get(units, 0.0) + 1 / math.comb(7, 3)
    assert [round(a / 0.05) for a in mixture.sensitivities] == sorted(expected)
    np.testing.assert_allclose(mixture.probabilities, [expected[u] for u in sorted(expected)], rtol=1e-12)


@pytest.mark.parametrize(("sampling", "displaced"), [(PoissonSampling(1.0), 0.0), (FixedBatchSampling(90, 90), 1.0)])
def test_members_of_full_batches_are_one_gaussian_of_their_summed_shifts(sampling: Sampling, displaced: float) -> None:
    found = epsilon_of_examples(Trace(90, (Segment(0, 40, sampling, 8.0),)), [0], np.c_[CONTRIBUTIONS].T, 1e-5)
    shift = sum(c + displaced for c in CONTRIBUTIONS) / 8.0 * math.sqrt(40)
    assert found.upper == pytest.approx(gaussian(shift, 1e-5), rel=1e-7)


def test_the_sums_of_many_members_are_held_once() -> None:
    members = np.linspace(0.5, 1.0, 60).tolist()
    tracemalloc.start()
    mixture = examples_law(FixedBatchSampling(10**4, 100), members, 1 / 512)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = 8 * (len(members) + 1) * math.ceil(512 * sum(members))
    assert most < 2.0 * whole
    mean = sum(math.ceil(512 * member) for member in members) / 512 * 100 / 10**4
    assert np.dot(mixture.sensitivities, mixture.probabilities) == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize(
    ("sampling", "adjacency"),
    [(PoissonSampling(0.02), "add_remove"), (FixedBatchSampling(5000, 100), "add_remove")],
)
def test_equal_members_are_a_group(sampling, adjacency) -> None:  # type: ignore[no-untyped-def]
    trace = Trace(5000, (Segment(0, 50, sampling, 1.2, (SideQuery("counts", 9.0),)),), adjacency=adjacency)
    members = epsilon_of_examples(trace, [0, 20], np.ones((3, 2)), 1e-5)
    group = epsilon_pld(trace, 1e-5, 3)
    assert members.upper == pytest.approx(group.upper, rel=1e-3)
    assert known(group.lower) <= members.upper


def test_given_examples_against_brute_force_on_the_plane() -> None:
    """Two members whose gradients point in different directions cost no more than the scalar mixture says."""
    contributions, rate, sigma, epsilon = (1.0, 0.6), 0.3, 1.1, 0.4
    trace = Trace(10, (Segment(0, 1, PoissonSampling(rate), sigma),))
    axis = np.linspace(-9, 11, 801) / 1.0
    x, y = np.meshgrid(axis, axis, indexing="ij")
    normal = stats.norm(0, sigma).pdf
    shifts = ((0.0, 0.0), (contributions[0], 0.0), (0.0, contributions[1]), contributions)
    weights = ((1 - rate) ** 2, rate * (1 - rate), rate * (1 - rate), rate**2)
    p = sum(w * normal(x - a) * normal(y - b) for w, (a, b) in zip(weights, shifts, strict=True))
    q = normal(x) * normal(y)
    delta = max(
        float(np.maximum(first - np.exp(epsilon) * second, 0).sum() * (axis[1] - axis[0]) ** 2)
        for first, second in ((p, q), (q, p))
    )
    assert epsilon_of_examples(trace, [0], np.array(contributions)[:, None], delta).upper >= epsilon
    # along one line, the triangle inequality is an equality and the claim tight
    line = np.linspace(-9, 11, 200_001)
    p = sum(w * normal(line - sum(s)) for w, s in zip(weights, shifts, strict=True))
    q = normal(line)
    delta = max(
        float(np.maximum(first - np.exp(epsilon) * second, 0).sum() * (line[1] - line[0]))
        for first, second in ((p, q), (q, p))
    )
    claimed = epsilon_of_examples(trace, [0], np.array(contributions)[:, None], delta)
    assert claimed.upper == pytest.approx(epsilon, rel=5e-3)
    assert claimed.upper >= epsilon * (1 - 1e-6)


def test_a_fixed_batch_member_displaces_a_record_that_may_contribute_fully() -> None:
    """A member with a zero gradient still changes the batch: somebody else is left out. Enumerated for n = 2, B = 1."""
    sigma, epsilon = 1.3, 0.2
    trace = Trace(2, (Segment(0, 1, FixedBatchSampling(2, 1), sigma),))
    line = np.linspace(-12, 12, 200_001)
    normal = stats.norm(0, sigma).pdf
    with_member, without = (normal(line) + normal(line - 1.0)) / 2, normal(line - 1.0)  # the other record gives 1
    delta = float(np.maximum(with_member - math.exp(epsilon) * without, 0).sum() * (line[1] - line[0]))
    assert epsilon_of_examples(trace, [0], [[0.0]], delta).upper >= epsilon * (1 - 1e-6)


def test_shuffled_members_meet_in_one_batch() -> None:
    trace = Trace(100, (Segment(0, 40, ShuffledSampling(10), 4.0),), adjacency="zero_out")
    members = epsilon_of_examples(trace, [0], [[1.0], [0.5]], 1e-5)
    alone = Trace(100, (Segment(0, 40, ShuffledSampling(10), 4.0 / 1.5),), adjacency="zero_out")
    assert members.upper == pytest.approx(epsilon_pld(alone, 1e-5).upper, rel=1e-9)


def test_members_of_a_shuffled_epoch_pay_for_peaks_at_different_steps() -> None:
    trace = Trace(100, (Segment(0, 10, ShuffledSampling(10), 4.0),), adjacency="zero_out")
    apart = epsilon_of_examples(trace, [0, 5], [[1.0, 0.0], [0.0, 1.0]], 1e-5)
    together = epsilon_of_examples(trace, [0], [[1.0], [1.0]], 1e-5)
    assert apart.upper == pytest.approx(together.upper, rel=1e-9)


def test_examples_that_contribute_nothing_lose_nothing() -> None:
    trace = Trace(100, (Segment(0, 40, PoissonSampling(0.1), 1.0),))
    assert epsilon_of_examples(trace, [0], [[0.0], [0.0]], 1e-5).upper == 0.0


def test_published_comparisons_bracket_the_group() -> None:
    trace = Trace(50_000, (Segment(0, 2000, PoissonSampling(0.01), 1.0),))
    tight = group_epsilons(trace, 1e-6, (1, 2, 4))
    for size, claimed in zip((1, 2, 4), tight, strict=True):
        assert linear_growth(trace, 1e-6, size) <= claimed.upper
        assert vadhan_epsilon(trace, 1e-6, size) >= known(claimed.lower)
    assert vadhan_epsilon(trace, 1e-6, 64) == math.inf


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.01), (0.3, 0.001), (0.7, 0.5)])
def test_the_generic_conversion_of_a_single_step_is_that_of_its_exact_curve(sigma: float, rate: float) -> None:
    """One sampled step is far from a Gaussian, and a saddle point's estimate of it is of no use."""

    def delta(epsilon: float) -> float:  # of adding a record: P exceeds e^eps Q beyond one point
        cut = sigma**2 * math.log((math.expm1(epsilon) + rate) / rate) + 0.5
        above, without = stats.norm.sf((cut - 1.0) / sigma), stats.norm.sf(cut / sigma)
        return float(rate * above + (1.0 - rate) * without - math.exp(epsilon) * without)

    def excess(epsilon: float) -> float:
        return math.log(delta(epsilon)) - math.log(1e-5 * math.expm1(epsilon) / math.expm1(2.0 * epsilon))

    exact = 2.0 * optimize.brentq(excess, 0.1, 22.0)
    found = vadhan_epsilon(Trace(50_000, (Segment(0, 1, PoissonSampling(rate), sigma),)), 1e-5, 2)
    assert exact <= found <= 1.01 * exact


@pytest.mark.parametrize("sigma", [0.3, 1.0, 30.0])
def test_linear_growth_is_a_lower_bound_where_nothing_is_sampled(sigma: float) -> None:
    trace = Trace(100, (Segment(0, 20, ShuffledSampling(1), sigma),), adjacency="zero_out")
    assert grows_at_least_linearly(trace)
    for size, claimed in zip((2, 8), group_epsilons(trace, 1e-5, (2, 8)), strict=True):
        assert linear_growth(trace, 1e-5, size) <= claimed.upper


def test_linear_growth_is_no_lower_bound_where_batches_are_sampled() -> None:
    """Two members are in the one batch with probability 1e-6, less than delta."""
    trace = Trace(50_000, (Segment(0, 1, PoissonSampling(1e-3), 0.3),))
    (pair,) = group_epsilons(trace, 1e-5, (2,))
    assert not grows_at_least_linearly(trace)
    assert pair.upper < 0.7 * linear_growth(trace, 1e-5, 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda: SensitivityMixture((), ()),
        lambda: SensitivityMixture((1.0, 1.0), (0.5, 0.5)),
        lambda: SensitivityMixture((-1.0,), (1.0,)),
        lambda: SensitivityMixture((float("nan"),), (1.0,)),
        lambda: SensitivityMixture((0.0, 1.0), (0.5, 0.4)),
        lambda: group_law(PoissonSampling(0.1), 0),
        lambda: group_law(FixedBatchSampling(4, 2), 5),
        lambda: examples_law(PoissonSampling(0.1), [float("nan")], 0.1),
    ],
)
def test_impossible_mixtures_are_refused(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput):
        build()
