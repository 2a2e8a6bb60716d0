"""A trace that contradicts itself is refused where it is made, and what follows results is never a guarantee."""

# mypy: disable-error-code="arg-type, call-arg"
# Wrong types are given on purpose.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DataCorruption, InvalidInput, UnsupportedMechanism
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.pld import delta_pld, epsilon_pld
from dpsweep.accounting.pld.groups import epsilon_of_examples, group_epsilons
from dpsweep.accounting.records.shards import NormSnapshot
from dpsweep.accounting.records.traces import read_trace, write_trace

POISSON = PoissonSampling(0.1)
STEPS = Segment(0, 10, POISSON, 1.0)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Trace(100, (Segment(0, 10, FixedBatchSampling(10**9, 50), 1.0),)), "1,000,000,000 examples.*100"),
        (lambda: Trace(100, (replace(STEPS, sampling=ShuffledSampling(101)),), adjacency="zero_out"), "101.*100"),
        (lambda: Trace(100, (STEPS,), adjacency="foo"), "adjacency is 'foo'.*'add_remove', 'zero_out'"),
        (lambda: Trace(100, (STEPS,), contributions="certain"), "contributions is 'certain'.*'guarantee'"),
        (lambda: Trace(100, (STEPS,), noise_follows_results="no"), "noise_follows_results is 'no'"),
        (lambda: Trace(100, (STEPS,), ended_by_results=1), "ended_by_results is 1"),
        (lambda: Trace(100, unit="user"), "unit is 'user', but must be Example or User"),
        (lambda: Trace(100, filter=1.0), "filter is 1.0, but must be RenyiFilter, GaussianFilter or None"),
        (lambda: Trace(100, selection=14), "selection is 14, but must be RandomTrials, ExponentialChoice or None"),
        (lambda: Trace(99.5), "99.5.*whole"),
        (lambda: Trace(True), "dataset_size of a trace is True"),
        (lambda: Trace(100, STEPS), "segments is Segment.*sequence of Segment"),
        (lambda: Trace(100, (POISSON,)), "segments has PoissonSampling"),
        (lambda: Trace(100, releases=(SideQuery("x", 1.0),)), "releases has SideQuery"),
        (lambda: Trace(100, (replace(STEPS, start_step=5),)), "starts at step 5"),
        (lambda: Trace(100, (STEPS, replace(STEPS, start_step=9))), "stops at 10"),
        (lambda: Trace(100, (STEPS, replace(STEPS, start_step=11))), "stops at 10"),
        (lambda: Trace(100, (STEPS,)).until(2.5), "step is 2.5.*whole"),
        (lambda: Trace(100, (STEPS,)).until(-1), "step is -1.*at least 0"),
        (lambda: FixedBatchSampling(100, 9.5), "batch_size is 9.5.*whole"),
        (lambda: FixedBatchSampling(100, 101), "batch_size is 101"),
        (lambda: ShuffledSampling(1.5), "steps_per_epoch is 1.5.*whole"),
        (lambda: PoissonSampling(True), "sample_rate is True"),
        (lambda: PoissonSampling(np.True_), "sample_rate is"),
        (lambda: PoissonSampling(float("nan")), "sample_rate is nan"),
        (lambda: Segment(0, 2.5, POISSON, 1.0), "steps of a segment is 2.5.*whole"),
        (lambda: Segment(0.5, 2, POISSON, 1.0), "start_step of a segment is 0.5.*whole"),
        (lambda: Segment(0, 2**60, POISSON, 1.0), "steps of a segment.*at most"),
        (lambda: Segment(0, 2, 0.1, 1.0), "sampling of a segment is 0.1"),
        (lambda: Segment(0, 2, POISSON, [1.0]), r"noise_multiplier is \[1.0\]"),
        (lambda: Segment(0, 2, POISSON, 1.0, (GaussianRelease("x", 1.0),)), "side_queries has GaussianRelease"),
        (lambda: SideQuery("counts", 0.0), "side query 'counts' is 0.0"),
        (lambda: SideQuery(3, 1.0), "name of a side query is 3"),
        (lambda: PureRelease("choice", 1e300), "release 'choice' is 1e.300.*at most"),
        (lambda: NormSnapshot(1.7, *[np.arange(2)] * 3, np.zeros(2), np.zeros(2)), "norm snapshot is 1.7.*whole"),
    ],
)
def test_contradictions_are_refused_where_they_are_made(made: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made()


def test_nothing_is_known_about_some_samplings_under_some_adjacencies() -> None:
    with pytest.raises(UnsupportedMechanism, match=r"shuffled epochs.*'zero_out'"):
        Trace(100, (replace(STEPS, sampling=ShuffledSampling(10)),))
    with pytest.raises(UnsupportedMechanism, match=r"fixed batches.*'add_remove'"):
        Trace(100, (replace(STEPS, sampling=FixedBatchSampling(100, 10)),), adjacency="zero_out")


def test_numbers_of_numpy_are_held_as_those_of_python(tmp_path: Any) -> None:
    given = Trace(
        np.int32(100),
        [Segment(np.int64(0), 3.0, FixedBatchSampling(np.int64(100), 5.0), np.float32(1.5), [SideQuery("q", 2)])],
        [PureRelease("p", np.float32(0.5))],
    )
    plain = Trace(
        100, (Segment(0, 3, FixedBatchSampling(100, 5), 1.5, (SideQuery("q", 2.0),)),), (PureRelease("p", 0.5),)
    )
    assert given == plain
    assert repr(given) == repr(plain)
    write_trace(f"{tmp_path}/trace.arrow", given)
    assert repr(read_trace(f"{tmp_path}/trace.arrow")) == repr(plain)


def test_a_stored_contradiction_is_refused_when_it_is_read(tmp_path: Any) -> None:
    path = f"{tmp_path}/trace.arrow"
    sound = Trace(100, (replace(STEPS, sampling=FixedBatchSampling(100, 10)),))
    contradictory = replace(sound)
    object.__setattr__(contradictory, "dataset_size", 50)
    write_trace(path, contradictory)
    with pytest.raises(DataCorruption, match=r"100 examples.*50"):
        read_trace(path)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([0, 1.7], "snapshot step is 1.7.*whole"),
        ([0, 10], "step 10, but the trace has 10 steps"),
        ([0, 10**9], "step 1000000000"),
        ([0, float("nan")], "nan"),
        ([0, 0], "start at 0 and increase"),
        ([1, 2], "start at 0 and increase"),
        (["0", "1"], "steps"),
        ([True, False], "steps"),
    ],
)
def test_snapshots_belong_to_the_run(steps: Any, words: str) -> None:
    trace = Trace(100, (STEPS,))
    for claim in (
        lambda: individual_epsilons(steps, np.ones((1, 2)), trace, 1e-5),
        lambda: epsilon_of_examples(trace, steps, np.ones((1, 2)), 1e-5),
    ):
        with pytest.raises(InvalidInput, match=words):
            claim()


