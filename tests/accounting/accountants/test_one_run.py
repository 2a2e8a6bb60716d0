"""Accountants against the papers' numbers, dp-accounting, Opacus and each other."""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.events import dp_accounting_pld, dp_accounting_rdp
from dpsweep.accounting.accountants.methods import total_rdp, total_rho
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.paper_only import strong_composition
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.mechanism.rounds import Round, SampledGaussian, gaussian_rounds
from dpsweep.accounting.mechanism.samplings import Adjacency, FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.schedules import make_schedule, planned_trace
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.numerics.renyi import ORDERS
from tests.accounting import oracle

DELTA = 1e-5
GUARANTEES = ("rdp", "rdp-classic", "pld", "gdp", "zcdp", "strong", "auto")


def shuffled(sigma: float = 6.0, epochs: int = 400, steps_per_epoch: int = 1, **rest: Any) -> Trace:
    schedule = make_schedule("constant", sigma)
    return replace(planned_trace(schedule, ShuffledSampling(steps_per_epoch), epochs, steps_per_epoch, 1000), **rest)


def poisson(
    sigma: float = 6.0, q: float = 0.01, steps: int = 40_000, side: tuple[SideQuery, ...] = (), **rest: Any
) -> Trace:
    return Trace(1000, (Segment(0, steps, PoissonSampling(q), sigma, side),), **rest)


def fixed(sigma: float = 4.0, steps: int = 1000, size: int = 10_000, batch: int = 200, **rest: Any) -> Trace:
    return Trace(size, (Segment(0, steps, FixedBatchSampling(size, batch), sigma),), **rest)


def epsilon(trace: Trace, accountant: str, delta: float = DELTA, group_size: int = 1) -> float:
    return account(trace, delta, accountant, group_size).epsilon


class TestPublishedNumbers:
    """Paper C, Figure 2 at epoch 400: q = 0.01, sigma = 6, delta = 1e-5."""

    @pytest.mark.parametrize(("accountant", "published"), [("zcdp", 21.55), ("gdp", 19.13)])
    def test_shuffled(self, accountant: str, published: float) -> None:
        assert epsilon(shuffled(), accountant) == pytest.approx(published, abs=5e-3)

    @pytest.mark.parametrize(
        ("accountant", "published"), [("zcdp-sampled", 2.3732), ("rdp-classic", 1.6705), ("rdp", 1.3999)]
    )
    def test_sampled(self, accountant: str, published: float) -> None:
        assert epsilon(poisson(), accountant) == pytest.approx(published, abs=1e-4)

    def test_strong_composition_of_the_classic_gaussian_bound(self) -> None:
        """The paper bounds a step by sqrt(2 ln(1.25/d)) / sigma: 33.8 with delta/(T+1) for each step and for the
        composition, 29.04 when the split is optimised. Ours uses the exact Gaussian and is lower."""
        q, sigma, steps = 0.01, 6.0, 40_000

        def composed(spent: float) -> float:
            step = math.sqrt(2.0 * math.log(1.25 / (spent / steps / q))) / sigma
            return strong_composition([math.log1p(q * math.expm1(step))], [steps], DELTA - spent)

        assert composed(DELTA * steps / (steps + 1)) == pytest.approx(33.82, abs=0.01)
        optimised = minimize_scalar(lambda share: composed(share * DELTA), bounds=(0.01, 0.99), method="bounded").fun
        assert optimised == pytest.approx(29.04, abs=0.01)
        assert epsilon(poisson(), "pld") < epsilon(poisson(), "strong") < optimised

    def test_an_epoch_of_any_number_of_batches_costs_the_same(self) -> None:
        assert epsilon(shuffled(steps_per_epoch=100), "zcdp") == epsilon(shuffled(), "zcdp")
        assert total_rho(shuffled(8.0, 100, 10)) == 0.78125


