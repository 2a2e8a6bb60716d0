"""`dpsweep owner-report`: one example's cost, nothing of anybody else, and one line for whatever it cannot tell."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting import attack_risk, curve_of_examples, privacy_curve, read_trace
from dpsweep.accounting.audits import ASSUMPTIONS
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.records.epsilon_files import Epsilons, read_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.owner_report import read_owner_report
from dpsweep.orchestration.comparison.formats import at_most_share
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.store.later_results import AuditRecord, write_audit
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.evaluation.attack_results import read_membership
from dpsweep.workers.evaluation.outcomes import Outcomes, read_outcomes
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.processes import Command
from tests.orchestration.sample_grids import small


def finished(folder: Path, **changes: object) -> TrialFiles:
    """A trial, trained and accounted for."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    sweep = parse_sweep(small(**{"privacy": privacy, "clipping": "flat", "noise": "constant", "seeds": 0, **changes}))
    planned, files = plan_sweep(sweep).trials[0], TrialFiles(str(folder))
    run_trial(planned.spec, files.root)
    complete_trial(planned, files, sweep, Times(0.0, 1.0))
    return files


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> TrialFiles:
    return finished(tmp_path_factory.mktemp("trial"))


@pytest.fixture(scope="module")
def epsilons(trial: TrialFiles) -> Epsilons:
    return read_epsilons(trial.epsilons)


