"""Tasks besides classification: numbers against scikit-learn, losses against torch, norms against a loop, trials."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Source, as_targets, load_dataset, load_source, make_split
from dpsweep.workers.evaluation.outcomes import ScoredOutcomes, read_outcomes
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.spec import Component, DataSpec, TrialSpec
from dpsweep.workers.tasks import IGNORED, MAIN_SCORES, TASKS, main_score
from dpsweep.workers.tasks.losses import LOSSES, TASK_OF, build_loss
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.workers.brute_force import gradients_one_by_one, norms_of
from tests.workers.data_folders import make_masks, make_numbers, make_texts, make_tokenizer
from tests.workers.trial_specs import small_trial

DRAW = np.random.default_rng(0)
ROWS = 300


def scores_of(task: str, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    sums = TASKS[task].kept(outputs, labels).numpy().sum(0)
    return {score.name: float(score.of(sums)) for score in TASKS[task].scores}


def parts_of(task: str, outputs: Tensor, labels: Tensor, names: tuple[str, ...]) -> Any:
    return TASKS[task].parts(TASKS[task].kept(outputs, labels).numpy().sum(0), names)


def test_regression_agrees_with_scikit_learn() -> None:
    targets = DRAW.normal(2000.0, [1.0, 30.0], (ROWS, 2)).astype(np.float32)
    outputs = (targets + DRAW.normal(0, 0.7, (ROWS, 2))).astype(np.float32)
    found = scores_of("regression", torch.tensor(outputs), torch.tensor(targets))
    exact = targets.astype(np.float64), outputs.astype(np.float64)
    assert found["mse"] == pytest.approx(metrics.mean_squared_error(*exact), rel=1e-9)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(*exact), rel=1e-9)
    assert found["r2"] == pytest.approx(metrics.r2_score(*exact), rel=1e-6)
    of_each = metrics.r2_score(*exact, multioutput="raw_values")
    parts = parts_of("regression", torch.tensor(outputs), torch.tensor(targets), ("y", "z"))
    assert [parts[name]["r2"] for name in ("y", "z")] == pytest.approx(of_each, rel=1e-6)


def test_no_constant_prediction_is_better_than_the_one_that_is_named() -> None:
    """Of all: every token, every set of labels, every class for all pixels, and the mean."""
    tokens = torch.tensor([[2, 0, IGNORED], [2, 1, 2]])
    of_tokens = [functional.one_hot(torch.full((2, 3), token), 3).float() for token in range(3)]
    several = torch.from_numpy(DRAW.integers(0, 2, (40, 4)) * DRAW.integers(0, 2, 40)[:, None]).float()
    sets = [torch.tensor(chosen).float().expand(40, 4) - 0.5 for chosen in itertools.product((0, 1), repeat=4)]
    pixels = torch.from_numpy(DRAW.choice([IGNORED, 0, 1, 1, 1, 3], (5, 6, 6)))
    of_pixels = [functional.one_hot(torch.full((5, 6, 6), kind), 4).float().movedim(3, 1) for kind in range(4)]
    numbers = torch.from_numpy(DRAW.normal(size=(30, 1)))
    cases = {
        "language_modelling": (tokens, of_tokens, ("a", "b", "c")),
        "multi_label": (several, sets, ("a", "b", "c", "d")),
        "segmentation": (pixels, of_pixels, ("a", "b", "c", "d")),
        "regression": (numbers, [numbers.mean(0).expand(30, 1)], ("y",)),
    }
    assert set(cases) == set(TASKS) - {"classification"}
    for name, (labels, outputs, names) in cases.items():
        best = max(scores_of(name, each, labels)[TASKS[name].main] for each in outputs)
        assert TASKS[name].constant(labels, names) == pytest.approx(best, abs=1e-9), name


def test_constant_targets_have_no_r2() -> None:
    found = scores_of("regression", torch.randn(5, 1), torch.full((5, 1), 7.1))
    assert np.isnan(found["r2"])
    assert found["mse"] > 0.0


def test_multi_label_agrees_with_scikit_learn() -> None:
    labels = (DRAW.random((ROWS, 4)) < [0.5, 0.1, 0.3, 0.0]).astype(np.int64)
    outputs = torch.tensor(DRAW.normal(2.0 * labels - 1.0, 1.0))
    outputs[:, 3] = -1.0
    predicted = (outputs > 0).numpy().astype(np.int64)
    found = scores_of("multi_label", outputs, torch.tensor(labels))
    assert found["micro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="micro"))
    macro = metrics.f1_score(labels[:, :3], predicted[:, :3], average="macro")
    assert found["macro_f1"] == pytest.approx(macro), "a label that nobody has, and none is given, is left out"
    assert found["label_accuracy"] == pytest.approx(1.0 - metrics.hamming_loss(labels, predicted))
    assert found["exact_match"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    parts = parts_of("multi_label", outputs, torch.tensor(labels), ("a", "b", "c", "d"))
    for place, name in enumerate(("a", "b", "c")):
        mine, theirs = predicted[:, place], labels[:, place]
        assert parts[name]["f1"] == pytest.approx(metrics.f1_score(theirs, mine))
        assert parts[name]["accuracy"] == pytest.approx(metrics.accuracy_score(theirs, mine))
        assert parts[name]["precision"] == pytest.approx(metrics.precision_score(theirs, mine))
        assert parts[name]["true_positive_rate"] == pytest.approx(metrics.recall_score(theirs, mine))
        wrong = metrics.recall_score(1 - theirs, mine)
        assert parts[name]["false_positive_rate"] == pytest.approx(wrong)
    assert parts["d"] == {"accuracy": 1.0, "false_positive_rate": 0.0}


def test_language_modelling_counts_every_token_once() -> None:
    logits, labels = torch.randn(40, 7, 9), torch.randint(0, 9, (40, 7))
    labels[torch.rand(40, 7) < 0.4] = IGNORED
    labels[3] = IGNORED
    found = scores_of("language_modelling", logits, labels)
    flat, of_flat = logits.flatten(0, 1), labels.flatten()
    assert found["token_loss"] == pytest.approx(float(functional.cross_entropy(flat, of_flat)), rel=1e-5)
    assert found["perplexity"] == pytest.approx(float(functional.cross_entropy(flat, of_flat).exp()), rel=1e-5)
    counted = of_flat != IGNORED
    right = metrics.accuracy_score(of_flat[counted], flat.argmax(1)[counted])
    assert found["token_accuracy"] == pytest.approx(right)


def test_segmentation_agrees_with_scikit_learn() -> None:
    """From counts of every picture; some pixels are not counted, and one class neither occurs nor is predicted."""
    logits, labels = torch.randn(30, 4, 6, 5), torch.randint(0, 3, (30, 6, 5)).short()
    logits[:, 3] = -9.0
    labels[torch.rand(30, 6, 5) < 0.3] = IGNORED
    labels[3] = IGNORED
    found = scores_of("segmentation", logits, labels)
    counted = (labels != IGNORED).flatten()
    theirs, mine = labels.flatten()[counted].numpy(), logits.argmax(1).flatten()[counted].numpy()
    assert found["mean_iou"] == pytest.approx(metrics.jaccard_score(theirs, mine, average="macro"), rel=1e-12)
    assert found["mean_dice"] == pytest.approx(metrics.f1_score(theirs, mine, average="macro"), rel=1e-12)
    assert found["pixel_accuracy"] == pytest.approx(metrics.accuracy_score(theirs, mine), rel=1e-12)
    parts = parts_of("segmentation", logits, labels, ("a", "b", "c", "d"))
    of_each = metrics.jaccard_score(theirs, mine, average=None)
    assert [parts[name]["iou"] for name in ("a", "b", "c")] == pytest.approx(of_each, rel=1e-12)
    assert parts["a"]["precision"] == pytest.approx(metrics.precision_score(theirs, mine, average=None)[0])
    assert parts["a"]["true_positive_rate"] == pytest.approx(metrics.recall_score(theirs, mine, average=None)[0])
    assert parts["d"] == {}


def test_nothing_counted_is_not_defined() -> None:
    unlabelled = scores_of("segmentation", torch.randn(3, 2, 4, 4), torch.full((3, 4, 4), IGNORED))
    assert all(np.isnan(value) for value in unlabelled.values())
    nothing = scores_of("language_modelling", torch.randn(3, 2, 4), torch.full((3, 2), IGNORED))
    assert all(np.isnan(value) for value in nothing.values())
    absent = scores_of("multi_label", -torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64))
    assert np.isnan(absent["micro_f1"])
    assert absent["exact_match"] == 1.0


def test_numbers_have_names_of_their_own_and_more_of_the_main_one_is_better() -> None:
    """Schedules, schedulers and choices take the main number of any task for what rises as a model improves."""
    names = [score.name for task in TASKS.values() for score in task.scores]
    assert len(names) == len(set(names))
    for name, task in TASKS.items():
        assert task.name == name
        assert [score.better for score in task.scores if score.name == task.main] in ([], ["higher"])
        assert main_score(None if task.scores else 0.5, {task.main: 0.5} if task.scores else {}) == 0.5
    assert set(MAIN_SCORES) <= {"accuracy", *names}


class Net(nn.Module):
    def __init__(self, outputs: int, *shape: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).unflatten(1, self.shape)
        return found


def labels_of(loss: str, rows: int) -> tuple[Net, Tensor]:
    match TASK_OF[loss]:
        case "regression":
            return Net(3, 3), torch.randn(rows, 3)
        case "multi_label":
            return Net(3, 3), torch.randint(0, 2, (rows, 3))
        case "segmentation":
            pixels = torch.randint(0, 6, (rows, 2, 2))
            pixels[torch.arange(4).view(2, 2) >= torch.arange(rows)[:, None, None] % 5] = IGNORED
            return Net(24, 6, 2, 2), pixels
    labels = torch.randint(0, 6, (rows, 4))
    labels[torch.arange(4) >= torch.arange(rows)[:, None] % 5] = IGNORED
    return Net(24, 4, 6), labels


NEW = [name for name in LOSSES if TASK_OF[name] != "classification"]


@pytest.mark.parametrize("name", NEW)
class TestEveryNewLoss:
    def test_it_is_torchs_mean_over_each_example(self, name: str) -> None:
        model, labels = labels_of(name, 20)
        outputs = model(torch.randn(20, 5)).detach()
        torchs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "regression": functional.mse_loss,
            "multi_label": lambda one, other: functional.binary_cross_entropy_with_logits(one, other.float()),
            "language_modelling": functional.cross_entropy,
            "segmentation": lambda one, other: functional.cross_entropy(one[None], other[None]),
        }
        expected = [float(torchs[TASK_OF[name]](outputs[row], labels[row])) for row in range(20)]
        found = build_loss(Component(name))(outputs, labels).tolist()
        assert found == pytest.approx([0.0 if np.isnan(each) else each for each in expected], rel=1e-5)
        has_none = TASK_OF[name] in ("language_modelling", "segmentation")
        assert not has_none or np.isnan(expected[0]), "torch has no mean of no position"

    @pytest.mark.thinned(2)
    def test_norms_are_those_of_one_example_at_a_time(self, name: str) -> None:
        model, labels = labels_of(name, 20)
        x, loss = torch.randn(20, 5), build_loss(Component(name))
        expected = norms_of(gradients_one_by_one(model, x, labels, loss_of=loss))
        torch.testing.assert_close(GradientEngine(model, loss).norms(x, labels).norms, expected, rtol=1e-4, atol=1e-7)

    def test_outputs_that_are_not_numbers_have_no_loss(self, name: str) -> None:
        model, labels = labels_of(name, 5)
        outputs = model(torch.randn(5, 5)).detach()
        outputs[4] = torch.nan
        losses = build_loss(Component(name))(outputs, labels)
        assert losses.isnan().tolist() == [False, False, False, False, True]

    def test_data_of_another_task_are_refused(self, name: str) -> None:
        with pytest.raises(InvalidInput, match=f"loss '{name}' is for {TASK_OF[name]}, but the data are for classif"):
            build_loss(Component(name), task="classification")


def table(folder: Path, **params: Any) -> DataSpec:
    features = [f"x{place}" for place in range(4)]
    known = {"group": "sex", "groups": ["f", "m"], "features": features, "ranges": {key: [-3, 3] for key in features}}
    return DataSpec("csv", {"path": str(make_numbers(folder / "numbers.csv")), **known, **params})


def texts(folder: Path, objective: str) -> DataSpec:
    path, tokenizer = make_texts(folder / "texts.jsonl"), make_tokenizer(folder / "tokenizer.json")
    params = {"path": str(path), "text": "body", "tokenizer": str(tokenizer), "max_length": 8, "group": "lang"}
    return DataSpec("text", {**params, "groups": ["de", "en"], "objective": objective})


def pictures(folder: Path, **params: Any) -> DataSpec:
    made = make_masks(folder / "pictures")
    known = {
        "classes": ["ground", "disc"],
        "size": 16,
        "groups": str(made / "groups.csv"),
        "group_names": ["day", "night"],
    }
    return DataSpec("image_masks", {"path": str(made), **known, **params})


SMALL = Component("language_model", {"width": 8, "depth": 1, "heads": 2})
TRIALS: dict[str, Callable[[Path], TrialSpec]] = {
    "one target": lambda folder: small_trial(data=table(folder, label="y", task="regression"), loss=Component("mse")),
    "two targets": lambda folder: small_trial(
        data=table(folder, label=["y", "z"], task="regression"), loss=Component("mse")
    ),
    "several labels": lambda folder: small_trial(
        data=table(folder, label=["red", "green", "blue"], task="multi_label"), loss=Component("binary_cross_entropy")
    ),
    "masked tokens": lambda folder: small_trial(
        data=texts(folder, "masked_lm"), model=SMALL, loss=Component("masked_lm")
    ),
    "next tokens": lambda folder: small_trial(
        data=texts(folder, "causal_lm"), model=SMALL, loss=Component("causal_lm")
    ),
    "pixels": lambda folder: small_trial(
        data=pictures(folder), model=Component("unet", {"width": 4}), loss=Component("pixel_cross_entropy")
    ),
    "pixels, augmented": lambda folder: small_trial(
        data=pictures(folder),
        model=Component("unet", {"width": 4, "depth": 1}),
        loss=Component("pixel_cross_entropy"),
        augmentation=Component("flip_and_crop", {"multiplicity": 2, "padding": 2}),
        epochs=1,
    ),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_of_every_task(name: str, tmp_path: Path) -> None:
    """What is stored of each test example gives the evaluation again, and is what the stored model predicts.

    The best constant, which is the same at every epoch, is computed once.
    """
    (tmp_path / "data").mkdir()
    spec, root = TRIALS[name](tmp_path / "data"), str(tmp_path / "trial")
    result, files = run_trial(spec, root), TrialFiles(root)
    evaluation, outcomes = result.evaluation, read_outcomes(files.outcomes)
    assert isinstance(outcomes, ScoredOutcomes)
    assert evaluation.accuracy is None
    assert {epoch.test.constant for epoch in result.history} == {None}
    assert evaluation.counts is None
    assert evaluation.fairness == {}
    task = TASKS[evaluation.task]
    assert evaluation.scores.keys() == {score.name for score in task.scores}
    for score in task.scores:
        assert evaluation.scores[score.name] == pytest.approx(float(score.of(outcomes.kept.sum(0))))
        for group in evaluation.groups:
            mine = outcomes.groups == outcomes.group_names.index(group.name)
            assert group.examples == mine.sum()
            assert group.scores[score.name] == pytest.approx(float(score.of(outcomes.kept[mine].sum(0))))
    source = load_source(spec.data)
    at = [source.train.example_ids.tolist().index(each) for each in outcomes.example_ids.tolist()]
    outputs = torch.from_numpy(load_trained(files, spec).logits(source.train.features[at]))
    labels = as_targets(source.train.labels[at])
    assert evaluation.constant == pytest.approx(task.constant(labels, load_dataset(spec.data).class_names))
    np.testing.assert_allclose(task.kept(outputs, labels).numpy(), outcomes.kept, rtol=1e-4, atol=1e-4)


def test_an_own_source_has_a_task() -> None:
    rows, targets = np.eye(6, dtype=np.float32), np.arange(6.0)[:, None] / 4.0
    source = Source("own", make_split(rows, targets), None, ("all",), ("y",), task="regression")
    assert source.train.labels.dtype == torch.float32
    assert source.train.groups.tolist() == [0] * 6


@pytest.mark.parametrize(
    ("task", "labels", "names", "message"),
    [
        ("regression", np.ones((4, 2)), ("y",), r"have shape \(4, 2\) .* regression takes float32 \[n, 1\]"),
        ("regression", np.arange(4), ("y",), "regression takes float32"),
        ("regression", np.array([[1.0], [np.nan], [0.0], [0.0]]), ("y",), "a number that is not finite; leave such"),
        ("multi_label", np.full((4, 2), 2), ("a", "b"), "hold a number besides 0 and 1"),
        ("multi_label", np.zeros((4, 2)), ("a", "b"), "multi_label takes int64"),
        ("language_modelling", np.full((4, 3), 9), ("a", "b"), "must be tokens from 0 to 1, or -100"),
        ("language_modelling", np.zeros(4, np.int64), ("a", "b"), "language_modelling takes int64"),
        ("segmentation", np.full((4, 2, 2), 2), ("a", "b"), "must be classes from 0 to 1, or -100"),
        ("segmentation", np.zeros((4, 2), np.int64), ("a", "b"), "segmentation takes whole numbers"),
        ("classification", np.zeros((4, 2), np.int64), ("a", "b"), "must be int64 with one class for each example"),
        ("regressions", np.zeros((4, 1)), ("y",), "unknown task 'regressions'; did you mean 'regression'"),
        ("regression", np.zeros((4, 1)), (), "classes of 'own' must be at least 1"),
    ],
)
def test_labels_of_another_task_are_refused(task: str, labels: Any, names: tuple[str, ...], message: str) -> None:
    split = make_split(np.eye(4, dtype=np.float32), labels, np.zeros(4, np.int64))
    with pytest.raises(InvalidInput, match=message):
        Source("own", split, None, ("all",), names, task=task)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"label": ["y", "z"]}, "label names 2 columns, but classification has one"),
        ({"label": [], "task": "regression"}, "must be one column or several different ones"),
        ({"label": ["y", "y"], "task": "regression"}, "must be one column or several different ones"),
        ({"label": "red", "task": "regression", "group": "red", "groups": [0, 1]}, "regression takes numbers"),
        ({"label": ["red", "y"], "task": "multi_label"}, "'y' has a value besides 0 and 1"),
        (
            {"label": "y", "task": "regression", "classes": [0, 1]},
            "`classes` are of classification, but the task is re",
        ),
        ({"label": "y", "task": "regression", "group": None}, "`groups` declares values of groups, but no column"),
        ({"label": "y", "task": "multilabel"}, "task is 'multilabel': did you mean 'multi_label'"),
    ],
)
def test_mistakes_in_tables_are_named(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_source(table(tmp_path, **params))


def test_targets_with_a_range_are_scaled_and_cut(tmp_path: Path) -> None:
    raw = load_source(table(tmp_path, label="y", task="regression", features=["x0"], ranges={"x0": [-3, 3]}))
    spans = {"x0": [-3, 3], "y": [-1, 1]}
    scaled = load_source(table(tmp_path, label="y", task="regression", features=["x0"], ranges=spans))
    assert torch.allclose(scaled.train.labels, ((raw.train.labels + 1.0) / 2.0).clamp(0.0, 1.0), atol=1e-6)
    assert raw.notes == scaled.notes == ()
    assert raw.class_names == ("y",)