class TestIndependentOracles:
    @pytest.mark.parametrize("sigma", [0.05, 0.5, 3.0, 100.0])
    @pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.3])
    def test_gaussian(self, sigma: float, delta: float) -> None:
        ours = epsilon(shuffled(sigma, 1), "gdp", delta)
        theirs = get_epsilon_gaussian(sigma, delta)
        assert theirs <= ours * (1.0 + 1e-12)
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-12)

    @settings(max_examples=15, deadline=None)
    @given(
        levels=st.lists(
            st.tuples(st.floats(0.6, 8.0), st.floats(1e-3, 0.5), st.integers(1, 500)), min_size=1, max_size=3
        )
    )
    def test_rdp_agrees_with_dp_accounting_at_whole_orders(self, levels: list[tuple[float, float, int]]) -> None:
        segments, start = [], 0
        for sigma, q, steps in levels:
            segments.append(Segment(start, steps, PoissonSampling(q), sigma))
            start += steps
        trace = Trace(1000, tuple(segments))
        orders = [2, 3, 5, 8, 16, 32, 64]
        theirs = RdpAccountant(orders=orders)
        theirs.compose(oracle.event(trace))
        np.testing.assert_allclose(total_rdp(trace)[np.isin(ORDERS, orders)], theirs.rdp, rtol=1e-7, atol=1e-10)
        assert epsilon(trace, "rdp") <= theirs.get_epsilon(DELTA) * (1.0 + 1e-8)

    @pytest.mark.parametrize(
        "trace",
        [
            poisson(1.0, 0.01, 500),
            fixed(steps=100),
            poisson(2.0, 0.02, 100, side=(SideQuery("counts", 5.0),)),
            poisson(2.0, 0.02, 100, releases=(GaussianRelease("pca", 4.0),)),
        ],
        ids=["poisson", "fixed", "side query", "release"],
    )
    def test_pld_is_that_of_dp_accounting(self, trace: Trace) -> None:
        reference = oracle.epsilon(trace, DELTA)
        assert epsilon(trace, "pld") == pytest.approx(reference, rel=1e-3)

    def test_pld_is_within_the_bounds_of_opacus_prv(self) -> None:
        prv = pytest.importorskip("opacus.accountants", reason="opacus is a benchmark-only dependency")
        accountant = prv.PRVAccountant()
        accountant.history = [(1.1, 0.02, 300), (0.9, 0.02, 300)]
        segments = (
            Segment(0, 300, PoissonSampling(0.02), 1.1),
            Segment(300, 300, PoissonSampling(0.02), 0.9),
        )
        assert epsilon(Trace(1000, segments), "pld") == pytest.approx(accountant.get_epsilon(DELTA), abs=0.015)

    def test_gdp_of_shuffled_epochs_is_the_pld_of_one_gaussian_each(self) -> None:
        trace = shuffled(3.0, 5, 7)
        assert epsilon(trace, "gdp") == pytest.approx(oracle.epsilon(trace, DELTA), rel=1e-4)


class TestEvents:
    """dp-accounting drops the count of some events; none of those we produce."""

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(
        ("trace", "group_size"),
        [
            (poisson(2.0, 0.1, 3), 1),
            (fixed(steps=3), 1),
            (shuffled(6.0, 3), 1),
            (poisson(2.0, 0.1, 3), 2),
            (fixed(steps=3), 2),
        ],
    )
    def test_composing_one_by_one_is_composing_all(self, trace: Trace, group_size: int) -> None:
        (segment,) = trace.segments
        single = replace(trace, segments=tuple(replace(segment, start_step=i, steps=1) for i in range(3)))
        together = dp_accounting_pld(trace, DELTA, group_size, grid=5e-3)
        assert dp_accounting_pld(single, DELTA, group_size, grid=5e-3) == pytest.approx(together, rel=5e-3)
        assert together > dp_accounting_pld(trace.until(1), DELTA, group_size, grid=5e-3)

    def test_orders_that_it_leaves_out_are_not_printed(self, caplog: pytest.LogCaptureFixture) -> None:
        """They only raise its bound, and a search for noise would print a screen of them."""
        assert 0.0 < dp_accounting_rdp(poisson(1.03436, 1 / 6, 18), DELTA) < math.inf
        assert not caplog.records

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize(
        "trace",
        [poisson(2.0, 0.05, 50), poisson(2.0, 0.05, 50, adjacency="zero_out"), fixed(2.0, 50, 1000, 50)],
        ids=["poisson", "poisson zero-out", "fixed"],
    )
    def test_groups_are_mixtures_of_gaussians(self, trace: Trace) -> None:
        trace = replace(trace, releases=(GaussianRelease("pca", 20.0),))
        reference = oracle.epsilon(trace, DELTA, 2, grid=2e-3)
        assert epsilon(trace, "pld", group_size=2) == pytest.approx(reference, rel=2e-3)


