"""Membership inference by likelihood ratios, where the answer is known."""

from __future__ import annotations

import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Source, make_split
from dpsweep.workers.evaluation.attack_results import MembershipAttack, auc_interval, read_attacks
from dpsweep.workers.machine.stored_tensors import noted_when_written
from dpsweep.workers.spec import AttackSpec, Component, DataSpec, NoiseSpec, NormSpec, RmiaSpec, SamplingSpec
from dpsweep.workers.trials.membership import area, balanced, halves, log_ratio
from dpsweep.workers.trials.trial import run_trial
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import allowed


def source() -> Source:
    """Labels that follow one feature but for a third of the rows: easy and hard examples, on both sides."""
    draw = np.random.default_rng(0)
    features = draw.normal(size=(400, 60)).astype(np.float32)
    features[:, 0] *= 3.0
    labels = np.where(draw.random(400) < 0.3, features[:, 0] < 0.0, features[:, 0] > 0.0).astype(np.int64)
    train, test = (make_split(features[at], labels[at], np.zeros(200, np.int64), first_id=at.start) for at in HALVES)
    return Source("noisy labels", train, test, ("all",), ("no", "yes"))


HALVES = slice(0, 200), slice(200, 400)


COMMON: dict[str, Any] = {
    "data": DataSpec(f"{__file__}:source"),
    "model": Component("mlp", {"hidden": [64]}),
    "sampling": SamplingSpec("poisson", 50),
    "epochs": 12,
    "norms": NormSpec(refreshes_per_epoch=0.05),
    "attacks": AttackSpec(rmia=RmiaSpec(4)),
}


def attacked(root: Path, **changes: Any) -> tuple[MembershipAttack, ...]:
    run_trial(small_trial(**{**COMMON, **changes}), str(root), code=allowed(__file__))
    return read_attacks(TrialFiles(str(root)).attacks).rmia


@pytest.mark.long
def test_a_baseline_that_learns_by_heart_is_found_out(tmp_path: Path) -> None:
    """Better than by the loss alone, which also tells hard examples from easy ones."""
    fast = Component("sgd", {"learning_rate": 0.3})
    (leaky,) = attacked(tmp_path, clipping=Component("none"), noise=NoiseSpec(0.0), optimizer=fast, epochs=30)
    assert leaky.lower > 0.7
    assert leaky.auc >= leaky.loss_auc > 0.7
    assert leaky.examples == 400
    assert stat.S_IMODE(Path(TrialFiles(str(tmp_path)).attacks).stat().st_mode) == 0o600


@pytest.mark.long
def test_a_model_that_learnt_nothing_of_the_data_is_not(tmp_path: Path) -> None:
    """Drowned in noise, the model is independent of who was in the data."""
    (tight,) = attacked(tmp_path, noise=NoiseSpec(200.0), epochs=2)
    assert tight.lower < 0.5 < tight.upper


def test_an_attack_changes_nothing_else_and_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    first = attacked(tmp_path / "a", epochs=1)
    assert attacked(tmp_path / "b", epochs=1) == first
    attacked(tmp_path / "plain", epochs=1, attacks=AttackSpec())
    for file in sorted((tmp_path / "plain").rglob("*")):
        name = file.relative_to(tmp_path / "plain")
        if file.is_file() and name.name not in ("spec.json", "digests.json", "device.json"):  # device.json: peak memory
            assert file.read_bytes() == (tmp_path / "a" / name).read_bytes(), name
    noted = [noted_when_written(TrialFiles(str(tmp_path / folder))) for folder in ("a", "plain")]
    changed = {name for name, _ in noted[0].items() ^ noted[1].items()}
    assert changed - {"device.json"} == {"spec.json", "private/attacks.json", "private/membership.ipc"}
    found = {str(file.relative_to(tmp_path / "a")) for file in (tmp_path / "a").rglob("*") if file.is_file()}
    plain = {str(file.relative_to(tmp_path / "plain")) for file in (tmp_path / "plain").rglob("*") if file.is_file()}
    assert found - plain == {"private/attacks.json", "private/membership.ipc"}


