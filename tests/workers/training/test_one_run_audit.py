"""One-run audits of real training: planted faults are proved, correct runs are not accused.

Which check catches which fault: the audit itself finds missing noise, a missing clip, a sensitivity or a sample rate
that is wrong by much. One run with a few hundred canaries cannot prove a factor of two, so noise/2 is caught by the
white-box audit of tests/workers/training/test_audit.py; a rate that is slightly wrong, by
tests/workers/sampling/test_samplers.py; noise that follows the realised batch, by the contract below; shuffled batches
accounted for as Poisson, by refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting import InvalidInput, PoissonSampling, Segment, Trace, UnsupportedMechanism, account
from dpsweep.workers.clipping import ClipRule
from dpsweep.workers.clipping.by_norm import FlatClipping
from dpsweep.workers.data.base import Dataset, make_split
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.models import build_model
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.sampling.samplers import PartialSampler, PoissonSampler, SeededRows, make_sampler
from dpsweep.workers.spec import (
    AuditSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NoiseSpec,
    NormSpec,
    SamplingSpec,
    TrialSpec,
)
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.one_run_audit import Canaries, audit
from dpsweep.workers.training.trainer import Trainer
from tests.known import known
from tests.workers.devices import DEVICE, NAME
from tests.workers.trial_runs import made_trainer
from tests.workers.trial_specs import planned_mechanism
from tests.workers.user_modules import code_of

ROWS = 400


def zeros(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(feature_shape[0], num_classes, bias=False))
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    return model


def everyone_apart() -> Dataset:
    """Examples along axes of their own, of one class and two groups; gradients are longer than the clipping bound."""
    split = make_split(20.0 * np.eye(ROWS, dtype=np.float32), np.zeros(ROWS, np.int64), np.arange(ROWS) % 2)
    return Dataset("audit", split, split, None, ("even", "odd"), ("a", "b"))


def spec(seed: int = 0, batch_size: int = ROWS, sigma: float = 4.0, method: str = "poisson") -> TrialSpec:
    return TrialSpec(
        key="audit",
        data=DataSpec("audit"),
        model=Component(f"{__file__}:zeros"),
        sampling=SamplingSpec(method, batch_size),
        clipping=Component("flat", {"bound": 1.0}),
        noise=NoiseSpec(sigma),
        epochs=1,
        delta=1e-5,
        seed=seed,
        optimizer=Component("sgd", {"learning_rate": 1.0}),
        norms=NormSpec(refreshes_per_epoch=1.0),
        audit=AuditSpec(ROWS, 0.999),
        execution=ExecutionSpec(device=NAME),
    )


def trainer_of(
    trial: TrialSpec, root: Path, noise: Callable[[int, torch.device], SeededNoise] = SeededNoise
) -> Trainer:
    return made_trainer(trial, root, everyone_apart(), noise(trial.seed, DEVICE))


def audited(trial: TrialSpec, trainer: Trainer) -> AuditResult:
    trainer.begin()
    while trainer.may_continue():
        trainer.step()
    model, loss = trainer.released_model(), build_loss(trial.loss)
    start = build_model(trial.model, everyone_apart(), trial.seed, code_of(trial)).to(DEVICE)
    return audit(start, model, everyone_apart(), loss, known(trainer.canaries), known(trial.audit), trial.delta)


def claimed(trial: TrialSpec) -> float:
    return account(planned_mechanism(trial, ROWS).trace(trial.epochs), trial.delta).epsilon


def contradicts(result: AuditResult, claim: float) -> bool:
    return max(each.epsilon for each in (result.everyone, *result.groups)) > claim


class HardlyAnyNoise(SeededNoise):
    """A tenth of what the trace states."""

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        return 0.1 * super().normal(shape, std)


@pytest.mark.long
@pytest.mark.parametrize("runs", [20, pytest.param(100, marks=pytest.mark.long)])
def test_correct_runs_raise_no_alarm(tmp_path: Path, runs: int) -> None:
    for seed in range(runs):
        method = "poisson" if seed < runs // 2 else "shuffle"
        trial = spec(seed, batch_size=ROWS if seed % 2 else ROWS // 4, method=method)
        result = audited(trial, trainer_of(trial, tmp_path / str(seed)))
        assert not contradicts(result, claimed(trial))
        assert {group.name for group in result.groups} == {"even", "odd"}
        assert sum(group.canaries for group in result.groups) == ROWS


def test_the_audit_proves_that_noise_is_missing(tmp_path: Path) -> None:
    trial = spec()
    result = audited(trial, trainer_of(trial, tmp_path, HardlyAnyNoise))
    assert result.everyone.epsilon > claimed(trial)


def test_the_audit_proves_that_gradients_are_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClipRule, "weights", lambda rule, examples: torch.ones_like(examples.norms))
    trial = spec()
    assert audited(trial, trainer_of(trial, tmp_path)).everyone.epsilon > claimed(trial)


def test_the_audit_proves_that_the_sensitivity_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum moves by 10 per example, and the noise is scaled to 1."""
    trial, decide = replace(spec(), clipping=Component("flat", {"bound": 10.0})), FlatClipping.decide
    monkeypatch.setattr(FlatClipping, "decide", lambda *given: replace(decide(*given), sensitivity=1.0))
    assert audited(trial, trainer_of(trial, tmp_path)).everyone.epsilon > claimed(trial)


