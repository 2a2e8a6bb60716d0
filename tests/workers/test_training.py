"""Training runs on real data: what they store, what their traces say, and the edge cases that decide correctness."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trial_specs import DROPOUT_NET, TUMOURS, small_trial

from accounting.accountants import account, total_rho
from accounting.errors import InvalidInput
from accounting.layout import TrialFiles
from accounting.mechanism import GaussianRelease, Trace
from accounting.schedules import make_schedule, planned_trace
from accounting.shards import NormShards, PartNorms, read_trace
from workers import clipping
from workers.augmentation import FlipAndCrop
from workers.data import load_dataset
from workers.gradients import GradientEngine
from workers.history import Progress, TrainingResult, read_training_result
from workers.losses import build_loss
from workers.mechanism import TrialMechanism, affordable_epochs
from workers.models import build_model
from workers.noise import make_noise_source
from workers.sampling import planned_sampling
from workers.spec import BudgetSpec, Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from workers.training import Trainer
from workers.trial import run_trial

TRAIN_SIZE = len(load_dataset(TUMOURS).train)
ROWS = ("example_ids", "groups", "norms", "contributions", "losses")


def train(spec: TrialSpec, root: Path, **options: Any) -> tuple[TrainingResult, Trace, TrialFiles]:
    result = run_trial(spec, str(root), **options)
    files = TrialFiles(str(root))
    return result, read_trace(files.trace), files


def norms_of(files: TrialFiles) -> PartNorms:
    """All parts of the snapshots of all training examples."""
    shards = NormShards(files.norms)
    parts = [shards.read(part) for part in shards.parts]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ROWS}
    return replace(parts[0], **columns)


def new_trainer(spec: TrialSpec, root: Path) -> Trainer:
    dataset = load_dataset(spec.data)
    noise = make_noise_source(spec.noise_source, spec.seed, torch.device("cpu"))
    mechanism = TrialMechanism.of(spec, len(dataset.train))
    trainer = Trainer(spec, mechanism, dataset, noise, TrialFiles(str(root)))
    trainer.begin()
    return trainer


def flat_parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.released_model().parameters()])


def test_a_trial_stores_its_spec_trace_norms_model_and_history(tmp_path: Path) -> None:
    reported: list[Progress] = []
    spec = small_trial(norms=NormSpec(3.0))
    result, trace, files = train(spec, tmp_path, on_progress=reported.append)
    assert TrialSpec.from_json(Path(files.spec).read_bytes()) == spec
    assert read_training_result(files.training) == result
    assert (result.epochs, result.steps, result.stopped) == (2, trace.steps, "completed")
    assert [record.epoch for record in result.history] == [0, 1]
    assert [(p.epoch, p.step, p.total_steps) for p in reported] == [
        (1, trace.steps // 2, trace.steps),
        (2, trace.steps, trace.steps),
    ]
    assert reported[-1].trace == trace
    assert reported[0].trace == trace.until(trace.steps // 2)
    assert reported[-1].evaluation == result.evaluation
    norms = norms_of(files)
    dataset = load_dataset(spec.data)
    assert np.array_equal(norms.example_ids, dataset.train.example_ids.numpy())
    assert np.array_equal(norms.groups, dataset.train.groups.numpy())
    assert len(norms.steps) == 2 * 3
    assert norms.steps[0] == 0


def test_a_root_may_be_a_uri(tmp_path: Path) -> None:
    """Object stores and local paths are the same code; a file URI stands for them here."""
    train(small_trial(), tmp_path / "path")
    run_trial(small_trial(), (tmp_path / "uri").as_uri())
    stored = [sorted(p.relative_to(tmp_path / root) for p in (tmp_path / root).rglob("*")) for root in ("path", "uri")]
    assert stored[0] == stored[1]


def test_private_files_are_private_and_public_ones_hold_nothing_of_single_examples(tmp_path: Path) -> None:
    _, _, files = train(small_trial(norms=NormSpec(exact_examples=3)), tmp_path)
    private = Path(files.private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.rglob("*") if path.is_file()} == {0o600}
    public = {path.name for path in tmp_path.rglob("*") if path.is_file() and private not in path.parents}
    assert public == {"spec.json", "trace.arrow", "model.pt", "training.json"}
    words = set(json.loads(Path(files.training).read_text()))
    assert words.isdisjoint({"norms", "contributions", "losses", "counters", "non_finite_gradients"})


@pytest.mark.parametrize("method", ["poisson", "fixed", "shuffle"])
@pytest.mark.parametrize("clip", ["flat", "dpsgd_f", "quantile"])
def test_the_trace_is_the_planned_one(method: str, clip: str, tmp_path: Path) -> None:
    component = Component(clip, {"bound": {"median_multiple": 1.0}})
    schedule = Component("exponential", {"decay": 0.3})
    releases = (GaussianRelease("statistics", 9.0),)
    spec = small_trial(
        sampling=SamplingSpec(method, 24),  # type: ignore[arg-type]
        clipping=component,
        noise=NoiseSpec(2.0, schedule),
    )
    _, trace, _ = train(spec, tmp_path, releases=releases)
    sampling, steps_per_epoch = planned_sampling(spec.sampling, TRAIN_SIZE)
    assert trace == planned_trace(
        make_schedule("exponential", 2.0, decay=0.3),
        sampling,
        spec.epochs,
        steps_per_epoch,
        TRAIN_SIZE,
        clipping.side_queries(component),
        (*clipping.releases(component), *releases),
    )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "estimate"),
        ({"norms": NormSpec("every_step")}, "guarantee"),
        ({"clipping": Component("individual")}, "guarantee"),
        ({"norms": NormSpec("every_step"), "augmentation": Component("flip_and_crop")}, "estimate"),
        ({"norms": NormSpec("every_step"), "execution": ExecutionSpec(autocast=True)}, "estimate"),
    ],
)
def test_contributions_claim_no_more_than_they_hold(changes: dict[str, Any], kind: str) -> None:
    assert TrialMechanism.of(small_trial(**changes), TRAIN_SIZE).contributions == kind


def test_norms_under_dropout_are_estimates(tmp_path: Path) -> None:
    """Two passes draw two masks, so a norm taken at every step still is not the one that was clipped."""
    spec = small_trial(model=DROPOUT_NET, norms=NormSpec("every_step"))
    assert train(spec, tmp_path / "flat")[1].contributions == "estimate"
    spec = replace(spec, clipping=Component("individual"))
    assert train(spec, tmp_path / "individual")[1].contributions == "guarantee"


def test_a_trial_computes_in_full_single_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFloat-32, which torch allows cuDNN, would let clipped gradients exceed their bound."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    during: list[tuple[bool, str]] = []

    def note(progress: Progress) -> None:
        during.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))

    train(small_trial(), tmp_path, on_progress=note)
    assert during == [(False, "highest")] * 2
    assert torch.backends.cudnn.allow_tf32


def test_one_step_is_the_clipped_sum_over_the_expected_batch_size(tmp_path: Path) -> None:
    """Without noise the update is known exactly; the realised batch size must not appear in it."""
    spec = small_trial(
        noise=NoiseSpec(0.0),
        clipping=Component("flat", {"bound": 0.5}),
        optimizer=Component("sgd", {"learning_rate": 2.0}),
    )
    trainer, twin = new_trainer(spec, tmp_path / "one"), new_trainer(spec, tmp_path / "two")
    before = flat_parameters(trainer)
    trainer.step()
    rows = torch.from_numpy(twin._sampler.next_batch())
    assert len(rows) != spec.sampling.batch_size
    x, y = twin._data.inputs(rows)
    total = torch.zeros_like(before)
    for row in range(len(rows)):
        model = twin.released_model()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        total += gradient * min(1.0, 0.5 / float(gradient.norm()))
    torch.testing.assert_close(flat_parameters(trainer), before - 2.0 * total / spec.sampling.batch_size)


@pytest.mark.parametrize("noise_source", ["seeded", "os_entropy", "os_entropy_secure"])
def test_noise_has_the_stated_scale_also_on_empty_batches(noise_source: str, tmp_path: Path) -> None:
    spec = small_trial(
        noise_source=noise_source,
        noise=NoiseSpec(50.0),
        clipping=Component("flat", {"bound": 0.1}),
        sampling=SamplingSpec("poisson", 1),
        model=Component("mlp", {"hidden": [200]}),
        optimizer=Component("sgd", {"learning_rate": 1.0}),
        norms=NormSpec(1.0),
    )
    trainer = new_trainer(spec, tmp_path)
    seen_empty = False
    for _ in range(30):
        before, empty = flat_parameters(trainer), trainer.counters.empty_batches
        trainer.step()
        moved = flat_parameters(trainer) - before
        assert float(moved.std()) == pytest.approx(50.0 * 0.1 / 1, rel=0.06)
        seen_empty |= trainer.counters.empty_batches > empty
    assert seen_empty
    assert trainer.trace().steps == 30


def test_exactly_tracked_examples_agree_with_snapshots_at_every_step(tmp_path: Path) -> None:
    spec = small_trial(norms=NormSpec("every_step", exact_examples=7), clipping=Component("dpsgd_f"))
    _, trace, files = train(spec, tmp_path)
    everyone, exact = norms_of(files), NormShards(files.exact_norms).read(0)
    assert list(exact.steps) == list(range(trace.steps))
    rows = np.searchsorted(everyone.example_ids[np.argsort(everyone.example_ids)], exact.example_ids)
    rows = np.argsort(everyone.example_ids)[rows]
    assert len(exact.example_ids) == 7
    np.testing.assert_allclose(exact.contributions, everyone.contributions[rows], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(exact.norms, everyone.norms[rows], rtol=1e-4)


def test_individual_clipping_never_exceeds_what_was_recorded(tmp_path: Path) -> None:
    """True contributions at every step stay below the snapshot before: the guarantee that its epsilons rest on."""
    spec = small_trial(
        epochs=6, norms=NormSpec(0.5, exact_examples=TRAIN_SIZE), clipping=Component("individual", {"bound": 3.0})
    )
    _, _, files = train(spec, tmp_path)
    recorded, exact = norms_of(files), NormShards(files.exact_norms).read(0)
    order, exact_order = np.argsort(recorded.example_ids), np.argsort(exact.example_ids)
    latest = np.searchsorted(recorded.steps, exact.steps, side="right") - 1
    allowed = recorded.contributions[order][:, latest]
    true = exact.contributions[exact_order]
    assert (true <= allowed * (1.0 + 1e-5)).all()  # both are rounded up alike
    assert (true < 0.9 * allowed).any()


CORRUPT = """
from dataclasses import replace
from workers.data import DataSpec, Source, load_source

