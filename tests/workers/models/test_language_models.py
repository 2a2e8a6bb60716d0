"""Transformers of tokens: padding changes nothing, positions see what they may, rows do not mix, norms are those of a
loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.spec import Component
from dpsweep.workers.tasks import IGNORED
from dpsweep.workers.tasks.losses import build_loss
from tests.workers.brute_force import gradients_one_by_one, norms_of

LENGTH, VOCABULARY = 6, 11
SMALL = {"width": 8, "depth": 2, "heads": 2}


def model_of(name: str, classes: int = VOCABULARY, length: int = LENGTH, **params: object) -> nn.Module:
    offers = {"vocabulary": VOCABULARY, "padding": 0}
    torch.manual_seed(0)
    model = build_for_shape(Component(name, {**SMALL, **params}), (length,), classes, 0, offers=offers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tokens(rows: int = 5) -> Tensor:
    """Texts of 1 to `LENGTH` tokens."""
    found = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return found * (torch.arange(LENGTH) < torch.arange(1, rows + 1)[:, None])


@pytest.mark.parametrize("name", ["transformer", "language_model"])
def test_what_stands_in_the_padding_does_not_matter(name: str) -> None:
    """The same texts in a longer model with equal weights."""
    short, long = model_of(name), model_of(name, length=LENGTH + 3)
    weights = dict(short.state_dict())
    weights["positions.weight"] = torch.cat((weights["positions.weight"], torch.randn(3, 8)))
    long.load_state_dict(weights)
    x = tokens()
    padded = long(torch.cat((x, torch.zeros(len(x), 3, dtype=torch.int64)), 1))
    given = x > 0
    ours, theirs = (short(x)[given], padded[:, :LENGTH][given]) if name == "language_model" else (short(x), padded)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_position_does_not_see_later_ones(causal: bool) -> None:
    model, x = model_of("language_model", causal=causal), tokens().clamp(min=1)
    changed = x.clone()
    changed[:, 3:] = changed[:, 3:] % (VOCABULARY - 1) + 1
    assert torch.allclose(model(x)[:, :3], model(changed)[:, :3], atol=1e-6) == causal


@pytest.mark.parametrize("name", ["transformer", "language_model"])
def test_rows_do_not_mix_and_a_text_without_tokens_is_defined(name: str) -> None:
    model, x = model_of(name), torch.cat((tokens(), torch.zeros(1, LENGTH, dtype=torch.int64)))
    together = model(x)
    assert together.isfinite().all()
    alone = torch.cat([model(x[row : row + 1]) for row in range(len(x))])
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(("name", "loss"), [("language_model", "masked_lm"), ("transformer", "cross_entropy")])
def test_norms_are_those_of_one_example_at_a_time(name: str, loss: str) -> None:
    """Of texts with other numbers of counted positions, one of them without any."""
    model, x, of_row = model_of(name), tokens(), build_loss(Component(loss))
    labels = torch.where((x > 0) & (x % 3 != 0), x, IGNORED) if loss == "masked_lm" else torch.arange(5)
    if loss == "masked_lm":
        labels[2] = IGNORED
    engine = GradientEngine(model, of_row)
    expected = norms_of(gradients_one_by_one(model, x, labels, loss_of=of_row))
    torch.testing.assert_close(engine.norms(x, labels).norms, expected, rtol=1e-4, atol=1e-7)
    assert "per example" not in engine.forms.values()
    assert loss != "masked_lm" or expected[2] == 0.0


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInput, match="language_model takes tokens, but features have shape"):
        build_for_shape(Component("language_model"), (3, 4), 10, 0)
    with pytest.raises(InvalidInput, match="padding is 12, but must be a token of the vocabulary, below 11"):
        build_for_shape(Component("language_model", {"padding": 12}), (4,), 11, 0)
