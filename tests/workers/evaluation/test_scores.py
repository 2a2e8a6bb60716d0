"""Evaluation against scikit-learn and against definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from sklearn.metrics import accuracy_score, log_loss, recall_score
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Dataset, Source, Tokens, load_dataset, make_split
from dpsweep.workers.data.base import cut
from dpsweep.workers.evaluation.predictions import batches_of, evaluate, predict, slices
from dpsweep.workers.evaluation.rates import GAPS
from dpsweep.workers.evaluation.scores import Evaluation, GroupEvaluation, cost_of_privacy, fairness, shown_groups
from dpsweep.workers.models import build_model
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.tasks import IGNORED
from dpsweep.workers.tasks.losses import build_loss

LOSS = build_loss(Component("cross_entropy"))


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", keep={"8": 0.1}))


@pytest.fixture
def model(digits: Dataset) -> nn.Module:
    return build_model(Component("mlp"), digits, 1)


def test_agrees_with_scikit_learn(digits: Dataset, model: nn.Module) -> None:
    found = evaluate(model, digits.test, digits, LOSS)
    with torch.no_grad():
        probabilities = model(digits.prepare(digits.test.features)).double().softmax(1).numpy()
    labels, predicted = digits.test.labels.numpy(), probabilities.argmax(1)
    assert found.accuracy == pytest.approx(accuracy_score(labels, predicted))
    assert found.loss == pytest.approx(log_loss(labels, probabilities), rel=1e-5)
    recalls = recall_score(labels, predicted, average=None)
    assert [group.accuracy for group in found.groups] == pytest.approx(list(recalls))
    assert [group.name for group in found.groups] == list(digits.group_names)
    assert sum(group.examples for group in found.groups) == len(digits.test)
    assert found.fairness == pytest.approx(
        {
            "accuracy_gap": recalls.max() - recalls.min(),
            "worst_group_accuracy": recalls.min(),
            "worst_group_balanced_accuracy": recalls.min(),
        }
    )


def test_batches_do_not_matter_and_the_model_is_left_as_it_was(digits: Dataset, model: nn.Module) -> None:
    model.train()
    whole = len(digits.test)
    one, other = (predict(model, digits.test, digits, LOSS, slices(whole, size)) for size in (7, 5000))
    assert np.array_equal(one.classes, other.classes)
    assert np.allclose(one.losses, other.losses, atol=1e-6)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("width", "rows"), [(8, 1024), (2**13, 128), (2**17, 16)])
def test_fewer_examples_at_once_where_layers_are_wide(digits: Dataset, width: int, rows: int) -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1).mean(1, keepdim=True).expand(-1, width).contiguous()

    batches = batches_of(nn.Sequential(Wide(), Wide()), digits.test, digits)
    assert [batch.stop - batch.start for batch in batches][:-1] == [rows] * (len(batches) - 1)
    assert (batches[0].start, batches[-1].stop) == (0, len(digits.test))


def test_a_model_with_dropout_is_evaluated_without(digits: Dataset, model: nn.Module) -> None:
    dropping = nn.Sequential(model, nn.Dropout(0.9))
    assert evaluate(dropping, digits.test, digits, LOSS) == evaluate(dropping, digits.test, digits, LOSS)


def test_json_round_trip(digits: Dataset, model: nn.Module) -> None:
    adapter = TypeAdapter(Evaluation)
    found = evaluate(model, digits.test, digits, LOSS)
    assert adapter.validate_json(adapter.dump_json(found)) == found


def test_a_group_without_examples_has_no_entry(digits: Dataset, model: nn.Module) -> None:
    without_three = digits.test.select(np.flatnonzero(digits.test.groups.numpy() != 3))
    names = [group.name for group in evaluate(model, without_three, digits, LOSS).groups]
    assert names == [name for name in digits.group_names if name != "3"]


def test_an_empty_split_is_refused(digits: Dataset, model: nn.Module) -> None:
    with pytest.raises(InvalidInput, match="without examples"):
        evaluate(model, digits.test.select(np.array([], dtype=np.int64)), digits, LOSS)


def test_one_logit_decides_two_classes() -> None:
    rows = np.array([[-2.0], [3.0], [1.0], [-1.0]], dtype=np.float32)
    source = Source("line", make_split(rows, [0, 1, 1, 1], [0, 0, 1, 1]), None, ("a", "b"), ("no", "yes"))
    dataset = cut(source, DataSpec("line", test_fraction=0.5))
    found = predict(nn.Identity(), source.train, dataset, build_loss(Component("binary_logistic")))
    assert found.classes.tolist() == [0, 1, 1, 0]


def test_tokens_reach_the_model_as_integers() -> None:
    tokens = np.random.default_rng(0).integers(0, 30, (40, 6))
    source = Source("text", make_split(tokens, np.arange(40) % 2), None, ("a", "b"), ("a", "b"), Tokens())
    dataset = cut(source, DataSpec("text"))
    assert dataset.prepare(dataset.train.features).dtype == torch.int64
    model = build_model(Component("transformer", {"vocabulary": 30, "width": 8, "depth": 1}), dataset, 0)
    assert 0.0 <= evaluate(model, dataset.test, dataset, LOSS).main <= 1.0


def test_texts_without_a_token_to_predict_have_no_loss() -> None:
    """Half of group b has none: its loss is that of its other texts, which have one token each."""
    tokens, groups = np.random.default_rng(0).integers(0, 5, (40, 2)), np.repeat([0, 1, 2], [20, 10, 10])
    labels = np.where((np.arange(40) < 25)[:, None], np.stack([np.full(40, IGNORED), tokens[:, 0]], 1), IGNORED)
    train, test = (make_split(tokens, labels, groups, first_id=first) for first in (0, 40))
    source = Source("text", train, test, ("a", "b", "c"), tuple("vwxyz"), Tokens(5), task="language_modelling")
    dataset = cut(source, DataSpec("text"))
    assert dataset.notes == ("15 of 40 test examples have no label that is counted, and so no loss",)
    model = build_model(Component("language_model", {"width": 8, "heads": 2}), dataset, 0)
    found = evaluate(model, dataset.test, dataset, build_loss(Component("causal_lm")))
    assert found.loss == pytest.approx(found.scores["token_loss"], rel=1e-6)
    a, b, c = found.groups
    assert [each.loss for each in (a, b)] == pytest.approx([each.scores["token_loss"] for each in (a, b)], rel=1e-6)
    assert (np.isnan(c.loss), c.scores) == (True, {})
    with pytest.raises(InvalidInput, match="no test example has a label that is counted"):
        cut(replace(source, test=make_split(tokens[25:], labels[25:], first_id=40)), DataSpec("text"))


class TestFairness:
    counts = np.array([[[1, 1], [0, 2]], [[2, 0], [1, 1]]])

    def test_two_classes(self) -> None:
        found = fairness(self.counts)
        assert found["accuracy_gap"] == 0.0
        assert found["worst_group_accuracy"] == 0.75
        assert found["demographic_parity_difference"] == 3 / 4 - 1 / 4
        assert found["equalized_odds_difference"] == 0.5

    def test_groups_that_are_the_classes_have_no_parity(self) -> None:
        assert set(fairness(np.array([[[3, 1], [0, 0]], [[0, 0], [1, 3]]]))) == set(GAPS)

    def test_what_is_not_defined_is_left_out(self) -> None:
        nobody = np.array([[[5, 0], [5, 0]]] * 2)
        assert "demographic_parity_ratio" not in fairness(nobody)
        assert fairness(nobody)["demographic_parity_difference"] == 0.0
        assert fairness(np.zeros((0, 2, 2), dtype=np.int64)) == {}

    def test_one_group_is_not_equal_to_others(self) -> None:
        assert fairness(self.counts[:1]) == {
            "worst_group_accuracy": 0.75,
            "worst_group_balanced_accuracy": 0.75,
            "worst_group_true_positive_rate": 1.0,
        }


def test_cost_of_privacy_is_the_change_of_accuracy_by_group(digits: Dataset, model: nn.Module) -> None:
    private = evaluate(model, digits.test, digits, LOSS)
    baseline = evaluate(build_model(Component("mlp"), digits, 2), digits.test, digits, LOSS)
    cost = cost_of_privacy(private, baseline)
    assert cost["8"] == pytest.approx(private.groups[8].main - baseline.groups[8].main)
    assert list(cost) == list(digits.group_names)
    assert set(cost_of_privacy(private, private).values()) == {0.0}


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([36, 40, 12], [0, 1, 2]),
        ([36, 2, 40], [2]),  # 2 alone would follow from the total: the next smallest joins it
        ([36, 2, 40, 9], [0, 2]),
        ([5, 6, 40, 50], [2, 3]),
        ([0, 12, 30], [1, 2]),
        ([3, 30], []),
        ([3], []),
    ],
)
def test_small_groups_are_left_out_and_follow_from_no_total(sizes: list[int], shown: list[int]) -> None:
    found = shown_groups(np.array(sizes), 10).tolist()
    assert found == shown
    rest = sum(sizes) - sum(sizes[group] for group in found)
    assert rest == 0 or rest >= 10 or not found


def test_two_people_are_no_group_to_be_shown(digits: Dataset) -> None:
    test = digits.test
    two = np.flatnonzero(test.groups.numpy() == 3)[:2]
    few = test.select(np.sort(np.concatenate([np.flatnonzero(test.groups.numpy() != 3), two])))
    model = build_model(Component("mlp"), digits, 1)
    found = evaluate(model, few, digits, LOSS)
    assert "3" not in {group.name for group in found.groups}
    assert len(found.groups) == 8, "the smallest of the others is left out with it"
    assert {group.name for group in evaluate(model, few, digits, LOSS, min_group_size=1).groups} >= {"3"}


def test_the_cost_of_privacy_is_negative_where_a_group_lost() -> None:
    private, baseline = (
        Evaluation(0.5, 1.0, tuple(GroupEvaluation(name, 10, accuracy, 1.0) for name, accuracy in groups.items()), {})
        for groups in ({"a": 0.5, "b": 0.75, "new": 0.5}, {"a": 0.75, "b": 0.5})
    )
    assert cost_of_privacy(private, baseline) == {"a": -0.25, "b": 0.25}