def tumours() -> Source:
    source = load_source(DataSpec("breast_cancer"))
    features = source.train.features.float().clone()
    features[::7] = float("nan")
    features[1::7] = float("inf")
    return replace(source, train=replace(source.train, features=features))
"""


@pytest.mark.parametrize("clip", sorted(set(clipping.CLIPPING) - {"none"}))
def test_examples_without_a_finite_gradient_weigh_nothing_and_are_counted(clip: str, tmp_path: Path) -> None:
    source = tmp_path / "corrupt.py"
    source.write_text(CORRUPT)
    data = replace(TUMOURS, name=f"{source}:tumours")
    _, _, files = train(small_trial(data=data, clipping=Component(clip)), tmp_path / "trial")
    model = torch.load(files.model, weights_only=True)
    assert all(value.isfinite().all() for value in model.values())
    assert json.loads(Path(files.private_training).read_text())["non_finite_gradients"] > 0
    norms = norms_of(files)
    broken = ~np.isfinite(norms.norms)
    assert broken.any()
    assert (norms.contributions[broken] == 1.0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingSpec("poisson", TRAIN_SIZE + 1)}, f"batch_size is .* {TRAIN_SIZE} training examples"),
        ({"clipping": Component("none")}, "without clipping the sensitivity is infinite"),
        ({"epochs": 0}, "epochs is 0"),
        ({"norms": NormSpec(0.0)}, "refreshes_per_epoch is 0"),
        ({"norms": NormSpec(exact_examples=-1)}, "exact_examples is -1"),
        ({"learning_rate_schedule": Component("cosine", {"warmup_epochs": -1})}, "warmup_epochs is -1"),
        ({"execution": ExecutionSpec(device="gpu")}, "unknown device 'gpu'"),
        ({"budget": BudgetSpec(rho=1.0, epsilon=1.0)}, "give exactly one"),
        ({"budget": BudgetSpec(epsilon=1e-4)}, "does not pay for one epoch"),
        ({"optimizer": Component("sgd", {"learning_rate": -1.0})}, "learning_rate is -1"),
        (
            {
                "noise": NoiseSpec(1.0, Component("validation", {"factor": 0.5, "period": 1})),
                "data": replace(TUMOURS, public_fraction=0.0),
            },
            "needs public data",
        ),
    ],
)
def test_impossible_trials_are_refused_in_words(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_trial(small_trial(**changes), str(tmp_path))
    assert not Path(TrialFiles(str(tmp_path)).training).exists()


def test_validation_schedule_reads_public_accuracy_only(tmp_path: Path) -> None:
    schedule = Component("validation", {"factor": 0.5, "period": 1, "threshold": 0.02})
    result, trace, _ = train(small_trial(epochs=6, noise=NoiseSpec(4.0, schedule)), tmp_path)
    public = [record.public.accuracy for record in result.history if record.public is not None]
    expected = make_schedule("validation", 4.0, **schedule.params)
    sigmas = [expected.noise_multiplier(epoch, public[:epoch]) for epoch in range(6)]
    assert [record.noise_multiplier for record in result.history] == sigmas
    assert sigmas[-1] < sigmas[0]
    spent = [s.noise_multiplier for s in trace.segments for _ in range(s.steps // result.steps_per_epoch)]
    assert spent == sigmas


def test_median_bound_is_released_and_in_the_trace(tmp_path: Path) -> None:
    bound = {"median_multiple": 2.0, "noise_multiplier": 0.5}
    spec = small_trial(clipping=Component("flat", {"bound": bound}))
    result, trace, files = train(spec, tmp_path)
    assert trace.releases == (GaussianRelease("median norm at initialisation", 0.5),)
    median = float(np.median(norms_of(files).norms[:, 0]))
    assert result.initial_bound == pytest.approx(2.0 * median, rel=0.3)
    assert result.history[-1].bounds == {"all": result.initial_bound}


TABLE_2 = [
    ("constant", 8.0, {}, 100),
    ("time", 10.0, {"decay": 0.05}, 38),
    ("step", 10.0, {"factor": 0.6, "period": 10}, 31),
    ("exponential", 10.0, {"decay": 0.01}, 71),
    ("polynomial", 10.0, {"power": 3.0, "end_noise_multiplier": 2.0, "period": 100}, 44),
]


@pytest.mark.parametrize(("name", "sigma", "params", "epochs"), TABLE_2, ids=lambda value: str(value))
def test_schedules_of_table_2_end_where_the_paper_says(
    name: str, sigma: float, params: dict[str, Any], epochs: int, tmp_path: Path
) -> None:
    """Real training with shuffled epochs and a budget of rho = 0.78125 (paper C, Table II)."""
    spec = small_trial(
        epochs=150,
        sampling=SamplingSpec("shuffle", 36),
        noise=NoiseSpec(sigma, Component(name, params)),
        budget=BudgetSpec(rho=0.78125),
        data=replace(TUMOURS, public_fraction=0.0),
        norms=NormSpec(0.05),
        execution=ExecutionSpec(device="cpu", checkpoint_every_epochs=50.0),
    )
    result, trace, _ = train(spec, tmp_path)
    assert (result.epochs, result.stopped) == (epochs, "budget")
    assert total_rho(trace) <= 0.78125
    one_more = TrialMechanism.of(spec, result.train_size).trace(epochs + 1)
    assert total_rho(one_more) > 0.78125


def test_a_validation_schedule_uses_up_what_it_did_not_have_to_spend(tmp_path: Path) -> None:
    """Before training its plan assumes the lowest noise; the budget is asked again with the accuracies seen."""
    schedule = Component("validation", {"factor": 0.5, "period": 2, "threshold": 0.0})
    budget = BudgetSpec(rho=0.5)
    spec = small_trial(epochs=40, sampling=SamplingSpec("shuffle", 25), noise=NoiseSpec(8.0, schedule), budget=budget)
    planned = affordable_epochs(spec, TrialMechanism.of(spec, TRAIN_SIZE), ())
    result, trace, _ = train(spec, tmp_path)
    assert result.stopped == "budget"
    assert result.epochs > planned > 0
    assert total_rho(trace) <= 0.5


def test_an_epsilon_budget_ends_training_before_it_is_passed(tmp_path: Path) -> None:
    spec = small_trial(epochs=30, noise=NoiseSpec(2.0), budget=BudgetSpec(epsilon=3.0))
    result, trace, _ = train(spec, tmp_path)
    assert result.stopped == "budget"
    assert account(trace, spec.delta).epsilon <= 3.0
    assert account(TrialMechanism.of(spec, TRAIN_SIZE).trace(result.epochs + 1), spec.delta).epsilon > 3.0


def test_compilation_reaches_the_engine(tmp_path: Path) -> None:
    prelu = Component(f"{__file__}:prelu_net")
    with pytest.raises(InvalidInput, match=r"torch\.compile cannot see through"):
        new_trainer(small_trial(model=prelu, execution=ExecutionSpec(device="cpu", compile=True)), tmp_path)


def prelu_net(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own model with a layer that has no rule."""
    return nn.Sequential(nn.Flatten(), nn.Linear(feature_shape[0], num_classes), nn.PReLU())