def uneven() -> Source:
    """So few test examples that a half of all is less than the training examples."""
    whole = source()
    assert whole.test is not None
    return replace(whole, test=whole.test.select(np.arange(20)))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec("poisson", 50, max_batch_size=180),
        SamplingSpec("poisson", "full", max_batch_size=200),
        SamplingSpec("random_allocation", 50, per_epoch=2),
    ],
    ids=["a maximum", "a maximum of full batches", "blocks"],
)
def test_reference_models_train_on_fewer_examples_than_the_trial(tmp_path: Path, sampling: SamplingSpec) -> None:
    assert attacked(tmp_path, sampling=sampling, epochs=1, data=DataSpec(f"{__file__}:uneven"))


def test_the_area_and_its_interval_are_right_for_known_distributions() -> None:
    """Normal scores a standard deviation apart have the area Phi(1 / sqrt 2); 95% of the intervals hold it, or more."""
    draw, truth = np.random.default_rng(0), 0.7602499389065233
    is_member = np.arange(200) < 100
    areas = [area(draw.normal(np.where(is_member, 1.0, 0.0)), is_member) for _ in range(400)]
    assert np.mean(areas) == pytest.approx(truth, abs=0.01)
    held = [low <= truth <= high for low, high in (auc_interval(found, 100) for found in areas)]
    assert np.mean(held) >= 0.95
    assert auc_interval(0.5, 100)[1] - auc_interval(0.5, 100)[0] < 0.21
    for right in (0, 3, 60, 100):
        assert auc_interval(right / 100, 100) == pytest.approx(binomtest(right, 100).proportion_ci(method="exact"))


@pytest.mark.parametrize("per_side", [5, 20, 100])
def test_intervals_hold_the_area_of_members_who_meet_equal_scores(per_side: int) -> None:
    """Against equal scores of all others the area is the share of members above, the law with the largest variance."""
    counts = np.arange(per_side + 1)
    scores = np.where(np.arange(per_side) < counts[:, None], 1.0, -1.0)
    is_member = np.arange(2 * per_side) < per_side
    measured = [area(np.append(each, np.zeros(per_side)), is_member) for each in scores]
    low, high = np.transpose([auc_interval(found, per_side) for found in measured])
    for truth in [*np.linspace(0.01, 0.99, 99), 0.999, 1.0]:
        assert binom.pmf(counts, per_side, truth)[(low <= truth) & (truth <= high)].sum() >= 0.95


def test_the_ratio_is_of_the_mean_probability_of_the_references() -> None:
    losses, references = np.log([2.0, 4.0]), np.log([[4.0, 4.0], [2.0, 4.0]])
    np.testing.assert_allclose(log_ratio(losses, references), np.log([0.5 / 0.375, 1.0]))
    odd = log_ratio(np.array([math.nan, math.inf, 0.0]), np.full((2, 3), math.inf))
    assert np.isfinite(odd).all()
    np.testing.assert_allclose(odd, [0.0, 0.0, 700.0], atol=1e-9)


def test_every_example_is_in_half_of_the_reference_sets() -> None:
    sets = list(halves(11, 6, seed=3))
    counts = np.bincount(np.concatenate(sets), minlength=11)
    assert counts.tolist() == [3] * 11
    assert not set(sets[0]) & set(sets[1])
    assert sets[0].tolist() != sets[2].tolist()


def test_members_and_others_are_equally_many() -> None:
    members, others = np.arange(20) < 15, np.arange(20) >= 17
    rows = balanced(members, others, np.random.default_rng(0))
    assert (members[rows].sum(), others[rows].sum()) == (3, 3)


@pytest.mark.parametrize("count", [0, 1, 3, 257])
def test_a_number_of_reference_models_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match="reference_models"):
        RmiaSpec(count)
