"""A few traces of every kind against the oracles of `tests.fuzz`, and the oracles against each other."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pytest
from dp_accounting import get_epsilon_gaussian

from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from tests.accounting import oracle
from tests.fuzz import closed_forms, judging, lattice
from tests.fuzz.__main__ import main
from tests.fuzz.cases import case_of, case_of_kind
from tests.fuzz.judging import Claim, Outcome, judged
from tests.fuzz.lattice import Bracket
from tests.fuzz.rounds import Members, full_members, rounds_of
from tests.fuzz.table import as_dict, histogram, rows_of, table
from tests.known import known

DELTA = 1e-5
MIXED = Trace(
    1000,
    (
        Segment(0, 40, PoissonSampling(0.05), 1.2, (SideQuery("counts", 4.0),)),
        Segment(40, 30, FixedBatchSampling(1000, 20), 2.0),
    ),
)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "only",
    [
        "poisson, example",
        "fixed, group",
        "correlated",
        "replace-one",
        "truncated",
        "users",
        "allocated",
        "allocated, each",
        "shuffled, rows",
    ],
)
def test_random_traces_are_not_understated(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The gate's share of `python -m tests.fuzz`: claims are not below the exact epsilon, and answered in time."""
    assert main(["--traces", "32", "--only", only, "--json"]) == 0, capsys.readouterr().err
    (row, *_) = json.loads(capsys.readouterr().out)
    assert row["claims"] > 0
    assert row["unsafe"]["gap"] <= 1e-8


def test_a_case_is_the_same_whatever_is_drawn_besides() -> None:
    assert case_of(3, 41) == case_of(3, 41)
    assert case_of(3, 41) != case_of(4, 41)


@pytest.mark.parametrize("size", [1, 3])
def test_the_lattice_agrees_with_dp_accounting(size: int) -> None:
    run = replace(
        MIXED, segments=(replace(MIXED.segments[0], steps=8), replace(MIXED.segments[1], start_step=8, steps=6))
    )
    found = known(lattice.bracket(rounds_of(run, full_members(size)), DELTA))
    peer = oracle.epsilon(run, DELTA, size, grid=1e-2)
    assert found.low * (1 - 1e-3) <= peer <= found.high * (1 + 1e-3)
    assert found.high <= found.low * (1 + 1e-3)


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_lattice_and_closed_form_of_a_gaussian(mu: float) -> None:
    exact = closed_forms.gaussian(mu, DELTA)
    assert exact == pytest.approx(get_epsilon_gaussian(1 / mu, DELTA), rel=1e-9)
    run = Trace(10, (Segment(0, 8, ShuffledSampling(4), math.sqrt(2) / mu),), adjacency="zero_out")
    found = known(lattice.bracket(rounds_of(run, full_members(1)), DELTA))
    assert found.low <= exact <= found.high <= exact * (1 + 1e-4)


@pytest.mark.parametrize(("rate", "shift", "delta"), [(0.01, 1.0, 1e-5), (0.5, 3.0, 1e-8), (0.9, 0.3, 1e-3)])
def test_lattice_and_closed_form_of_one_round(rate: float, shift: float, delta: float) -> None:
    exact = closed_forms.one_round(rate, shift, delta)
    found = known(
        lattice.bracket(
            rounds_of(Trace(10, (Segment(0, 1, PoissonSampling(rate), 1 / shift),)), full_members(1)), delta
        )
    )
    assert found.low <= exact <= found.high
    assert found.high <= found.low * (1 + 1e-2)
    assert exact <= closed_forms.renyi_bound([(rate, shift, 1)], (), delta)


def test_a_lattice_that_has_not_converged_says_nothing_below() -> None:
    """33 records at sample rate 4e-8 and sigma 0.55 in 5 million steps, delta 3e-24: a rare step in which three of them
    meet decides. A union bound over such steps puts delta at epsilon 14.957 below 2e-26; this lattice said 23.8."""
    case = case_of_kind("extreme", "group", 0, 351)
    assert case.delta == pytest.approx(2.87e-24, rel=1e-2)
    outcome = judged(case)
    assert all(claim.truth.low <= 14.957 for claim in outcome.claims)
    assert list(outcome.findings) == []


