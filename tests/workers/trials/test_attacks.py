"""Membership inference on cases whose answer is known."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.sealed import write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Source, load_dataset, make_split
from dpsweep.workers.data.base import cut
from dpsweep.workers.evaluation.attack_results import AttackResults, GroupAttack, read_attacks, write_attacks
from dpsweep.workers.evaluation.predictions import evaluate, predict
from dpsweep.workers.machine.stored_tensors import noted_when_written
from dpsweep.workers.models import build_model
from dpsweep.workers.spec import (
    AttackSpec,
    Component,
    DataSpec,
    NoiseSpec,
    NormSpec,
    SamplingSpec,
    TrialSpec,
)
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.membership import attack, attack_losses, best_threshold
from dpsweep.workers.trials.trial import run_trial
from tests.known import known as present
from tests.workers.devices import DEVICE
from tests.workers.resumption import stored_bytes
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import allowed


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_separable_losses_are_told_apart() -> None:
    found = attack_losses(np.linspace(0.0, 1.0, 100), np.linspace(1.5, 3.0, 80), "group", generator())
    assert found.success_rate == 1.0
    assert found.examples == 80
    assert found.correct == 80
    assert 0.0 < found.standard_error < 0.02


def test_equal_distributions_are_not() -> None:
    draw = generator()
    found = attack_losses(draw.exponential(size=20_000), draw.exponential(size=20_000), "group", draw)
    assert abs(found.success_rate - 0.5) < 4.0 * found.standard_error + 0.005


def test_known_overlap_has_the_bayes_rate() -> None:
    draw = generator()
    found = attack_losses(draw.normal(0.0, 1.0, 20_000), draw.normal(1.0, 1.0, 20_000), "group", draw)
    bayes = 0.6914624612740131  # Phi(1 / 2)
    assert abs(found.success_rate - bayes) < 4.0 * found.standard_error
    assert found.threshold == pytest.approx(0.5, abs=0.3)


def test_threshold_maximises_right_calls_even_with_ties() -> None:
    members, others = np.array([1.0, 1.0, 2.0, 5.0]), np.array([1.0, 3.0, 4.0, 5.0])
    threshold = best_threshold(members, others)
    candidates = [-math.inf, *np.unique(np.concatenate([members, others]))]
    right = [int((members <= value).sum() + (others > value).sum()) for value in candidates]
    assert int((members <= threshold).sum() + (others > threshold).sum()) == max(right)
    assert best_threshold(others + 10.0, members) == -math.inf


def test_few_examples_all_guessed_right_are_not_certain() -> None:
    found = attack_losses(np.zeros(2), np.ones(2), "group", generator())
    assert (found.examples, found.correct) == (2, 2)
    assert found.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 2))


def test_the_standard_error_is_the_deviation_of_the_rate_over_repetitions() -> None:
    draw = generator()
    found = [attack_losses(draw.normal(0.0, 1.0, 400), draw.normal(1.0, 1.0, 400), "group", draw) for _ in range(400)]
    deviation = np.std([result.success_rate for result in found], ddof=1)
    assert np.mean([result.standard_error for result in found]) == pytest.approx(deviation, rel=0.15)


@pytest.mark.parametrize("lost", [math.inf, math.nan])
def test_losses_that_are_not_finite_are_told_from_finite_ones(lost: float) -> None:
    """A threshold halfway to infinity would call everybody a member."""
    found = attack_losses(np.ones(40), np.full(40, lost), "group", generator())
    assert (found.threshold, found.success_rate) == (1.0, 1.0)
    assert attack_losses(np.full(40, lost), np.full(40, lost), "group", generator()).success_rate == 0.5


def test_groups_are_attacked_apart() -> None:
    """Members of group a have the logit of their class, non-members the opposite; group b has no difference."""
    group = np.arange(400) % 2
    labels = (np.arange(400) // 2) % 2
    right = np.where(labels == 1, 5.0, -5.0)
    train_rows = np.where(group == 0, right, 0.0).astype(np.float32)[:, None]
    test_rows = np.where(group == 0, -right, 0.0).astype(np.float32)[:, None]
    source = Source(
        "leak",
        make_split(train_rows, labels, group),
        make_split(test_rows, labels, group, first_id=400),
        ("a", "b", "absent"),
        ("no", "yes"),
    )
    dataset = cut(source, DataSpec("leak"))
    found = attack(nn.Identity(), dataset, build_loss(Component("binary_logistic")), seed=0)
    assert [result.name for result in found] == ["a", "b"]
    assert [result.success_rate for result in found] == [1.0, 0.5]
    assert found[1].threshold == -math.inf
    assert found == attack(nn.Identity(), dataset, build_loss(Component("binary_logistic")), seed=0)


def attacked(root: Path, **changes: Any) -> tuple[TrialSpec, TrialFiles]:
    spec = small_trial(attacks=AttackSpec(loss_threshold=True, training_scores=True), **changes)
    run_trial(spec, str(root), code=allowed(__file__))
    return spec, TrialFiles(str(root))


def test_a_trial_attacks_the_model_that_it_stores(tmp_path: Path) -> None:
    """The stored result is that of an attack on the stored model, here of averaged parameters."""
    spec, files = attacked(tmp_path, averaging=Component("ema"))
    dataset = load_dataset(spec.data)
    model = build_model(spec.model, dataset, seed=1).to(DEVICE)
    model.load_state_dict(torch.load(files.model, weights_only=True))
    expected = attack(model, dataset, build_loss(spec.loss), spec.seed)
    scores = evaluate(model, dataset.train, dataset, build_loss(spec.loss), min_group_size=1)
    right = (
        predict(model, dataset.train, dataset, build_loss(spec.loss)).classes == dataset.train.labels.numpy()
    ).mean()
    assert scores.accuracy == pytest.approx(right, abs=1e-12)
    assert read_attacks(files.attacks) == AttackResults(loss_threshold=expected, training_scores=scores)
    assert [group.name for group in expected] == list(dataset.group_names)
    assert stat.S_IMODE(os.stat(files.attacks).st_mode) == 0o600


def test_an_attack_changes_nothing_else(tmp_path: Path) -> None:
    """All files but the spec and the attack are those of the trial without the attack."""
    attacked(tmp_path / "attacked")
    run_trial(small_trial(), str(tmp_path / "plain"))
    with_attack, plain = stored_bytes(tmp_path / "attacked"), stored_bytes(tmp_path / "plain")
    differing = {name for name, _ in with_attack.items() ^ plain.items()}
    assert differing == {"spec.json", "private/attacks.json", "private/digests.json"}
    noted = [noted_when_written(TrialFiles(str(tmp_path / folder))) for folder in ("attacked", "plain")]
    for digests in noted:
        del digests["device.json"]  # peak memory is the process's, so it may differ
    assert {name for name, _ in noted[0].items() ^ noted[1].items()} == {"spec.json", "private/attacks.json"}
    assert not Path(TrialFiles(str(tmp_path / "plain")).attacks).exists()


def unlearnable() -> Source:
    """Labels without any relation to the features: whoever does better on training rows has learnt them by heart."""
    draw = generator()
    features, labels = draw.normal(size=(400, 60)).astype(np.float32), draw.integers(0, 2, 400)
    groups = np.zeros(200, np.int64)
    train = make_split(features[:200], labels[:200], groups)
    test = make_split(features[200:], labels[200:], groups, first_id=200)
    return Source("unlearnable", train, test, ("all",), ("no", "yes"))


def test_a_baseline_that_learns_by_heart_is_found_out_and_a_private_trial_is_not(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "data": DataSpec(f"{__file__}:unlearnable"),
        "model": Component("mlp", {"hidden": [64]}),
        "sampling": SamplingSpec("poisson", 50),
        "epochs": 12,
        "norms": NormSpec(refreshes_per_epoch=0.05),
    }
    _, baseline = attacked(tmp_path / "baseline", clipping=Component("none"), noise=NoiseSpec(0.0), **common)
    _, private = attacked(tmp_path / "private", noise=NoiseSpec(8.0), **common)
    of_baseline, of_private = (read_attacks(files.attacks) for files in (baseline, private))
    (leaky,), (tight,) = of_baseline.loss_threshold, of_private.loss_threshold
    known, guessed = present(of_baseline.training_scores), present(of_private.training_scores)
    assert known.main > 0.9
    assert guessed.main < 0.7
    assert leaky.success_rate > 0.5 + 4.0 * leaky.standard_error
    assert abs(tight.success_rate - 0.5) < 4.0 * tight.standard_error


def test_an_interrupted_trial_is_attacked_when_it_ends(tmp_path: Path) -> None:
    """Killed after its last epoch, it is attacked by the run that finishes it, with the same result."""
    spec, files = attacked(tmp_path / "whole")

    def interrupt(progress: Progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(spec, str(tmp_path / "killed"), on_progress=interrupt)
    run_trial(spec, str(tmp_path / "killed"))
    assert read_attacks(TrialFiles(str(tmp_path / "killed")).attacks) == read_attacks(files.attacks)


def test_results_survive_storage_and_damage_is_noticed(tmp_path: Path) -> None:
    uri = str(tmp_path / "attacks.json")
    results = AttackResults((GroupAttack("a", 10, -math.inf, 5), GroupAttack("b", 10, 0.3, 7)))
    write_attacks(uri, results)
    assert read_attacks(uri) == results
    Path(uri).write_text(Path(uri).read_text().replace("0.3", "0.4"))
    with pytest.raises(DataCorruption, match=r"attacks.json is damaged.*delete it"):
        read_attacks(uri)


def test_an_audit_of_a_kind_that_does_not_exist_is_damage(tmp_path: Path) -> None:
    everyone = {"name": "all", "canaries": 2, "guesses": 0, "correct": 0, "epsilon": 0.0}
    audit = {"delta": 1e-5, "confidence": 0.95, "everyone": everyone, "groups": [], "kind": "columns"}
    uri = str(tmp_path / "attacks.json")
    write_private_sealed(uri, json.dumps({"audit": audit}).encode())
    with pytest.raises(DataCorruption, match="holds no attacks of this version"):
        read_attacks(uri)


def test_the_examples_that_chose_the_threshold_do_not_measure_it() -> None:
    """Of equal distributions even tiny attacks, whose thresholds fit their own examples, are right half of the time."""
    rng = np.random.default_rng(0)
    rates = [attack_losses(rng.random(4), rng.random(4), "g", rng).success_rate for _ in range(4000)]
    assert np.mean(rates) == pytest.approx(0.5, abs=0.02)
