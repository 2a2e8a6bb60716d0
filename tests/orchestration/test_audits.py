"""An audit, from one line of a sweep file to its reports: where it is shown, and where not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.tracking.tracker import group_rows
from dpsweep.workers.evaluation.attack_results import read_attacks, write_attacks
from dpsweep.workers.machine.stored_tensors import note_written
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.planted_trials import finished_with
from tests.orchestration.public_values import is_public, words
from tests.orchestration.sample_grids import keys_of, small

CANARY, GROUP_CANARY, RIGHT = 7.31, 6.17, 183
"""Lower bounds and right guesses that the stored audit is made to have; they are nowhere by chance."""


def audited(**changes: object) -> str:
    return small(clipping={"name": "flat", "bound": 6.0}, noise="constant", seeds=0, audit={"canaries": 200}, **changes)


def with_canary(files: TrialFiles) -> None:
    stored = read_attacks(files.attacks)
    assert stored.audit is not None
    everyone = replace(stored.audit.everyone, epsilon=CANARY, guesses=200, correct=RIGHT)
    groups = tuple(replace(group, epsilon=GROUP_CANARY) for group in stored.audit.groups)
    write_attacks(files.attacks, replace(stored, audit=replace(stored.audit, everyone=everyone, groups=groups)))
    note_written(files)


def finished(folder: Path, release: str) -> SweepFiles:
    return finished_with(with_canary, audited(release=release), folder)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("release", ["none", "private"])
def test_audits_stay_private(tmp_path: Path, release: str) -> None:
    files = finished(tmp_path / "sweep", release)
    public = [path for path in tmp_path.rglob("*") if path.is_file() and is_public(path)]
    assert {Path(files.report), Path(files.results)} < set(public)
    for path in public:
        content = words(str(path)) if path.suffix == ".html" else path.read_bytes().decode(errors="ignore")
        secrets = (str(CANARY), str(GROUP_CANARY), f"{RIGHT} of")
        assert not [secret for secret in secrets if re.search(rf"(?<![\d.]){re.escape(secret)}(?!\d)", content)], path
    shown = words(files.private_report)
    assert "What an audit proves" in shown
    assert str(CANARY) in shown
    assert f"{RIGHT} of 200" in shown
    assert "contradicts the claim" in shown
    record = render_again(files.root).record
    trial = record.trial(record.points[0])
    assert trial.audit is None
    assert not any("audited_epsilon" in row for row in group_rows([trial]))
    assert "audit/lower_bound" not in final_metrics(trial)


def test_audits_are_disclosed_by_raw_alone(tmp_path: Path) -> None:
    files = finished(tmp_path / "sweep", "raw")
    assert str(CANARY) in words(files.report)
    record = render_again(files.root).record
    trial = record.trial(record.points[0])
    assert trial.tags["sensitive"] == "true"
    assert final_metrics(trial)["audit/lower_bound"] == CANARY
    assert final_metrics(trial)["audit/confidence"] == 0.95
    assert "audit/lower_bound_steinke" in final_metrics(trial)
    shown = [row["audited_epsilon"] for row in group_rows([trial])]
    assert set(shown) <= {GROUP_CANARY, None}
    assert GROUP_CANARY in shown


def test_a_sweep_without_audit_is_planned_as_before_and_the_claim_is_the_same_with_one() -> None:
    plain = small(clipping={"name": "flat", "bound": 6.0}, noise="constant", seeds=0)
    with_audit, without = (plan_sweep(parse_sweep(text)).trials[0] for text in (audited(), plain))
    assert with_audit.trace == without.trace
    assert with_audit.worst_case == without.worst_case
    assert without.spec.audit is None


def test_maxima_and_adjacencies_are_planned(tmp_path: Path) -> None:
    """A sweep that caps its batches: labels, calibration, training and its stored trace agree."""
    sampling = [
        {"method": "poisson", "batch_size": 128},
        {"method": "poisson", "batch_size": 128, "max_batch_size": 160},
    ]
    text = small(clipping="flat", noise="constant", seeds=0, epochs=1, sampling=sampling)
    plain, capped = plan_sweep(parse_sweep(text)).trials
    assert capped.key == keys_of(text)["flat-poisson128max160-seed0"]
    assert capped.point.labels["sampling"] == "poisson128max160"
    assert capped.worst_case.epsilon <= 5.0
    assert capped.spec.noise.initial_noise_multiplier > plain.spec.noise.initial_noise_multiplier
    run_trial(capped.spec, str(tmp_path))
    assert read_trace(TrialFiles(str(tmp_path)).trace).segments == capped.trace.segments
    replaced = small(
        clipping="flat", noise="constant", seeds=0, sampling={"method": "shuffle", "batch_size": 128},
        privacy={"target_epsilon": 5, "delta": 1e-5, "adjacency": "replace_one"},
    )  # fmt: skip
    (trial,) = plan_sweep(parse_sweep(replaced)).trials
    assert trial.worst_case.adjacency == trial.trace.adjacency == "replace_one"
    (refused,) = plan_sweep(parse_sweep(replaced.replace("shuffle", "poisson"))).refusals
    assert "Poisson batches (PoissonSampling) have no accounting under 'replace_one'" in refused.reason