class TestDpAccounting:
    """dp-accounting is a cross-check by name: an estimate, never what `auto` gives."""

    @pytest.mark.parametrize("trace", [poisson(2.0, 0.05, 50), fixed(2.0, 50, 1000, 50), shuffled(3.0, 5, 7)])
    def test_it_agrees_and_claims_no_guarantee(self, trace: Trace) -> None:
        for name in ("pld", "rdp"):
            ours, theirs = account(trace, DELTA, name), account(trace, DELTA, f"dp-accounting-{name}")
            assert (theirs.accountant, theirs.kind) == (f"dp-accounting-{name}", "estimate")
            assert theirs.epsilon == pytest.approx(ours.epsilon, rel=0.02)

    def test_auto_never_asks_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "dpsweep.accounting.accountants.events", None)
        account(poisson(2.0, 0.05, 50), DELTA, "auto", 2)
        with pytest.raises(ImportError):
            account(poisson(2.0, 0.05, 50), DELTA, "dp-accounting-rdp")

    @pytest.mark.parametrize(
        ("trace", "accountant", "group_size", "delta", "message"),
        [
            (poisson(releases=(PureRelease("top", 0.1),)), "dp-accounting-pld", 1, DELTA, "no event for an arbitrary"),
            (poisson(releases=(PureRelease("top", 0.1),)), "dp-accounting-rdp", 1, DELTA, "no event for an arbitrary"),
            (poisson(2.0, 0.05, 50), "dp-accounting-rdp", 2, DELTA, "no groups of 2 in sampled batches"),
            (poisson(1e-3, 0.05, 50), "dp-accounting-pld", 1, DELTA, "would need a grid of"),
            (poisson(2.0, 0.05, 50), "dp-accounting-pld", 1, 1e-30, "no finite epsilon at delta 1e-30"),
            (poisson(1e8, 0.01, 10), "dp-accounting-rdp", 1, DELTA, "loses costs as small"),
        ],
    )
    def test_what_it_does_not_cover_is_refused(
        self, trace: Trace, accountant: str, group_size: int, delta: float, message: str
    ) -> None:
        with pytest.raises(UnsupportedMechanism, match=message):
            account(trace, delta, accountant, group_size)


