"""Per-example losses against torch's own and against the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp, softmax
from sklearn.metrics import hinge_loss, log_loss
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.spec import Component
from dpsweep.workers.tasks.losses import LOSSES, TASK_OF, Loss, build_loss, of_each_row

LOGITS = torch.randn(50, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(50) % 5


OF_CLASSES = tuple(name for name in LOSSES if TASK_OF[name] == "classification")


@pytest.mark.parametrize("name", OF_CLASSES)
def test_one_loss_per_example_each_its_own(name: str) -> None:
    loss = build_loss(Component(name))
    logits, labels = LOGITS[:, :2], LABELS % 2
    together = loss(logits, labels)
    assert together.shape == (50,)
    alone = torch.cat([loss(logits[i : i + 1], labels[i : i + 1]) for i in range(50)])
    assert torch.allclose(together, alone)
    assert (together >= 0).all()


def test_cross_entropy() -> None:
    expected = -LOGITS.log_softmax(1)[torch.arange(50), LABELS]
    assert torch.allclose(build_loss(Component("cross_entropy"))(LOGITS, LABELS), expected)


@pytest.mark.parametrize("margin", [1.0, 0.3])
def test_hinge(margin: float) -> None:
    right = LOGITS[torch.arange(50), LABELS][:, None]
    violations = (margin - right + LOGITS).clamp(min=0)
    violations[torch.arange(50), LABELS] = 0.0
    loss = build_loss(Component("hinge", {"margin": margin}))
    assert torch.allclose(loss(LOGITS, LABELS), violations.sum(1) / 5)
    torchs = functional.multi_margin_loss(LOGITS, LABELS, margin=margin, reduction="none")
    assert torch.allclose(loss(LOGITS, LABELS), torchs)


def test_binary_logistic_with_one_and_with_two_logits() -> None:
    loss, labels = build_loss(Component("binary_logistic")), LABELS % 2
    one = functional.binary_cross_entropy_with_logits(LOGITS[:, 0], labels.double(), reduction="none")
    assert torch.allclose(loss(LOGITS[:, :1], labels), one)
    assert torch.allclose(
        loss(LOGITS[:, :2], labels), functional.cross_entropy(LOGITS[:, :2], labels, reduction="none")
    )


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
class TestFloat32:
    """Against scikit-learn and closed forms, at logits as large as an unlucky step makes them."""

    def logits(self, classes: int, scale: float) -> Tensor:
        return (scale * torch.randn(200, classes, generator=torch.Generator().manual_seed(1))).requires_grad_()

    def losses(self, component: Component, logits: Tensor, labels: Tensor) -> tuple[Any, Any]:
        losses = build_loss(component)(logits, labels)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert losses.dtype == torch.float32
        assert gradient.isfinite().all()
        return losses.detach().double().numpy(), gradient.double().numpy()

    def test_cross_entropy(self, scale: float) -> None:
        logits, labels = self.logits(5, scale), torch.arange(200) % 5
        losses, gradient = self.losses(Component("cross_entropy"), logits, labels)
        exact = logits.detach().double().numpy()
        expected = logsumexp(exact, axis=1) - exact[np.arange(200), labels]
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6 * scale)
        assert gradient == pytest.approx(softmax(exact, axis=1) - np.eye(5)[labels], abs=1e-5)
        if scale == 1.0:  # scikit-learn cuts probabilities off at the smallest float
            assert losses.mean() == pytest.approx(log_loss(labels, softmax(exact, axis=1)), rel=1e-6)

    @pytest.mark.parametrize("outputs", [1, 2])
    def test_binary_logistic(self, outputs: int, scale: float) -> None:
        logits, labels = self.logits(outputs, scale), torch.arange(200) % 2
        losses, gradient = self.losses(Component("binary_logistic"), logits, labels)
        exact = logits.detach().double().numpy()
        decision = exact[:, -1] - (exact[:, 0] if outputs == 2 else 0.0)
        sign = np.where(labels == 1, 1.0, -1.0)
        assert losses == pytest.approx(np.logaddexp(0.0, -sign * decision), rel=1e-5, abs=1e-6)
        assert gradient[:, -1] == pytest.approx(-sign * expit(-sign * decision), abs=1e-5)
        if scale == 1.0:
            assert losses.mean() == pytest.approx(log_loss(labels, expit(decision)), rel=1e-6)

    def test_hinge_of_two_classes_is_half_of_the_binary_one(self, scale: float) -> None:
        logits, labels = self.logits(2, scale), torch.arange(200) % 2
        losses, _ = self.losses(Component("hinge"), logits, labels)
        decision = (logits[:, 1] - logits[:, 0]).detach().double().numpy()
        assert 2.0 * losses.mean() == pytest.approx(hinge_loss(labels, decision), rel=1e-5)

    def test_hinge_of_many_classes(self, scale: float) -> None:
        logits, labels = self.logits(5, scale), torch.arange(200) % 5
        losses, gradient = self.losses(Component("hinge"), logits, labels)
        exact = logits.detach().double().numpy()
        others = 1.0 - np.eye(5)[labels]
        violations = np.maximum(0.0, 1.0 - exact[np.arange(200), labels][:, None] + exact) * others
        assert losses == pytest.approx(violations.sum(1) / 5, rel=1e-5)
        active = (violations > 0.0) / 5.0
        assert gradient == pytest.approx(active - active.sum(1, keepdims=True) * np.eye(5)[labels], abs=1e-6)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_logits_that_are_not_numbers_have_no_loss(name: str) -> None:
    logits = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [0.0, 1.0]], requires_grad=True)
    losses = build_loss(Component(name))(logits, torch.tensor([0, 0, 0]))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [True, True, False]
    assert gradient[2].isfinite().all()


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf, "wide"])
def test_impossible_margins(margin: float) -> None:
    with pytest.raises(InvalidInput, match="margin of hinge is"):
        build_loss(Component("hinge", {"margin": margin}))


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInput, match="binary_logistic takes two classes, but there are 5"):
        build_loss(Component("binary_logistic"))(LOGITS, LABELS)
    with pytest.raises(InvalidInput, match="unknown loss 'hing'; did you mean 'hinge'"):
        build_loss(Component("hing"))


def test_a_built_in_loss_refuses_further_columns() -> None:
    loss = build_loss(Component("cross_entropy"), task="classification", columns=LOGITS.shape[1])
    assert torch.equal(loss(LOGITS, LABELS), build_loss(Component("cross_entropy"))(LOGITS, LABELS))
    with pytest.raises(InvalidInput, match=r"returns \d+ outputs for \d+; further columns.*need a loss of your own"):
        loss(torch.cat((LOGITS, LOGITS), 1), LABELS)


@pytest.mark.parametrize(
    "module",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(),
        nn.KLDivLoss(reduction="batchmean"),
    ],
    ids=repr,
)
def test_a_module_is_taken_as_of_each_row_alone(module: nn.Module) -> None:
    """Positions that a row ignores do not make its loss smaller."""
    outputs = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20).view(4, 5) ** 2 % 7 % 3 if isinstance(module, nn.CrossEntropyLoss) else outputs.softmax(1)
    alone = [module(row[None], label[None]) for row, label in zip(outputs, labels, strict=True)]
    torch.testing.assert_close(of_each_row(module)(outputs, labels), torch.stack(alone))


@pytest.mark.parametrize("loss", [of_each_row(nn.MSELoss()), of_each_row(nn.L1Loss()), LOSSES["mse"]()])
def test_a_column_of_outputs_does_not_meet_the_labels_of_other_rows(loss: Loss) -> None:
    with pytest.raises(InvalidInput, match=r"outputs have the shape \[4, 1\] and labels \[4\].* labels\[:, None\]"):
        loss(torch.zeros(4, 1), torch.zeros(4))
    assert loss(torch.zeros(4, 1), torch.ones(4, 1)).tolist() == [1.0] * 4
