"""What the owner of an example is told is never less than what it paid."""

from __future__ import annotations

import math

import pytest

from dpsweep.accounting.jobs.release import OwnerReport
from dpsweep.orchestration.report.owner import owner_page, owner_sentences


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
    assert f"e^epsilon = {odds}," in words[1]
    assert f"<td>{shown}</td>" in owner_page(report, words)
