"""What was shown of a model in whole batches is remembered by its structure and code, in this process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from tests.workers.brute_force import per_example_loss
from workers.gradients import GradientEngine
from workers.gradients.proofs import digest_of
from workers.imports import UserCode, UserModule, import_function

MIXES = "DPSWEEP_TEST_MIXES"
"""While this variable is set, `Sized` mixes the rows of batches of more than four. No digest sees it."""

OTHERS_HELPER = "def helper(x):\n    return {}\n\ndef loss():\n    return lambda output, y: helper(output).sum(1)\n"


class Sized(nn.Module):
    """A layer that mixes rows where the environment says so."""

    def __init__(self, scale: float = 1.0, width: int = 3) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, width), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out + out.mean(0) if MIXES in os.environ and len(x) > 4 else out


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 5), torch.arange(count) % 3


def test_whole_batches_are_shown_once_until_model_or_size_change(monkeypatch: pytest.MonkeyPatch) -> None:
    GradientEngine(Sized(), per_example_loss).norms(*rows(20))
    monkeypatch.setenv(MIXES, "1")
    GradientEngine(Sized(), per_example_loss).norms(*rows(20))
    for model, count in ((Sized(), 21), (Sized(scale=2.0), 20), (Sized(width=4), 20), (Sized().double(), 20)):
        x, y = rows(count)
        with pytest.raises(InvalidInput, match="of some examples depend on others"):
            GradientEngine(model, per_example_loss).norms(x.to(model.layer.weight.dtype), y)
    with pytest.raises(InvalidInput, match="of some examples depend on others"):
        GradientEngine(Sized(), lambda output, y: per_example_loss(output, y)).norms(*rows(20))


def digest(model: nn.Module, loss: object = per_example_loss, width: int = 5, *settings: object) -> str:
    return digest_of(model, loss, torch.zeros(7, width), torch.zeros(7), *settings)


def _frozen(model: nn.Module) -> nn.Module:
    model.get_parameter("layer.bias").requires_grad_(False)
    return model


def _with(model: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(model, name, value)
    return model


DIFFERENT: dict[str, Callable[[], str]] = {
    "mode": lambda: digest(Sized().eval()),
    "mode of a part": lambda: digest(_with(Sized(), "layer", nn.Linear(5, 3).eval())),
    "shape of a row": lambda: digest(Sized(), width=6),
    "loss": lambda: digest(Sized(), lambda output, y: output[:, 0]),
    "settings": lambda: digest(Sized(), per_example_loss, 5, 2),
    "frozen": lambda: digest(_frozen(Sized())),
    "an attribute": lambda: digest(_with(Sized(), "scale", 1.5)),
    "a new attribute": lambda: digest(_with(Sized(), "tensor", torch.ones(3).numpy())),
    "a forward of its own": lambda: digest(_with(Sized(), "call", lambda x: x + x.mean(0))),
    "another class of a part": lambda: digest(_with(Sized(), "layer", Sized())),
}


def test_values_of_parameters_and_the_number_of_rows_are_not_part_of_the_digest() -> None:
    assert digest(Sized()) == digest(Sized())


@pytest.mark.parametrize("name", DIFFERENT)
def test_everything_else_is(name: str) -> None:
    assert DIFFERENT[name]() != digest(Sized())


def test_code_is_read_as_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(Sized())
    monkeypatch.setattr(Sized, "forward", lambda self, x: self.layer(x - x.mean(0)))
    assert digest(Sized()) != before


def test_code_that_a_model_or_a_loss_calls_in_the_users_files_is_part_of_it(tmp_path: Path) -> None:
    digests = set()
    for number, does in enumerate(("x", "x + x.mean(0)")):
        file = tmp_path / str(number) / "own.py"
        file.parent.mkdir()
        file.write_text(OTHERS_HELPER.format(does))
        code = UserCode((UserModule(str(file)),))
        digests.add(digest(Sized(), import_function(f"{file}:loss", "loss", code)()))
    assert len(digests) == 2