def test_the_audit_proves_that_the_sample_rate_is_wrong(tmp_path: Path) -> None:
    slowly = Component("sgd", {"learning_rate": 0.1})
    trial = replace(spec(batch_size=20, sigma=1.5), optimizer=slowly)
    trainer = trainer_of(trial, tmp_path)
    trainer._sampler = PartialSampler(PoissonSampler(ROWS, ROWS, SeededRows(0)), known(trainer.canaries))
    assert audited(trial, trainer).everyone.epsilon > claimed(trial)


def test_the_noise_does_not_follow_the_realised_batch(tmp_path: Path) -> None:
    """The contract that noise scaled to the realised batch would break: equal deviations, for empty batches too."""
    asked: list[float] = []

    class Watched(SeededNoise):
        def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
            asked.append(std)
            return super().normal(shape, std)

    trial = spec(batch_size=1)
    trainer = trainer_of(trial, tmp_path, Watched)
    sizes = set()
    drawn = trainer._sampler.next_batch

    def counted() -> np.ndarray:
        rows = drawn()
        sizes.add(len(rows))
        return rows

    trainer._sampler.next_batch = counted  # type: ignore[method-assign]
    audited(trial, trainer)
    assert {0, 1} < sizes
    assert len(set(asked)) == 1
    assert len(asked) == ROWS


def test_shuffled_batches_cannot_be_accounted_for_as_poisson(tmp_path: Path) -> None:
    """The trainer states what its sampler does, and neither adjacency nor accountant takes epochs for samples."""
    trial = spec(batch_size=40, method="shuffle")
    trace = trainer_of(trial, tmp_path).mechanism.trace(1)
    with pytest.raises(UnsupportedMechanism, match=r"shuffled epochs .* no accounting under 'add_remove'"):
        replace(trace, adjacency="add_remove")
    poisson = Trace(ROWS, (Segment(0, 10, PoissonSampling(0.1), 4.0),))
    assert account(trace, 1e-5).epsilon > 2 * account(poisson, 1e-5).epsilon


@pytest.mark.parametrize("method", ["poisson", "shuffle"])
def test_canaries_that_are_left_out_join_no_batch(method: str) -> None:
    """The others are drawn as if the absent were not there: by the same coins, and in the same places of an epoch."""
    chosen = Canaries(AuditSpec(200), ROWS, 3, SeededRows(4))
    assert 70 < len(chosen.absent) < 130
    assert set(chosen.absent) < set(chosen.rows)
    sampling = SamplingSpec(method, 100)
    whole, partial = make_sampler(sampling, ROWS, SeededRows(5)), make_sampler(sampling, ROWS, SeededRows(5), chosen)
    for _ in range(12):
        np.testing.assert_array_equal(partial.next_batch(), np.setdiff1d(whole.next_batch(), chosen.absent))


def test_absent_canaries_make_room_in_a_batch_that_is_cut() -> None:
    chosen = Canaries(AuditSpec(ROWS), ROWS, 3, SeededRows(4))
    sampler = make_sampler(SamplingSpec("poisson", 300, max_batch_size=300), ROWS, SeededRows(5), chosen)
    assert min(len(sampler.next_batch()) for _ in range(20)) > 100, "150 of the 200 that are left"


def test_the_coins_are_fair_and_survive_a_resume() -> None:
    heads = [Canaries(AuditSpec(50), ROWS, 0, SeededRows(seed)).included for seed in range(400)]
    shares = np.mean(heads, axis=0)
    assert np.abs(shares - 0.5).max() < 5 * 0.5 / 20
    stored, other = Canaries(AuditSpec(50), ROWS, 0, SeededRows(1)), Canaries(AuditSpec(50), ROWS, 0, SeededRows(2))
    assert not np.array_equal(stored.included, other.included)
    other.restore(stored.state())
    np.testing.assert_array_equal(stored.absent, other.absent)


def test_secret_coins_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    """Two trainers of one trial toss different coins; the second continues with those of the first."""
    trial = replace(spec(), noise_source="os_entropy")
    first, second = (trainer_of(trial, tmp_path / name) for name in ("first", "second"))
    assert first.canaries is not None
    assert second.canaries is not None
    assert not np.array_equal(first.canaries.included, second.canaries.included)
    np.testing.assert_array_equal(first.canaries.rows, second.canaries.rows)
    first.begin()
    second.restore(first.state())
    np.testing.assert_array_equal(first.canaries.included, second.canaries.included)
    assert not set(second._sampler.next_batch()) & set(first.canaries.absent)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling": SamplingSpec("fixed", 40)}, "sampling.method is 'fixed', but an audit leaves canaries out"),
        ({"audit": AuditSpec(ROWS + 1)}, "audit.canaries is 401, but the training set has 400 examples"),
    ],
)
def test_audits_that_cannot_be_are_refused(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=reason):
        trainer_of(replace(spec(), **changes), tmp_path)  # type: ignore[arg-type]
