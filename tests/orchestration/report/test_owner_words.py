"""What the owner of an example is told is never less than what it paid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy import stats

from dpsweep.accounting.attacks import AttackRisk, CertifiedInterval
from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.accounting.jobs.release import OwnerReport
from dpsweep.accounting.mechanism.reasons import Claim
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.orchestration.report.owner import OwnAttack, owner_page, owner_sentences
from tests.orchestration.report.sample_settings import AUDIT


@pytest.mark.parametrize(
    ("epsilon", "shown", "odds"),
    [
        (math.log(2.701), "0.9937", "2.71"),  # 0.99362..., so the nearest would be 0.9936 and 2.70
        (1.00001, "1.0001", "2.72"),
        (0.0, "0.0000", "1.00"),
        (20.5, "20.5000", "more than 4.9e+08"),
    ],
)
def test_epsilon_and_odds_are_rounded_up(epsilon: float, shown: str, odds: str) -> None:
    report = OwnerReport(7, epsilon, 1e-5, "add_remove", "guarantee", "pld", epsilon)
    words = owner_sentences(report)
    assert f"epsilon {shown} at delta 1e-05" in words[0]
    assert f"e^epsilon = {odds} times" in words[1]
    assert f"<td>{shown}</td>" in owner_page(report, words)


def test_delta_is_added_and_is_not_how_often_the_factor_is_larger() -> None:
    """Of a Gaussian of mean 1 it is larger with five times the probability delta."""
    epsilon, delta = gaussian_epsilon(1.0, 1e-5)[0], 1e-5
    assert stats.norm.sf(epsilon - 0.5) > 5.0 * delta
    said = owner_sentences(OwnerReport(7, epsilon, delta, "add_remove", "guarantee", "pld", epsilon))[1]
    assert "plus 1e-05; and the other way round" in said
    assert "except" not in said


@pytest.mark.parametrize("kind", ["guarantee", "output_specific", "estimate"])
@pytest.mark.parametrize("of_risk", ["guarantee", "output_specific", "estimate"])
def test_no_attack_passes_the_bounds_only_if_they_are_no_estimates(kind: Claim, of_risk: Claim) -> None:
    attack, half = OwnAttack("the loss", "its loss was", 0.5, 10, 3), CertifiedInterval(None, 0.5)
    risk = AttackRisk("given example", 1, "add_remove", of_risk, half, (half, half, half))
    said = " ".join(owner_sentences(OwnerReport(7, 0.5, 1e-5, "add_remove", kind, "pld", 2.0), risk, [attack]))
    is_estimate = "estimate" in (kind, of_risk)
    assert ("none passes the bounds above" in said) != is_estimate
    assert ("the bounds above are estimates" in said) == is_estimate
    assert ("none passes the bounds above, given that" in said) == (kind == "output_specific" and not is_estimate)


def test_a_proven_bound_is_rounded_down_and_its_test_is_named() -> None:
    """The best of several audits errs with at most the sum of their errors."""

    def said(*bounds: float) -> str:
        audits = [replace(AUDIT, lower_bound=bound, lower_bounds={"ranks": 0.0, "f_dp": bound}) for bound in bounds]
        return " ".join(
            owner_sentences(OwnerReport(7, 0.5, 1e-5, "add_remove", "guarantee", "pld", 2.0), None, (), audits)
        )

    assert "at least 1.23 with confidence 95%" in said(1.239)
    assert "at least 1.23 with confidence 90%" in said(0.0, 1.239)
    assert f"f_dp assumes {ASSUMPTIONS['f_dp']}" in said(1.239)
    assert "contradicts the worst case" not in said(1.239)
    assert "contradicts the worst case" in said(1.239, 2.001)
    assert "proves no leak" in said(0.0)
