"""Attacks, audits and correlations with loss, from a sweep file to its reports: where they are shown, and where not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.metrics import final_metrics, known_of_groups
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import TrialResult, read_exact_statistics, read_result
from dpsweep.orchestration.tracking.tracker import group_rows
from dpsweep.workers.evaluation.attack_results import (
    AttackResults,
    AuditResult,
    AuditTest,
    ExposureAttack,
    GroupAudit,
    MembershipAttack,
    read_attacks,
    write_attacks,
)
from dpsweep.workers.machine.stored_tensors import note_written
from dpsweep.workers.training.counters import read_counters
from tests.known import known
from tests.orchestration.planted_trials import finished_with
from tests.orchestration.public_values import is_public, words
from tests.orchestration.sample_grids import small, trial_in

EXAMPLES, CORRECT = 10_007, 7_324
CANARY = CORRECT / EXAMPLES
"""The share of right guesses that every stored attack is made to have: with all its digits nowhere by chance."""
SHOWN = "73.2"
TRAINING = 0.8257041736
"""The accuracy that every model is made to have on its training examples."""
EXPOSURE = 6.2918374651
"""The bits that every model is made to give away of its secrets."""
AUDITED, GROUP_AUDITED, RIGHT = 7.31, 6.17, 183
"""Lower bounds and right guesses that every stored audit is made to have; they are nowhere by chance."""


def with_canary(files: TrialFiles) -> None:
    attacks = read_attacks(files.attacks)
    scores = known(attacks.training_scores)
    assert len(attacks.loss_threshold) == len(scores.groups) == 10
    planted = tuple(replace(group, examples=EXAMPLES, correct=CORRECT) for group in attacks.loss_threshold)
    ratio = MembershipAttack("0", 10_000, CANARY, CANARY - 0.01, CANARY + 0.01, CANARY, CANARY)
    secrets = ExposureAttack(40, 1, 1024, EXPOSURE, EXPOSURE - 0.5, EXPOSURE + 0.5, 3)
    groups = tuple(replace(group, accuracy=TRAINING) for group in scores.groups)
    trained = replace(scores, accuracy=TRAINING, groups=groups)
    in_groups = tuple(GroupAudit(group.name, 20, 20, 18, GROUP_AUDITED) for group in scores.groups)
    tests = (AuditTest("steinke", 200, 200, RIGHT, AUDITED),)
    audit = AuditResult(1e-5, 0.95, GroupAudit("", 200, 200, RIGHT, AUDITED), in_groups, tests)
    write_attacks(files.attacks, AttackResults(planted, audit, (ratio,), secrets, trained))
    note_written(files)


def finished(folder: Path, release: str) -> SweepFiles:
    """A private trial and its baseline, trained, attacked, accounted and reported; their attacks hold the canary."""
    text = small(
        clipping=["none", {"name": "flat", "bound": 6.0}],
        noise="constant",
        seeds=0,
        attacks={"loss_threshold": True, "training_scores": True},
        release=release,
    )
    return finished_with(with_canary, text, folder)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("release", ["none", "private"])
def test_attacks_and_correlations_stay_private(tmp_path: Path, release: str) -> None:
    files = finished(tmp_path / "sweep", release)
    private = trial_in(files.root, "flat-seed0")
    exact = known(read_exact_statistics(private.private_summary, ""))
    correlations = [exact.loss_correlation, *(group.loss_correlation for group in exact.groups)]
    courses = read_counters(private.private_training).courses
    means = [repr(value) for course in courses for value in (course.norms[-1], course.losses[-1])]
    assert len(means) == 20, "of ten groups"
    secrets = [
        str(CANARY),
        str(TRAINING),
        str(EXPOSURE),
        f"{SHOWN} ±",
        *(repr(r) for r in correlations if r is not None),
        *means,
    ]
    assert len(secrets) > 10
    thresholds = [
        repr(group.threshold)
        for key in ("non-private-seed0", "flat-seed0")
        for group in read_attacks(trial_in(files.root, key).attacks).loss_threshold
    ]
    numbers = "|".join(re.escape(each) for each in (str(AUDITED), str(GROUP_AUDITED), f"{RIGHT} of"))
    audited = re.compile(rf"(?<![\d.])({numbers})(?!\d)")
    public = [path for path in tmp_path.rglob("*") if path.is_file() and is_public(path)]
    assert {Path(files.report), Path(files.results)} < set(public)
    for path in public:
        content = words(str(path)) if path.suffix == ".html" else path.read_bytes().decode(errors="ignore")
        assert not [secret for secret in (*secrets, *thresholds) if secret in content and secret != "-inf"], path
        assert not audited.search(content), path
    shown = words(files.private_report)
    assert shown.count(f"{SHOWN} ± 0.4%") == 20, "two settings of ten groups"
    assert "Who can be found in the model" not in words(files.report)
    assert "Who can be found with reference models" not in words(files.report)
    assert shown.count("points to test") == 22, "two settings, in all and of ten groups"
    assert "their training examples" not in words(files.report)
    assert shown.count("0.722 to 0.742, of 10000; loss alone 0.732, gradient alone 0.732") == 2
    assert "Which secrets can be extracted" not in words(files.report)
    assert shown.count("5.79 to 6.79") == 2
    assert "Who is at risk, by ε, attack and audit" in shown
    assert "Who is at risk" not in words(files.report)
    assert "What an audit proves" in shown
    assert str(AUDITED) in shown
    assert f"{RIGHT} of 200" in shown
    assert "contradicts the claim" in shown
    assert "Pearson’s r" in shown.replace("&#x27;", "’")
    record = render_again(files.root).record
    for point in record.points:
        trial = record.trial(point)
        assert not any("attack_success_rate" in row for row in group_rows([trial]))
        assert "privacy/loss_correlation" not in final_metrics(trial)
        assert "final/training_accuracy" not in final_metrics(trial)
        assert "privacy/exposure" not in final_metrics(trial)
        assert trial.audit is None
        assert not any("audited_epsilon" in row for row in group_rows([trial]))
        assert "audit/lower_bound" not in final_metrics(trial)
        assert {row["training_accuracy"] for row in group_rows([trial])} == {None}
        assert "fairness/clipping_bias_gap" not in final_metrics(trial)
        assert {row["gradient_norm"] for row in group_rows([trial])} == {None}
    owner = Path(files.private_report).read_text()
    for name in ("group-norm", "group-bias", "group-noise", "norms", "loss of flat · constant"):
        assert f'data-figure="{name}' in owner
        assert f'data-figure="{name}' not in Path(files.report).read_text()


@pytest.mark.long
def test_exact_results_are_disclosed_by_raw_alone(tmp_path: Path) -> None:
    files = finished(tmp_path / "sweep", "raw")
    assert words(files.report).count(f"{SHOWN} ± 0.4%") == 20
    assert str(CANARY) not in Path(files.results).read_text()
    assert str(AUDITED) in words(files.report)
    record = render_again(files.root).record
    for point in record.points:
        trial = record.trial(point)
        assert [row["attack_success_rate"] for row in group_rows([trial])] == [CANARY] * 10
        assert [row["training_accuracy"] for row in group_rows([trial])] == [TRAINING] * 10
        assert final_metrics(trial)["final/training_accuracy"] == TRAINING
        assert final_metrics(trial)["privacy/exposure"] == EXPOSURE
        assert final_metrics(trial)["audit/lower_bound"] == AUDITED
        assert final_metrics(trial)["audit/confidence"] == 0.95
        assert "audit/lower_bound_steinke" in final_metrics(trial)
        assert [row["audited_epsilon"] for row in group_rows([trial])] == [GROUP_AUDITED] * 10
        assert trial.tags["sensitive"] == "true"
    exact = known(read_exact_statistics(trial_in(files.root, "flat-seed0").private_summary, ""))
    assert final_metrics(record.trial(record.points[1]))["privacy/loss_correlation"] == exact.loss_correlation
    shown = record.trial(record.points[1])
    assert shown.quality is not None
    result = read_result(trial_in(files.root, "flat-seed0").result)
    assert isinstance(result, TrialResult)
    noise = result.training.history[-1].noise_multiplier * 6.0 * result.training.parameters**0.5
    for group, course in zip(shown.quality.groups, result.counters.courses, strict=True):
        size = result.training.train_size
        in_batch = result.spec.sampling.expected_size(size) * course.examples / size
        assert known_of_groups(shown)[group.name]["noise_error"] == pytest.approx(noise / in_batch, rel=1e-9)
        assert known_of_groups(shown)[group.name]["clipping_bias"] == course.biases[-1]
    assert final_metrics(shown)["fairness/noise_error_gap"] > 0.0
    assert 0.0 < known(exact.loss_correlation) < 1.0, "digits fitted badly have longer gradients"
