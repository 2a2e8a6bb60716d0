"""What was shown of a model in whole batches is remembered by its structure and code, in this process alone."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients import proofs
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.proofs import digest_of_structure
from dpsweep.workers.machine.folders import NODE_FOLDER
from dpsweep.workers.own_code.code_digests import own_loaded_modules
from dpsweep.workers.own_code.imports import UserCode, UserModule, import_function
from tests.workers.brute_force import per_example_loss

MIXES = "DPSWEEP_TEST_MIXES"
"""While this variable is set, `Sized` mixes the rows of batches of more than four. No digest sees it."""

PASSES = itertools.count()
"""Counts passes of `Counted`, unseen by the digest and by what is kept."""

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


@pytest.mark.long
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


class Counted(nn.Module):
    """A layer that mixes rows of batches with a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        next(PASSES)
        out: Tensor = self.layer(x)
        return out + 1e-9 * out.mean(0) if bool((x > 100.0).any()) else out


def passes_of_a_first_batch(x: Tensor, y: Tensor, model: nn.Module | None = None) -> int:
    before = next(PASSES)
    GradientEngine(model or Counted(), per_example_loss).norms(x, y)
    return next(PASSES) - before - 1


def test_of_a_model_that_was_shown_the_first_batch_is_checked_by_few_passes() -> None:
    shown, checked = (passes_of_a_first_batch(*rows(20)) for _ in range(2))
    assert shown >= 12
    assert checked <= 3, "four examples, the same with others replaced, and the batch itself"


@pytest.mark.long
def test_what_was_shown_in_a_run_is_known_to_its_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path / "data"))
    x, y = torch.randn(20, 5) * 0.5, rows(20)[1]
    monkeypatch.setattr(proofs, "_PROOFS", {})  # as in another process
    shown = passes_of_a_first_batch(x, y)
    (stored,) = (tmp_path / "data" / "proofs").iterdir()
    assert (stored.read_text(), stored.stat().st_mode & 0o777) == ("20 aligned", 0o600)
    monkeypatch.setattr(proofs, "_PROOFS", {})
    assert passes_of_a_first_batch(x, y) <= 3
    for content in ("19 aligned", "20", "", "20 aligned\n\n", "\xff"):
        stored.write_bytes(content.encode("latin-1"))
        monkeypatch.setattr(proofs, "_PROOFS", {})
        assert passes_of_a_first_batch(x, y) == shown, content


def test_a_folder_that_others_can_enter_becomes_private_and_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run is this user's; whatever else stands there, everything is shown again."""
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path / "data"))
    monkeypatch.setattr(proofs, "_PROOFS", {})
    shown = passes_of_a_first_batch(*rows(20))
    (tmp_path / "data" / "proofs").rename(tmp_path / "elsewhere")
    (tmp_path / "data" / "proofs").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(proofs, "_PROOFS", {})
    assert passes_of_a_first_batch(*rows(20)) == shown


def test_a_model_with_an_object_that_is_not_looked_into_is_shown_every_time() -> None:
    """A lock has no content that a digest could hold, and neither has an object of another package."""
    assert digest(_with(Sized(), "lock", threading.Lock())) is None
    assert digest(_with(Sized(), "pattern", [{"a": re.compile("b")}])) is None
    assert digest(_with(Sized(), "hook", {"a": lambda x: x})) is not None
    shown, again = (passes_of_a_first_batch(*rows(20), _with(Counted(), "lock", threading.Lock())) for _ in range(2))
    assert shown == again >= 12


def test_what_depends_on_the_batch_is_found_in_a_model_that_was_shown() -> None:
    passes_of_a_first_batch(*rows(20))
    x, y = rows(20)
    with pytest.raises(InvalidInput, match="of some examples depend on others"):
        passes_of_a_first_batch(x + 200.0, y)


