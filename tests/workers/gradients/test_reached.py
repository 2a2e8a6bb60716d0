"""Trainable parameters that no example gives a gradient are refused; those that get one at other values are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.reached import require_reached
from tests.workers.devices import DEVICE

WIDTH, ROWS = 6, 40
PLACES = (slice(3), slice(3, 20), slice(20, ROWS))
Forward = Callable[[nn.Module, Tensor], Tensor]
WHY = "needs transformers and peft: pip install 'dpsweep[models]'"


class Parts(nn.Module):
    """A head and one more part, used as ``forward`` says."""

    def __init__(self, part: nn.Module, run: Forward) -> None:
        super().__init__()
        self.part, self.head, self.run = part, nn.Linear(WIDTH, 3), run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.run(self.part, x))
        return out


class Factors(nn.Module):
    """x + x a b with a random and b of zeros, or both of zeros."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(scale * torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.a @ self.b


class Experts(nn.ModuleList):
    """Two linear layers; the second takes the examples whose first feature is above 2."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 2.0
        out = torch.empty_like(x)
        for rows, expert in zip((~rare, rare), self, strict=True):
            if rows.any():
                out = out.index_put((rows.nonzero()[:, 0],), expert(x[rows]))
        return out


class Temperature(nn.Module):
    """A scale that is cut at 4, and begins at ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value.clamp(max=4.0)


def dead() -> nn.Module:
    """A layer whose ReLUs are all off."""
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(layer.bias, -50.0)
    return layer


def inputs(rare: int) -> Tensor:
    """Rows of which the one at ``rare`` has a first feature above 2."""
    x = torch.randn(ROWS, WIDTH).clamp(-2.0, 2.0)
    x[rare, 0] = 3.0
    return x


def checked(
    part: nn.Module, run: Forward = lambda part, x: part(x), x: Tensor | None = None, allowed: Sequence[str] = ()
) -> tuple[str, ...]:
    torch.manual_seed(1)
    model, rows = Parts(part, run).to(DEVICE), inputs(0) if x is None else x
    labels = torch.arange(ROWS) % 3
    return require_reached(
        model, lambda place: functional.cross_entropy(model(rows[place]), labels[place]), PLACES, allowed
    )


@pytest.mark.parametrize(
    "part",
    [Factors(), Experts(), nn.Embedding(50, WIDTH)],
    ids=["one factor is 0", "experts", "tokens that do not occur"],
)
def test_what_gets_a_gradient_later_or_from_other_examples_is_accepted(part: nn.Module) -> None:
    x = torch.randint(0, 4, (ROWS,)) if isinstance(part, nn.Embedding) else inputs(rare=37)
    assert checked(part, x=x) == ()


@pytest.mark.parametrize(
    "run",
    [lambda part, x: x + 0.0 * part(x), lambda part, x: x + part(x).detach(), lambda part, x: x],
    ids=["times 0", "detached", "unused"],
)
def test_what_gets_no_gradient_is_refused_with_its_name(run: Forward) -> None:
    line = r"its parameters part\.weight, part\.bias do not change the loss: .* set requires_grad_\(False\) on them"
    with pytest.raises(InvalidInput, match=line):
        checked(nn.Linear(WIDTH, WIDTH), run)


def test_what_is_frozen_needs_no_gradient() -> None:
    assert checked(nn.Linear(WIDTH, WIDTH).requires_grad_(False), lambda part, x: x) == ()


def test_parameters_that_the_sweep_names_need_no_gradient() -> None:
    x = inputs(0).clamp(max=2.0)
    with pytest.raises(InvalidInput, match=r"parameters part\.1\.weight, part\.1\.bias do not .* without_gradient"):
        checked(Experts(), x=x)
    (allowed,) = checked(Experts(), x=x, allowed=["part.*"])
    assert allowed == "gives part.1.weight, part.1.bias no gradient, as without_gradient allows"


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (Factors(scale=0.0), "part.a, part.b"),
        (Temperature(9.0), "part.value"),
        (nn.Sequential(dead(), nn.ReLU()), "part.0.weight, part.0.bias, head.weight"),
    ],
    ids=["factors of zeros", "a clamped scale", "units that are off"],
)
def test_what_gets_a_gradient_at_other_values_only_is_said_to_wait_for_noise(part: nn.Module, names: str) -> None:
    (waiting,) = checked(part)
    assert waiting.startswith(f"gives {names} no gradient until noise has moved parameters")


def test_a_loss_that_is_constant_on_the_examples_refuses_nothing() -> None:
    model = nn.Linear(WIDTH, 3)
    x = inputs(0)
    (nothing,) = require_reached(model, lambda place: (0.0 * model(x[place])).sum(1), PLACES)
    assert nothing.startswith("gets no gradient from the examples that were tried")


def test_the_check_does_not_look_at_more_examples_than_it_needs() -> None:
    seen: list[slice] = []
    model, x = nn.Linear(WIDTH, 3), inputs(0)

    def losses(place: slice) -> Tensor:
        seen.append(place)
        total: Tensor = model(x[place]).square().sum(1)
        return total

    assert require_reached(model, losses, PLACES) == ()
    assert seen == [PLACES[0]]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4},
    "VeraConfig": {"r": 4},
    "LoHaConfig": {"r": 4},
    "OFTConfig": {"oft_block_size": 4},
    "IA3Config": {"feedforward_modules": []},
    "FourierFTConfig": {"n_frequency": 20},
}


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "PromptTuningConfig"])
def test_adapters_of_peft_train_as_they_begin_and_are_refused_when_frozen(name: str) -> None:
    peft = pytest.importorskip("peft", reason=WHY, exc_type=ImportError)
    transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ImportError)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    targets = {"target_modules": ["query", "value"], **CONFIGURATIONS.get(name, {})}
    options: dict[str, Any] = targets if name in CONFIGURATIONS else {"num_virtual_tokens": 4}
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3
    )
    adapter = getattr(peft, name)(task_type="SEQ_CLS", **options)
    with torch.device("cpu"):  # peft draws there
        model = peft.get_peft_model(transformers.BertForSequenceClassification(config), adapter)
    model.to(DEVICE)
    x, labels = torch.randint(1, 50, (ROWS, 8)), torch.arange(ROWS) % 3

    def losses(place: slice) -> Tensor:
        return functional.cross_entropy(model(input_ids=x[place]).logits, labels[place])

    assert require_reached(model, losses, PLACES) == ()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("classifier" in parameter_name and parameter.requires_grad)
    with pytest.raises(InvalidInput, match=r"its adapters .* are all frozen, so that only .*classifier"):
        require_reached(model, losses, PLACES)