class TestOrder:
    @pytest.mark.parametrize(
        "trace", [poisson(1.0, 0.02, 1000), shuffled(4.0, 30), fixed()], ids=["poisson", "shuffled", "fixed"]
    )
    def test_tighter_methods_give_smaller_epsilons(self, trace: Trace) -> None:
        assert epsilon(trace, "pld") <= epsilon(trace, "rdp") <= epsilon(trace, "rdp-classic")
        assert epsilon(trace, "rdp") <= epsilon(trace, "strong")
        assert epsilon(trace, "auto") <= epsilon(trace, "pld") * (1.0 + 1e-6)

    @pytest.mark.parametrize("accountant", ["rdp", "rdp-classic", "pld", "strong", "zcdp-sampled"])
    def test_monotone_in_steps_noise_rate_and_delta(self, accountant: str) -> None:
        middle = epsilon(poisson(2.0, 0.01, 2000), accountant)
        assert epsilon(poisson(2.0, 0.01, 1000), accountant) < middle
        assert epsilon(poisson(2.5, 0.01, 2000), accountant) < middle
        assert epsilon(poisson(2.0, 0.005, 2000), accountant) < middle
        assert epsilon(poisson(2.0, 0.01, 2000), accountant, delta=1e-4) < middle

    @pytest.mark.parametrize("accountant", ["rdp", "rdp-classic", "pld", "gdp", "zcdp", "strong"])
    def test_composing_segments_is_running_longer(self, accountant: str) -> None:
        sampling = ShuffledSampling(10) if accountant in ("gdp", "zcdp") else PoissonSampling(0.05)
        adjacency: Adjacency = "zero_out" if accountant in ("gdp", "zcdp") else "add_remove"
        whole = Trace(100, (Segment(0, 120, sampling, 2.0),), adjacency=adjacency)
        parts = Trace(100, tuple(Segment(s, 40, sampling, 2.0) for s in (0, 40, 80)), adjacency=adjacency)
        assert epsilon(parts, accountant) == pytest.approx(epsilon(whole, accountant), rel=1e-12)

    @pytest.mark.parametrize("accountant", ["gdp", "zcdp", "rdp", "pld"])
    def test_larger_groups_cost_more(self, accountant: str) -> None:
        epsilons = [epsilon(shuffled(10.0, 5), accountant, group_size=size) for size in (1, 2, 3)]
        assert epsilons[1] > 2.0 * epsilons[0]
        assert epsilons[2] > epsilons[1]


class TestRounds:
    def test_a_fixed_batch_counts_half_the_noise_where_examples_displace_each_other(self) -> None:
        assert gaussian_rounds(fixed()) == (Round((SampledGaussian(1.0, 0.02, 2.0),), 1000),)

    def test_an_epoch_costs_what_its_lowest_noise_costs(self) -> None:
        sampling = ShuffledSampling(10)
        segments = (Segment(0, 15, sampling, 4.0), Segment(15, 3, sampling, 2.0), Segment(18, 7, sampling, 8.0))
        trace = Trace(100, segments, adjacency="zero_out")
        assert gaussian_rounds(trace) == tuple(
            Round((SampledGaussian(1.0, 1.0, sigma),), 1) for sigma in (4.0, 2.0, 8.0)
        )

    def test_side_queries_add_in_quadrature(self) -> None:
        trace = poisson(3.0, 0.1, 7, side=(SideQuery("counts", 4.0),))
        assert gaussian_rounds(trace) == (Round((SampledGaussian(1.0, 0.1, pytest.approx(2.4)),), 7),)  # type: ignore[arg-type]  # stands for a number

    def test_noise_levels_are_taken_together_across_segments(self) -> None:
        segments = tuple(Segment(10 * i, 10, PoissonSampling(0.1), [1.0, 2.0][i % 2]) for i in range(6))
        assert gaussian_rounds(Trace(100, segments)) == tuple(
            Round((SampledGaussian(1.0, 0.1, sigma),), 30) for sigma in (1.0, 2.0)
        )


class TestReleases:
    @pytest.mark.parametrize("accountant", GUARANTEES)
    def test_every_release_costs(self, accountant: str) -> None:
        bare = shuffled(6.0, 10)
        gaussian = replace(bare, releases=(GaussianRelease("pca", 5.0),))
        assert epsilon(gaussian, accountant) > epsilon(bare, accountant)

    @pytest.mark.parametrize("accountant", ["rdp", "rdp-classic", "pld", "gdp", "zcdp", "strong"])
    def test_a_pure_release_costs_at_most_its_own_composition(self, accountant: str) -> None:
        bare = shuffled(6.0, 10)
        pure = replace(bare, releases=(PureRelease("selection", 0.5),))
        assert epsilon(bare, accountant) < epsilon(pure, accountant) <= epsilon(bare, accountant) + 0.5 + 1e-9

    def test_a_pure_release_alone_is_bounded_by_what_it_is(self) -> None:
        trace = Trace(100, releases=(PureRelease("selection", 1.0),), adjacency="zero_out")
        assert 1.0 - 1e-3 < epsilon(trace, "rdp") <= 1.0
        assert epsilon(trace, "gdp") >= 1.0 - 1e-3

    @pytest.mark.parametrize("accountant", [*GUARANTEES, "zcdp-sampled"])
    def test_nothing_costs_nothing(self, accountant: str) -> None:
        assert epsilon(Trace(100), accountant) == pytest.approx(0.0, abs=1e-9) or accountant == "rdp-classic"


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_nobody_accounts_for_batches_under_an_adjacency_of_others(adjacency: Adjacency) -> None:
    """Refused where the trace is made."""
    with pytest.raises(UnsupportedMechanism, match="shuffled" if adjacency == "add_remove" else "fixed"):
        shuffled(6.0, 10, adjacency=adjacency) if adjacency == "add_remove" else fixed(adjacency=adjacency)


