"""Bounds on attacks in the one table of metrics: worst case and groups."""

from __future__ import annotations

from dpsweep.orchestration.comparison.metrics import final_metrics, known
from tests.orchestration.report.pages import rendered
from tests.orchestration.sample_sweeps import sample_sweep


def test_worst_case_and_groups_are_metrics() -> None:
    trial = next(trial for trial in sample_sweep().trials if trial.privacy and trial.privacy.risks)
    assert trial.privacy is not None
    risks, shown = trial.privacy.risks, final_metrics(trial)
    assert known(trial)["advantage"] == shown["privacy/advantage"] == risks[1].advantage.upper
    assert known(trial)["tpr_at_fpr_1pct"] == shown["privacy/tpr_at_fpr_1pct"] == risks[1].true_positive_rates[1].upper
    assert shown["privacy/advantage_group_of_4"] == risks[4].advantage.upper > risks[1].advantage.upper
    assert shown["privacy/tpr_at_fpr_1pct_group_of_8"] == risks[8].true_positive_rates[1].upper


def test_the_report_shows_them_rounded_up() -> None:
    page = rendered("raw")
    assert "Advantage at most" in page
    assert "TPR at 1% FPR at most" in page
    assert "<small>advantage " in page