def digest(model: nn.Module, loss: object = per_example_loss, width: int = 5, *settings: object) -> str | None:
    return digest_of_structure(model, loss, torch.zeros(7, width), torch.zeros(7), *settings)


def _frozen(model: nn.Module) -> nn.Module:
    model.get_parameter("layer.bias").requires_grad_(False)
    return model


def _with(model: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(model, name, value)
    return model


DIFFERENT: dict[str, Callable[[], str | None]] = {
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


@pytest.mark.thinned(4)
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


INSIDE = {
    "a decorator that does not tell what it wraps": "def around(function):\n"
    "    return lambda *given: function(*given)\n\n"
    "class Layer(Sized):\n    @around\n    def forward(self, x):\n        return self.layer({})\n",
    "a decorator of a decorator": "def around(function):\n"
    "    return functools.wraps(function)(lambda *given: function(*given))\n\n@around\n@around\n"
    "def center(x):\n    return {}\n\n"
    "class Layer(Sized):\n    def forward(self, x):\n        return self.layer(center(x))\n",
    "a class in a class": "class Layer(Sized):\n    class Part:\n        @staticmethod\n        def of(x):\n"
    "            return {}\n\n    def forward(self, x):\n        return self.layer(self.Part.of(x))\n",
    "a property": "class Layer(Sized):\n    @property\n    def part(self):\n        return lambda x: {}\n\n"
    "    def forward(self, x):\n        return self.layer(self.part(x))\n",
    "another name for a class": "class First:\n    of = staticmethod(lambda x: x + x.mean(0) if len(x) > 4 else x)\n\n"
    "class Second:\n    of = staticmethod(lambda x: x)\n\nPart = Second if '{}' == 'x' else First\n\n"
    "class Layer(Sized):\n    def forward(self, x):\n        return self.layer(Part.of(x))\n",
    "a bound method": "class Part:\n    def __init__(self):\n        self.of = lambda x: {}\n\n"
    "    def __call__(self, x):\n        return self.of(x)\n    __call__.args = 3\n\npart = Part().__call__\n\n"
    "class Layer(Sized):\n    def forward(self, x):\n        return self.layer(part(x))\n",
    "a partial function": "def part(inner, x):\n    return inner(x)\n\npart = functools.partial(part, lambda x: {})\n\n"
    "class Layer(Sized):\n    def forward(self, x):\n        return self.layer(part(x))\n",
    "a default": "def inner(x):\n    return {}\n\ndef outer(x, inner=inner):\n    return inner(x)\n\ndel inner\n\n"
    "class Layer(Sized):\n    def forward(self, x):\n        return self.layer(outer(x))\n",
}
"""Code of a user's module, in which a function that others hold computes with ``{}``."""


@pytest.mark.parametrize("source", INSIDE.values(), ids=INSIDE)
def test_a_cell_of_a_notebook_that_is_run_again_with_other_code_is_shown_again(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = ModuleType("a_notebook")
    cell.__file__ = "/home/somebody/a_notebook.py"
    monkeypatch.setitem(sys.modules, "a_notebook", cell)
    vars(cell).update(functools=functools, Sized=Sized)
    run_cell(source.format("x"), cell)
    GradientEngine(cell.Layer(5, 3), per_example_loss).norms(*rows(20))
    run_cell(source.format("x + x.mean(0) if len(x) > 4 else x"), cell)
    x, y = rows(20)
    with pytest.raises(InvalidInput, match="of some examples depend on others"):
        GradientEngine(cell.Layer(5, 3), per_example_loss).norms(x, y)


def run_cell(source: str, notebook: ModuleType) -> None:
    exec(compile(source, "<cell>", "exec"), vars(notebook))


def test_packages_of_other_environments_are_not_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("env/lib/python3.12/site-packages", "far_package"), ("python3.12/mine", "near_module")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.py").write_text("def helper(x):\n    return x\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    own = {module.__name__ for module in own_loaded_modules()}
    assert "near_module" in own
    assert "far_package" not in own
