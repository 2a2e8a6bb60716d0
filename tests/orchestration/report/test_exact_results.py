"""The cells of tables of exact results on training examples, and their sections."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from plotly.graph_objects import Figure

from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.report.figures import Scene
from dpsweep.orchestration.report.plot import style_of
from dpsweep.orchestration.report.private_figures import risks
from dpsweep.orchestration.report.tables import (
    accounts_section,
    attacks_section,
    audits_section,
    by_group_table,
    estimates_table,
    losses_table,
    memberships_section,
    training_scores_section,
)
from dpsweep.orchestration.store.published import GroupEpsilon, PublishedAccount
from dpsweep.workers.evaluation.attack_results import MembershipAttack
from tests.orchestration.report.sample_settings import AUDIT, SETTINGS, STYLE, TRIALS, Cells, rows


def test_estimates_are_averaged_and_the_largest_error_is_the_largest() -> None:
    found = rows(estimates_table(SETTINGS, STYLE))
    assert list(found) == ["flat", "dpsgd_f"]
    assert list(found["flat"].values())[1:] == ["200", "0.9100", "0.0150", "0.0700"]
    assert list(found["dpsgd_f"].values())[1:] == ["100", "0.9000", "0.0100", "0.0500"]


def test_correlations_with_loss_are_averaged() -> None:
    found = rows(losses_table(SETTINGS, STYLE))
    assert {name: row["All"] for name, row in found.items()} == {"flat": "0.55", "dpsgd_f": "0.50"}


def test_attacks_show_rates_errors_over_seeds_and_examples() -> None:
    found = rows(attacks_section(SETTINGS, STYLE))
    assert found["flat"]["common"] == "60.0 ± 4.2%of 144"
    assert found["dpsgd_f"]["common"] == "55.0 ± 6.0%of 72"
    assert found["non-private"]["rare"] == "60.0 ± 11.0%of 20"


def test_scores_on_training_examples_stand_beside_those_on_test_examples() -> None:
    found = rows(training_scores_section(SETTINGS, STYLE, "classification"))
    assert list(found) == ["non-private", "flat", "dpsgd_f"]
    assert found["dpsgd_f"]["All"] == "62.0%+2.0 points to test"
    assert found["flat"]["rare"].endswith("+10.0 points to test")
    assert {row["common"].partition("%")[2][-20:] for row in found.values()} == {"+1.0 points to test"}


def test_scores_on_training_examples_are_those_of_the_task() -> None:
    names = {name for name in final_metrics(TRIALS[0]) if name.startswith("final/training_")}
    heads = Cells(by_group_table(Findings(SETTINGS, NO_EVIDENCE), STYLE)).heads
    assert names == {"final/training_accuracy"}
    assert [head for head in heads if head.startswith("Training")] == ["Training accuracy"]


def test_what_is_not_known_is_no_section() -> None:
    bare = [
        replace(each, individuals=None, attacks=(), quality=replace(each.quality, groups=(), on_training=None))
        for each in TRIALS
        if each.quality is not None
    ]
    settings = finished_settings(bare)
    style = style_of(settings)
    assert estimates_table(settings, style) == losses_table(settings, style) == attacks_section(settings, style) == ""
    assert training_scores_section(settings, style, "classification") == ""
    assert memberships_section(bare) == audits_section(bare) == accounts_section(bare) == ""
    assert "Who can be found in the model" in attacks_section(SETTINGS, STYLE)
    assert "their training examples" in training_scores_section(SETTINGS, STYLE, "classification")


def test_a_bound_above_what_its_canaries_pay_contradicts_a_higher_claim() -> None:
    trial = next(each for each in TRIALS if each.privacy is not None and each.privacy.is_private)
    claim = (trial.privacy.epsilon if trial.privacy else None) or math.nan

    def said(share: float) -> str:
        audit = replace(AUDIT, lower_bound=share * claim, of_canary=0.9 * claim)
        return audits_section([replace(trial, audits=(audit,))])

    assert "contradicts the claim" in said(0.95)
    assert "contradicts the claim" not in said(0.85)
    assert all(f"{name} assumes {assumption}" in said(0.85) for name, assumption in ASSUMPTIONS.items())


@pytest.mark.parametrize(("kind", "word"), [("estimate", "estimate"), ("output_specific", "output-specific")])
def test_means_of_examples_bear_their_kind_wherever_an_attack_stands_beside_them(kind: Kind, word: str) -> None:
    """None is a bound unless it is a guarantee."""
    trial = next(each for each in TRIALS if each.privacy is not None and each.individuals is not None)
    assert trial.individuals is not None
    assert trial.quality is not None
    names = [group.name for group in trial.quality.groups]
    means = tuple(GroupEpsilon(name, 0.5) for name in names)
    attacks = tuple(MembershipAttack(name, 100, 0.6, 0.5, 0.69, 0.55, 1.0) for name in names)
    shown = replace(trial, memberships=attacks, individuals=replace(trial.individuals, kind=kind, groups=means))
    assert f"mean εᵢ ({word}) allows" in memberships_section([shown])
    (drawn,) = risks(Scene(finished_settings([shown]), STYLE, names)).values()
    assert drawn is not None
    told = [trace.name for trace in Figure(drawn.plain()).data if "mean εᵢ" in trace.name]
    assert told == [f"mean εᵢ ({word})"]


@pytest.mark.parametrize("kind", ["guarantee", "estimate"])
def test_what_was_accounted_again_bears_the_kind_of_both_numbers(kind: Kind) -> None:
    account = PublishedAccount("a", 1e-6, "pld", 2.0, "dp-accounting-pld", kind, "output_specific", 1.0, 0.9)
    page = accounts_section([replace(TRIALS[0], accounts=(account,))])
    assert f"ε: {kind}; εᵢ: output-specific" in page


def test_bound_attacks_and_audits_are_in_one_picture() -> None:
    trial = next(each for each in TRIALS if each.privacy is not None and each.privacy.is_private)
    names = [group.name for group in trial.quality.groups] if trial.quality else []
    attacks = tuple(MembershipAttack(name, 100, 0.6, 0.5, 0.69, 0.55, 1.0) for name in names)
    shown = replace(trial, memberships=attacks, audits=(replace(AUDIT, groups={names[0]: 0.4}),))
    (drawn,) = risks(Scene(finished_settings([shown]), STYLE, names)).values()
    assert drawn is not None
    figure = Figure(drawn.plain())
    marks = {trace.name: trace for trace in figure.data}
    assert {*marks} >= {"attack by RMIA", "attack by loss", "attack by gradient norm", "proven by the audit"}
    assert marks["attack by RMIA"].x[0] == pytest.approx(-math.log(0.8), rel=1e-3)
    assert marks["attack by RMIA"].error_x.arrayminus[0] == pytest.approx(marks["attack by RMIA"].x[0])
    assert marks["proven by the audit"].x == (0.4,)
    assert [line.x0 for line in figure.layout.shapes] == [0.9, trial.privacy.epsilon if trial.privacy else 0.0]
    assert risks(Scene(finished_settings([trial]), STYLE, names)) == {}
