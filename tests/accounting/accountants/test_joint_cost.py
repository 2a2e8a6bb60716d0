"""Several runs together: against one long run, closed forms, Renyi by hand, and dp-accounting."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together, epsilon_of_examples_together
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.pld import epsilon_of_examples
from tests.known import known

DELTA = 1e-5


def poisson(sigma: float = 1.0, steps: int = 200, size: int = 1000) -> Trace:
    return Trace(size, (Segment(0, steps, PoissonSampling(0.05), sigma),))


def shuffled(steps: int, sigma: float = 8.0) -> Trace:
    return Trace(1000, (Segment(0, steps, ShuffledSampling(10), sigma),), adjacency="zero_out")


def test_one_run_costs_what_it_costs_alone() -> None:
    assert account_together([poisson()], DELTA).epsilon == pytest.approx(account(poisson(), DELTA).epsilon, rel=1e-3)


def truncated(steps: int = 2000) -> Trace:
    return Trace(60_000, (Segment(0, steps, TruncatedPoissonSampling(60_000, 64 / 60_000, 96), 1.0),))


def test_one_run_with_rare_cuts_costs_what_it_costs_alone() -> None:
    assert account_together([truncated()], 1e-6) == account(truncated(), 1e-6)
    assert account_together([truncated()], 1e-6).epsilon < 2.02


def test_runs_that_others_dominate_have_no_lower_bound() -> None:
    """Two runs of truncated batches cost at most what one run of all their steps costs."""
    together, whole = account_together([truncated(1000)] * 2, 1e-6), account(truncated(), 1e-6)
    assert together.epsilon >= whole.epsilon
    assert together.lower_epsilon is None
    filtered = replace(poisson(), filter=RenyiFilter(order=8, budget=0.01))
    assert account_together([filtered, filtered], DELTA).lower_epsilon is None
    assert account_together([filtered], DELTA).epsilon == known(filtered.filter).epsilon(DELTA, 0.0, ())


@pytest.mark.long
def test_different_runs_agree_with_dp_accounting() -> None:
    traces = [poisson(1.0), poisson(1.4, steps=100), poisson(1.0, size=500)]
    other = PLDAccountant()
    for trace in traces:
        segment = trace.segments[0]
        other.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(segment.noise_multiplier)), segment.steps)
    found = account_together(traces, DELTA)
    assert found.epsilon == pytest.approx(other.get_epsilon(DELTA), rel=2e-3)
    assert known(found.lower_epsilon) <= found.epsilon


def test_every_started_epoch_of_every_run_counts() -> None:
    """Two runs of half an epoch each are two epochs: joined end to end they would pass for one."""
    expected = get_epsilon_gaussian(8.0 / math.sqrt(2.0), DELTA)
    assert account_together([shuffled(5), shuffled(5)], DELTA).epsilon == pytest.approx(expected, rel=1e-6)
    assert account_together([shuffled(5), shuffled(5, 8.5)], DELTA).epsilon > account(shuffled(10), DELTA).epsilon


@pytest.mark.parametrize("delta", [1e-260, 1e-249])
def test_renyi_alone_where_pld_takes_no_such_delta(delta: float) -> None:
    selected = replace(poisson(), selection=RandomTrials(14.0))
    together = account_together([poisson(), poisson()], 1e-260)
    assert together.accountant == "rdp"
    assert together.epsilon == pytest.approx(account(poisson(steps=400), 1e-260, "rdp").epsilon, rel=1e-8)
    assert account(selected, delta).epsilon == account(selected, delta, "rdp").epsilon
    assert account_together([selected, poisson()], delta).accountant == "selection-rdp"


def test_releases_add_up() -> None:
    gaussian, pure = (
        Trace(1000, releases=(GaussianRelease("mean", 10.0),)),
        Trace(1000, releases=(PureRelease("q", 1.0),)),
    )
    assert account_together([gaussian] * 4, DELTA).epsilon == pytest.approx(get_epsilon_gaussian(5.0, DELTA), rel=1e-6)
    assert account_together([pure, gaussian, pure], DELTA).epsilon > 1.9


def test_adjacencies_are_never_mixed() -> None:
    assert account_together([poisson(), shuffled(10)], DELTA).adjacency == "zero_out"
    assert account_together([poisson(), poisson()], DELTA).adjacency == "add_remove"
    fixed = Trace(1000, (Segment(0, 10, FixedBatchSampling(1000, 50), 1.0),))
    with pytest.raises(UnsupportedMechanism, match=r"fixed batches and shuffled epochs share no adjacency"):
        account_together([fixed, shuffled(10)], DELTA)


def test_runs_that_differ_in_adjacency_alone_all_count() -> None:
    blanked = replace(poisson(), adjacency="zero_out")
    assert account_together([poisson(), blanked], DELTA) == account_together([blanked, blanked], DELTA)


def test_a_claim_is_that_of_its_weakest_run() -> None:
    assert account_together([poisson()] * 2, DELTA).kind == "guarantee"
    assert account_together([poisson(), replace(poisson(), noise_follows_results=True)], DELTA).kind == "estimate"
    infinite = account_together([poisson(), poisson(sigma=0.0)], DELTA)
    assert (infinite.is_private, infinite.kind) == (False, "none")
    with pytest.raises(InvalidInput, match="no runs"):
        account_together([], DELTA)


@pytest.mark.parametrize("size", [2, 5])
def test_groups_in_several_runs_cost_what_one_run_of_all_their_steps_costs(size: int) -> None:
    together = account_together([poisson(4.0)] * 2, DELTA, size)
    whole = account(poisson(4.0, 400), DELTA, "pld", size)
    assert (together.unit, together.group_size, together.accountant) == (f"group of {size}", size, "pld")
    assert together.epsilon == pytest.approx(whole.epsilon, rel=1e-3)
    assert account_together([poisson(4.0)] * 2, DELTA).epsilon < together.epsilon
    assert together.epsilon <= 2 * account(poisson(4.0), DELTA / 2, "pld", size).epsilon
    assert account_together([poisson()], DELTA, size) == account(poisson(), DELTA, group_size=size)


def test_groups_in_shuffled_runs_are_one_gaussian() -> None:
    """Two runs of one epoch at sigma 8: three records move it by 3 sqrt(2) / 8 standard deviations."""
    exact = get_epsilon_gaussian(8.0 / (3 * math.sqrt(2)), DELTA)
    assert account_together([shuffled(10), shuffled(10)], DELTA, 3).epsilon == pytest.approx(exact, rel=1e-6)


def test_groups_in_selections_pay_the_sum_of_their_epsilons() -> None:
    selected = replace(shuffled(10), selection=RandomTrials(3))
    found = account_together([selected, shuffled(10)], DELTA, 2)
    parts = account(selected, DELTA / 2, group_size=2).epsilon + account(shuffled(10), DELTA / 2, group_size=2).epsilon
    assert found.epsilon == pytest.approx(parts, rel=1e-6)
    assert found.group_size == 2


def test_groups_at_a_delta_that_no_accountant_covers_are_refused() -> None:
    with pytest.raises(UnsupportedMechanism, match=r"groups of 2 at a delta below 1e-250"):
        account_together([poisson()] * 2, 1e-280, 2)


MEMBERS = [[0.5, 1.0], [0.25, 0.125]]


def test_given_members_in_several_runs_cost_what_one_run_of_all_their_steps_costs() -> None:
    """Contributions differ from run to run; one that is 0 is that of a member which this run lacks."""
    first, second, long = poisson(4.0), replace(poisson(4.0, 100), contributions="output_specific"), poisson(4.0, 300)
    found = epsilon_of_examples_together([(first, [0, 50], MEMBERS), (second, [0], [[1.0], [0.0]])], DELTA)
    whole = epsilon_of_examples(long, [0, 50, 200], [[*MEMBERS[0], 1.0], [*MEMBERS[1], 0.0]], DELTA)
    assert found.epsilon == pytest.approx(whole.upper, rel=1e-3)
    assert (found.unit, found.accountant, found.adjacency) == ("group of 2", "pld", "add_remove")
    own = epsilon_of_examples(first, [0, 50], MEMBERS, DELTA / 2)
    other = epsilon_of_examples(second, [0], [[1.0], [0.0]], DELTA / 2)
    assert own.upper < found.epsilon <= own.upper + other.upper
    assert found.epsilon < account_together([first, second], DELTA, 2).epsilon


@pytest.mark.parametrize("size", [1, 3])
def test_members_that_contribute_most_cost_what_any_group_costs(size: int) -> None:
    runs = [poisson(4.0), poisson(4.0), poisson(2.0, 50, 700)]
    most = epsilon_of_examples_together([(run, [0], [[1.0]] * size) for run in runs], DELTA)
    assert most.epsilon == pytest.approx(account_together(runs, DELTA, size).epsilon, rel=1e-3)
    alone = epsilon_of_examples_together([(runs[0], [0], [[0.3]] * size)], DELTA)
    assert alone.epsilon == epsilon_of_examples(runs[0], [0], [[0.3]] * size, DELTA).upper


def test_what_is_said_of_given_members_is_that_of_the_weakest_run() -> None:
    def kind(*traces: Trace) -> str:
        return epsilon_of_examples_together([(trace, [0], [[0.5]]) for trace in traces], DELTA).kind

    exact, fixed = replace(poisson(), contributions="output_specific"), replace(poisson(), contributions="guarantee")
    assert kind(fixed, fixed) == "guarantee"
    assert kind(fixed, exact) == "output_specific"
    assert kind(exact, replace(poisson(), contributions="estimate")) == "estimate"
    assert kind(exact, replace(exact, ended_by_results=True)) == "estimate"
    assert kind(exact, poisson(sigma=0.0)) == "none"
    assert epsilon_of_examples_together([(fixed, [0], [[0.0]])], DELTA).epsilon == 0.0
    with pytest.raises(InvalidInput, match=r"members; give the same members"):
        epsilon_of_examples_together([(exact, [0], [[0.5]]), (exact, [0], [[0.5], [0.5]])], DELTA)
    with pytest.raises(InvalidInput, match="no runs"):
        epsilon_of_examples_together([], DELTA)
    with pytest.raises(UnsupportedMechanism, match="no epsilon of given examples"):
        epsilon_of_examples_together([(replace(exact, selection=RandomTrials(3)), [0], [[0.5]])], DELTA)
