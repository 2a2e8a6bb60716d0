"""Traces of private selections: every accountant counts the selection or refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting import pld
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.events import to_event
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.methods import total_rdp, total_rho
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.accountants.selection import account_selection, selection_rdp
from dpsweep.accounting.attacks import curve_of_examples, privacy_curve
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.numerics.renyi import epsilon_improved
from dpsweep.accounting.records.traces import read_trace, write_trace

DELTA = 1e-5


def poisson() -> Trace:
    return Trace(60_000, (Segment(0, 2000, PoissonSampling(0.01), 1.0),))


class TestTrace:
    """A trace that says it is the best of several: every accountant that cannot count that refuses it."""

    TRIALS = RandomTrials(14.0)

    def selected(self) -> Trace:
        return replace(poisson(), selection=self.TRIALS)

    @pytest.mark.parametrize("accountant", ["auto", "pld", "rdp"])
    def test_its_epsilon_is_that_after_the_selection(self, accountant: str) -> None:
        after = account_selection(poisson(), self.TRIALS, DELTA, accountant)
        assert account(self.selected(), DELTA, accountant) == after
        assert after.epsilon > account(poisson(), DELTA, accountant).epsilon

    def test_everything_else_refuses_it(self) -> None:
        trace = self.selected()
        for compute in (
            lambda: total_rdp(trace),
            lambda: total_rho(trace),
            lambda: pld.epsilon_pld(trace, DELTA),
            lambda: privacy_curve(trace),
            lambda: curve_of_examples(trace, [0], [[1.0]]),
            lambda: individual_epsilons([0], [[1.0]], trace, DELTA),
            lambda: individual_epsilons([0], [[1.0]], trace, DELTA, "pld"),
            lambda: algorithm_2([0], [[1.0]], trace, DELTA),
            lambda: to_event(trace),
            lambda: to_event(trace, 2),
        ):
            with pytest.raises(UnsupportedMechanism, match="best of a random number of runs"):
                compute()
        for name in set(ACCOUNTANTS) - {"auto", "pld", "rdp"}:
            with pytest.raises(InvalidInput, match="covers no selection"):
                account(trace, DELTA, name)
        with pytest.raises(InvalidInput, match="that of a selection already"):
            account_selection(trace, self.TRIALS, DELTA)

    def test_runs_without_a_proof_have_no_selection(self) -> None:
        with pytest.raises(UnsupportedMechanism, match="whose noise follows results"):
            replace(self.selected(), noise_follows_results=True)
        with pytest.raises(UnsupportedMechanism, match="under a filter"):
            replace(self.selected(), filter=RenyiFilter(1.0, 8))

    def test_it_is_stored(self, tmp_path: Path) -> None:
        write_trace(str(tmp_path / "trace.arrow"), self.selected())
        assert read_trace(str(tmp_path / "trace.arrow")) == self.selected()

    def test_several_cost_at_least_each_and_at_most_their_sum(self) -> None:
        trace, one = self.selected(), account(self.selected(), DELTA).epsilon
        assert account_together([trace], DELTA).epsilon == pytest.approx(one, rel=1e-6)
        pair = account_together([trace, trace], DELTA)
        half = account(trace, DELTA / 2).epsilon
        assert pair.accountant == "selection-sum", "each has its share of delta"
        assert one < 2 * half <= pair.epsilon <= 2 * half * (1 + 1e-6)
        assert pair.kind == "guarantee"
        beside = account_together([trace, poisson()], DELTA)
        assert beside.accountant == "selection-sum"
        assert beside.epsilon >= half + account(poisson(), DELTA / 2).epsilon * (1 - 1e-3)
        assert max(one, account_together([poisson()] * 2, DELTA).epsilon) < beside.epsilon < pair.epsilon
        by_renyi = epsilon_improved(selection_rdp(trace, self.TRIALS) * 20, DELTA)
        assert account_together([trace] * 20, DELTA).epsilon == pytest.approx(float(by_renyi))