def test_micro_batches_change_memory_and_not_the_result(tmp_path: Path) -> None:
    whole, _, whole_files = train(small_trial(), tmp_path / "whole")
    parts, _, parts_files = train(
        small_trial(execution=ExecutionSpec(device="cpu", micro_batch_size=5)), tmp_path / "parts"
    )
    left, right = (torch.load(files.model, weights_only=True) for files in (whole_files, parts_files))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)
    assert whole.evaluation.accuracy == parts.evaluation.accuracy


def test_a_trial_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(11)
    before = (torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    run_trial(small_trial(), str(tmp_path))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


def test_averaged_parameters_are_what_is_evaluated_and_stored(tmp_path: Path) -> None:
    plain, _, plain_files = train(small_trial(epochs=4), tmp_path / "plain")
    averaged, _, averaged_files = train(small_trial(epochs=4, averaging=Component("ema")), tmp_path / "averaged")
    left, right = (torch.load(files.model, weights_only=True) for files in (plain_files, averaged_files))
    assert not torch.equal(left["1.weight"], right["1.weight"])
    assert plain.evaluation.loss != averaged.evaluation.loss


def test_non_private_training_says_so(tmp_path: Path) -> None:
    result, trace, files = train(small_trial(clipping=Component("none"), noise=NoiseSpec(0.0)), tmp_path)
    assert not trace.is_private
    assert account(trace, 1e-5).epsilon == math.inf
    assert result.initial_bound is None
    assert result.history[-1].sensitivity is None
    assert (norms_of(files).contributions == 1.0).all()


def test_flips_and_crops_keep_copies_together() -> None:
    images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    augmented = FlipAndCrop(multiplicity=3)(images, torch.Generator().manual_seed(0))
    assert augmented.shape == (12, 3, 8, 8)
    assert augmented[:, 0, 0, 0].tolist() == [float(i) for i in range(4) for _ in range(3)]
    ramp = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    plain = FlipAndCrop(multiplicity=50, padding=0)(ramp, torch.Generator().manual_seed(0))
    flipped = (plain[:, 0, 0, 0] == 7.0).sum()
    assert 10 < flipped < 40
    assert torch.equal(plain[plain[:, 0, 0, 0] == 7.0][0], ramp[0].flip(2))
    assert FlipAndCrop(multiplicity=2)(images[:0], torch.Generator()).shape == (0, 3, 8, 8)


def test_augmented_training_clips_the_mean_of_the_copies(tmp_path: Path) -> None:
    """Each example's gradient is the mean over its copies: with K equal copies nothing changes."""
    data = DataSpec("digits", keep={str(digit): 6 for digit in range(10)})
    spec = small_trial(
        data=data,
        model=Component("cnn_dpsgdf", {"channels": [4, 4], "kernel_size": 3, "padding": 1, "hidden": 16}),
        augmentation=Component("flip_and_crop", {"multiplicity": 4, "padding": 1}),
        sampling=SamplingSpec("poisson", 16),
        noise=NoiseSpec(0.0),
        epochs=1,
    )
    dataset = load_dataset(data)
    model = build_model(spec.model, dataset, spec.seed)
    loss = build_loss(spec.loss)
    x, y = dataset.prepare(dataset.train.features[:8]), dataset.train.labels[:8]
    single = GradientEngine(model, loss).norms(x, y)
    copies = GradientEngine(model, loss, multiplicity=4).norms(x.repeat_interleave(4, 0), y.repeat_interleave(4))
    torch.testing.assert_close(single.norms, copies.norms, rtol=1e-4, atol=1e-6)
    result, trace, _ = train(spec, tmp_path)
    assert trace.contributions == "estimate"
    assert result.steps == trace.steps