@pytest.mark.parametrize(
    ("trace", "accountants", "group_size", "message"),
    [
        (poisson(), ["gdp", "zcdp"], 1, "use the accountant 'pld'"),
        (fixed(), ["gdp", "zcdp"], 1, "use the accountant 'pld'"),
        (poisson(), ["rdp", "rdp-classic", "strong", "zcdp-sampled"], 2, "'pld'"),
        (poisson(6.0, 0.011), ["zcdp-sampled"], 1, r"0\.01042"),
    ],
    ids=["poisson", "fixed", "groups", "high rate"],
)
def test_what_an_accountant_does_not_cover_is_refused(
    trace: Trace, accountants: list[str], group_size: int, message: str
) -> None:
    for accountant in accountants:
        with pytest.raises(UnsupportedMechanism, match=message):
            account(trace, DELTA, accountant, group_size)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("zcpd", DELTA, 1), "did you mean 'zcdp'"),
        *((("gdp", delta, 1), "delta") for delta in (0.0, 1.0, math.nan, -1e-5)),
        *((("gdp", DELTA, size), "group_size") for size in (0, -1, 1.5, math.nan)),
    ],
)
def test_impossible_questions_are_refused(asked: tuple[str, float, Any], message: str) -> None:
    accountant, delta, size = asked
    with pytest.raises(InvalidInput, match=message):
        account(shuffled(), delta, accountant, size)


class TestMeaning:
    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_no_noise_is_an_explicit_infinity(self, accountant: str) -> None:
        estimate = account(shuffled(0.0, 3), DELTA, accountant)
        assert not estimate.is_private
        assert estimate.as_dict()["epsilon"] is None

    def test_only_the_empirical_bound_is_an_estimate(self) -> None:
        kinds = {name: account(shuffled(), DELTA, name).kind for name in ("rdp", "gdp", "zcdp", "zcdp-sampled")}
        assert kinds == {"rdp": "guarantee", "gdp": "guarantee", "zcdp": "guarantee", "zcdp-sampled": "estimate"}

    def test_estimates_name_unit_and_adjacency(self) -> None:
        estimate = account(shuffled(10.0, 5), DELTA, "gdp", 4)
        assert (estimate.unit, estimate.adjacency, estimate.group_size) == ("group of 4", "zero_out", 4)

    def test_auto_names_the_method_it_chose(self) -> None:
        assert account(shuffled(), DELTA).accountant == "gdp"
        assert account(poisson(1.0, 0.01, 100), DELTA).accountant == "pld"


def test_noise_that_followed_results_is_no_guarantee() -> None:
    """The realised trace of a schedule that reacted depends on private results; one that did not react is its plan."""
    schedule = make_schedule("validation", 4.0, factor=0.5, period=1, threshold=0.01, window=1)
    planned, reacted = (
        planned_trace(schedule, PoissonSampling(0.1), 4, 10, 1000, validation_accuracies=history)
        for history in ((), (0.1, 0.9, 0.9, 0.9))
    )
    assert account(planned, 1e-5, "rdp").kind == "guarantee"
    assert account(reacted, 1e-5, "rdp").kind == "estimate"
    assert account(reacted, 1e-5, "rdp").epsilon < account(planned, 1e-5, "rdp").epsilon
