"""Per-example losses against torch's own and against the definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from accounting.errors import InvalidInput
from workers.losses import LOSSES, build_loss
from workers.spec import Component

LOGITS = torch.randn(50, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(50) % 5


@pytest.mark.parametrize("name", LOSSES)
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


def test_binary_logistic_with_one_and_with_two_logits() -> None:
    loss, labels = build_loss(Component("binary_logistic")), LABELS % 2
    one = functional.binary_cross_entropy_with_logits(LOGITS[:, 0], labels.double(), reduction="none")
    assert torch.allclose(loss(LOGITS[:, :1], labels), one)
    assert torch.allclose(
        loss(LOGITS[:, :2], labels), functional.cross_entropy(LOGITS[:, :2], labels, reduction="none")
    )


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInput, match="binary_logistic takes two classes, but there are 5"):
        build_loss(Component("binary_logistic"))(LOGITS, LABELS)
    with pytest.raises(InvalidInput, match="unknown loss 'hing'; did you mean 'hinge'"):
        build_loss(Component("hing"))