def test_it_tells_epsilon_kind_delta_adjacency_and_what_they_mean(
    trial: TrialFiles, epsilons: Epsilons, command: Command
) -> None:
    owned = int(epsilons.example_ids[5])
    code, out, err = command("owner-report", trial.root, "--example-id", owned, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["epsilon"] == min(epsilons.upper[5], told["worst_case_epsilon"])
    assert (told["example_id"], told["delta"], told["kind"]) == (owned, 1e-5, "estimate")
    assert (told["adjacency"], told["reasons"]) == ("add_remove", ["known_seed", "norms_estimated"])
    assert "left out of the training data" in " ".join(told["meaning"])
    assert "known seed" in command("owner-report", trial.root, "--example-id", owned)[1]


def test_it_tells_what_no_attack_on_the_example_exceeds(
    trial: TrialFiles, epsilons: Epsilons, command: Command
) -> None:
    owned, norms = int(epsilons.example_ids[5]), NormShards(trial.norms)
    part = next(part for part in map(norms.read, norms.parts) if owned in part.example_ids)
    own = part.contributions[part.example_ids == owned]
    trace = read_trace(trial.trace)
    expected = attack_risk(curve_of_examples(trace, norms.steps, own))
    told = json.loads(command("owner-report", trial.root, "--example-id", owned, "--json")[1])
    assert told["risk"] == json.loads(json.dumps(weakened(expected, ("known_seed",)).as_dict()))
    assert told["risk"]["advantage"] <= attack_risk(privacy_curve(trace)).advantage.upper * (1 + 1e-3)
    assert told["risk"]["kind"] == "estimate"
    assert at_most_share(expected.advantage.upper) in command("owner-report", trial.root, "--example-id", owned)[1]


def test_without_norms_it_tells_no_attack(
    trial: TrialFiles, epsilons: Epsilons, command: Command, tmp_path: Path
) -> None:
    copy = tmp_path / "without"
    shutil.copytree(trial.root, copy)
    shutil.rmtree(TrialFiles(str(copy)).norms)
    code, out, _ = command("owner-report", copy, "--example-id", int(epsilons.example_ids[5]), "--json")
    assert (code, json.loads(out)["risk"]) == (0, None)


def test_the_page_stands_alone_is_small_and_depends_on_nobody_else(
    trial: TrialFiles, epsilons: Epsilons, command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "owner.html"
    file.write_text("an older file that everybody could read")
    os.chmod(file, 0o644)
    os.chmod(tmp_path, 0o755)
    assert command("owner-report", trial.root, "--example-id", int(epsilons.example_ids[5]), "--html", file)[0] == 0
    page = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert len(page) < 4000
    assert not any(word in page for word in ("http", "<script", "older file"))
    others = {f"{value:.4f}" for value in epsilons.upper} - {f"{epsilons.upper[5]:.4f}"}
    shown = {word.strip(".;,") for word in page.replace("<", " ").replace(">", " ").split()}
    worst = read_owner_report(trial, int(epsilons.example_ids[5]))[0].worst_case_epsilon
    assert not (others - {f"{worst:.4f}"}) & shown


def test_what_it_cannot_tell_is_one_line(trial: TrialFiles, command: Command, tmp_path: Path) -> None:
    without = tmp_path / "without"
    shutil.copytree(trial.root, without)
    shutil.rmtree(without / "private" / "epsilons")
    baseline = finished(tmp_path / "baseline", clipping="none", privacy={"noise_multiplier": 0.0, "delta": 1e-5})
    largest = int(read_epsilons(trial.epsilons).example_ids.max())
    absent = f"example 1000000000 is not in the training data of this trial, whose largest id is {largest}; give the"
    for root, example, complaint in (
        (trial.root, 10**9, absent),
        (tmp_path / "nothing", 0, "holds no finished trial"),
        (without, 0, "holds no epsilons of single examples"),
        (baseline.root, 0, "was trained without noise"),
    ):
        code, out, err = command("owner-report", root, "--example-id", example)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert complaint in err
    code, out, err = command(
        "owner-report", trial.root, "--example-id", int(read_epsilons(trial.epsilons).example_ids[0]), "--html", "/no/x"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "/no/x cannot be written" in err


def test_it_tells_what_an_attack_by_the_loss_sees_and_what_an_audit_proves(
    trial: TrialFiles, epsilons: Epsilons, command: Command, tmp_path: Path
) -> None:
    copy = TrialFiles(str(shutil.copytree(trial.root, tmp_path / "out" / "trials" / "key")))
    bounds = {"steinke": 1.5, "ranks": 3.217}
    audit = AuditRecord("key", 2000, "gradient", "iterates", 0.95, 0, 1e-5, 5.0, 5.0, 3.217, bounds, {}, 0, 0, 1.0)
    write_audit(SweepFiles(str(tmp_path / "out")), audit)
    write_audit(SweepFiles(str(tmp_path / "out")), replace(audit, kind="rows", lower_bound=4.321))
    example = int(epsilons.example_ids[3])
    code, out, _ = command("owner-report", copy.root, "--example-id", example, "--json")
    assert code == 0
    found, tested = json.loads(out), read_outcomes(trial.outcomes)
    assert isinstance(tested, Outcomes)
    losses = tested.log_losses[tested.groups == epsilons.groups[3]]
    (by_loss,) = found["attacks"]
    assert (by_loss["by"], by_loss["others"]) == ("the loss", len(losses))
    assert by_loss["alike"] == (losses <= epsilons.losses[3]).sum()
    assert [each["kind"] for each in found["audits"]] == ["gradient"], "an audit of rows would tell of others"
    said = " ".join(found["meaning"])
    assert "An attack of today" in said
    assert "at least 3.21 with confidence 95%" in said
    assert f"ranks assumes {ASSUMPTIONS['ranks']}" in said
    assert "contradicts" not in said
    assert "4.32" not in said


def test_of_a_trial_that_reference_models_attacked_it_tells_their_attack_and_the_gradients(
    trial: TrialFiles, epsilons: Epsilons, command: Command, tmp_path: Path
) -> None:
    attacked = finished(tmp_path / "attacked", attacks={"rmia": {"reference_models": 2}}, epochs=1)
    scores, example = known(read_membership(attacked.membership)), int(epsilons.example_ids[5])
    own = int(np.flatnonzero(scores.is_member & (scores.example_ids == example))[0])
    others = ~scores.is_member & (scores.groups == scores.groups[own])
    assert (scores.is_member.sum(), others.sum()) == (len(epsilons.example_ids), (scores.groups[others] >= 0).sum())
    found = json.loads(command("owner-report", attacked.root, "--example-id", example, "--json")[1])
    by_loss, by_ratio, by_gradient = found["attacks"]
    assert by_ratio["by"] == "reference models (RMIA)"
    assert by_ratio["others"] == by_loss["others"] == by_gradient["others"] == others.sum()
    assert by_ratio["alike"] == (scores.log_ratios[others] >= scores.log_ratios[own]).sum()
    assert by_gradient["alike"] == (scores.gradient_norms[others] <= scores.gradient_norms[own]).sum()
    said = " ".join(found["meaning"])
    assert said.count("An attack of today") == 3
    assert said.count("the bounds above are estimates") == 1
    Path(attacked.membership).write_bytes(b"no table")
    code, out, err = command("owner-report", attacked.root, "--example-id", example)
    assert (code, out) == (1, "")
    assert "membership.ipc is damaged" in err