def test_a_lattice_that_folds_its_law_says_nothing_below() -> None:
    """Sample rate 0.011 and sigma 0.23 in 7.7 million steps, delta 5e-28: Chernoff's bound on epsilon is 393,788, and
    the saddle point gives 393,222; this lattice said that it is at least 394,473."""
    outcome = judged(case_of(20261129, 391))
    assert {claim.accountant for claim in outcome.claims} >= {"auto", "pld", "rdp"}
    assert all(claim.truth.low < 393_222 for claim in outcome.claims)
    assert list(outcome.findings) == []


def test_a_lattice_far_below_its_aim_says_nothing_too_low() -> None:
    """Sample rate 5.5e-9 and sigma 22 in 5 steps, delta 6.6e-27: the sum of 5 losses convolved under a tilt of 70 gives
    4.9318e-9; what lies outside its window counted as little, and this lattice said at most 4.2179e-9."""
    outcome = judged(case_of(20261129, 1063))
    assert all(claim.truth.low <= 4.9318e-9 <= claim.truth.high for claim in outcome.claims)
    assert list(outcome.findings) == []


def test_a_maximum_of_all_examples_cuts_nothing_on_either_side() -> None:
    """26 examples, at most 26 in a batch: the oracle once cut the batches of a neighbour with one example more."""
    outcome = judged(case_of_kind("truncated", "example", 0, 214))
    assert len(outcome.claims) > 2
    assert list(outcome.findings) == []


def test_a_lattice_above_what_is_proven_is_not_believed() -> None:
    case = case_of_kind("shuffled", "group", 0, 1034)
    outcome = judged(case)
    assert all(claim.truth.low <= claim.truth.high for claim in outcome.claims)
    assert list(outcome.findings) == []


def test_members_of_given_contributions_are_rounds_of_their_own() -> None:
    """A member that contributes nothing costs nothing in Poisson batches, and displaces a record in fixed ones."""
    idle = Members((0,), ((0.0,),))
    poisson, fixed = rounds_of(MIXED, idle).mixtures
    assert poisson[0].shifts[1] == pytest.approx(0.25)
    assert fixed[0].shifts == (0.0, 0.5)


def outcome(upper: float, kind: str = "guarantee", **fields: object) -> Outcome:
    case = case_of_kind("follows results", "example", 0, 5)
    assert case.trace.noise_follows_results
    claim = Claim("pld", upper, None, kind, Bracket(1.0, 1.001))
    return replace(Outcome(case, (claim,), 1.0, 1024), **fields)  # type: ignore[arg-type]


def test_each_defect_is_a_finding() -> None:
    """An epsilon below the exact one, a claim too strong, and one that takes too long or too much."""
    assert not list(outcome(1.0, "estimate").findings)
    assert "understated" in next(outcome(0.999, "estimate").findings)
    assert "called a guarantee" in next(outcome(1.1).findings)
    assert "12.0 s" in next(outcome(1.0, "estimate", seconds=12.0).findings)
    assert "2048 MiB" in next(outcome(1.0, "estimate", kibibytes=2 << 20).findings)
    assert "loose by" in next(outcome(1.2, "estimate").remarks)


def test_the_table_names_the_worst_case_of_each_kind() -> None:
    (row,) = rows_of([outcome(1.2, "estimate"), outcome(0.9, "estimate")])
    plain = as_dict(row)
    assert (plain["traces"], plain["claims"], plain["findings"]) == (2, 2, 1)
    assert plain["unsafe"]["gap"] == pytest.approx(1 / 0.9 - 1)
    assert plain["loose"]["gap"] == pytest.approx(1.2 / 1.001 - 1)
    assert f"{1 / 0.9 - 1:.1e}" in table([row])
    assert histogram([row]).startswith("looseness of 2 tight claims: 1 below 0.0001, ")
    assert histogram([row]).endswith(
        "1 below 0.2, 0 below 1, 0 below inf\n1 under-stated, 0 of 0 lower bounds too high"
    )


def test_a_crash_or_a_warning_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(case: object) -> list[object]:
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
        return []

    monkeypatch.setattr(judging, "_said", warns)
    (finding,) = judged(case_of(0, 0)).findings
    assert "raised RuntimeWarning: overflow" in finding


def test_an_unknown_kind_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "3", "--only", "nothing"]) == 2
    assert "no case has 'nothing'" in capsys.readouterr().err
    assert main(["--first", "8", "--traces", "8"]) == 2
    assert "no case from 8 up to 8" in capsys.readouterr().err