@pytest.mark.parametrize(
    ("contributions", "follows", "of_all", "of_each"),
    [
        ("guarantee", False, "guarantee", "guarantee"),
        ("guarantee", True, "estimate", "estimate"),
        ("output_specific", False, "guarantee", "output_specific"),
        ("output_specific", True, "estimate", "estimate"),
        ("estimate", False, "guarantee", "estimate"),
        ("estimate", True, "estimate", "estimate"),
    ],
)
def test_no_kind_is_stronger_than_its_proof(contributions: Any, follows: bool, of_all: str, of_each: str) -> None:
    trace = Trace(100, (STEPS,), contributions=contributions, noise_follows_results=follows)
    assert account(trace, 1e-5).kind == of_all
    assert epsilon_pld(trace, 1e-5).kind == of_all
    assert delta_pld(trace, 1.0).kind == of_all
    assert group_epsilons(trace, 1e-5, [2])[0].kind == of_all
    for method in ("rdp", "pld"):
        assert individual_epsilons([0], [[0.5]], trace, 1e-5, method).kind == of_each
    assert epsilon_of_examples(trace, [0], [[0.5]], 1e-5).kind == of_each


@pytest.mark.parametrize("steps", [7, 40, 10**15])
def test_epochs_of_any_number_are_counted_at_once(steps: int) -> None:
    """Two noise levels that meet in the middle of an epoch, which counts once at the lower one, by hand."""
    segments = (Segment(0, steps, ShuffledSampling(10), 2.0), Segment(steps, 25, ShuffledSampling(10), 1.0))
    trace = Trace(100, segments, adjacency="zero_out")
    low = -(-((steps % 10) + 25) // 10)  # epochs that the second level reaches
    rho = 0.5 * (steps // 10) / 4.0 + 0.5 * low
    expected = rho + 2.0 * (rho * np.log(1e5)) ** 0.5
    assert account(trace, 1e-5, "zcdp").epsilon == pytest.approx(expected, rel=1e-12)
    alone = individual_epsilons([0], [[1.0]], trace, 1e-5, "rdp").upper[0]
    assert alone == pytest.approx(account(trace, 1e-5, "rdp").epsilon, rel=1e-9)


def test_one_step_without_noise_makes_a_run_non_private_and_no_step_leaves_it_private() -> None:
    noisy, silent = Segment(0, 4, PoissonSampling(0.1), 1.0), Segment(4, 1, PoissonSampling(0.1), 0.0)
    assert not Trace(100, (noisy, silent)).is_private
    assert Trace(100, (noisy, silent)).until(4).is_private
    assert Trace(100).is_private
