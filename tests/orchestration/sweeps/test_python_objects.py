"""A sweep that holds functions, classes and numbers of numpy is that which names them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import dpsweep
from dpsweep.orchestration.sweeps.python_objects import Objects
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import Component
from dpsweep.workers.tasks.losses import build_loss
from tests.orchestration.sweeps.cells import run_cells

CELLS = run_cells(
    """
from dataclasses import dataclass
import torch
from torch import nn
from dpsweep.workers.clipping import ClippingMethod, ClipRule

def part(inputs, hidden):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())

class Net(nn.Module):
    def __init__(self, num_classes, hidden=4):
        super().__init__()
        self.layers = nn.Sequential(part(30, hidden), nn.Linear(hidden, num_classes))

    def forward(self, x):
        return self.layers(x)

def rows_loss(outputs, labels, smoothing=0.0):
    return nn.functional.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)

def made_loss(smoothing):
    return lambda outputs, labels: rows_loss(outputs, labels, smoothing)

@dataclass(frozen=True)
class Half(ClippingMethod):
    factor: float = 0.5

    def decide(self, state, noisy_answer, facts):
        bound = state.bound * self.factor
        return ClipRule(sensitivity=bound, weigh=lambda examples: (bound / examples.norms).clamp(max=1.0), bounds={})
"""
)
BASE: dict[str, Any] = {
    "name": "objects",
    "data": "breast_cancer",
    "model": "logistic",
    "sampling": {"method": "poisson", "batch_size": 64},
    "epochs": 1,
    "clipping": "flat",
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"},
    "norms": "off",
}


def plain(**changes: object) -> dict[str, Any]:
    return Objects(Path.cwd()).plain({**BASE, **changes})


def test_numbers_of_numpy_and_ranges_are_numbers_and_lists() -> None:
    found = plain(
        seeds=range(2),
        epochs=np.arange(1, 3),
        clipping={"name": "flat", "bound": np.linspace(0.5, 1, 2)},
        norms=("off",),
    )
    assert found["seeds"] == [0, 1]
    assert found["epochs"] == [1, 2]
    assert found["clipping"] == {"name": "flat", "bound": [0.5, 1.0]}
    assert type(plain(epochs=np.int64(3))["epochs"]) is int


def test_functions_and_classes_are_named() -> None:
    partial = functools.partial(CELLS.Net, hidden=np.int64(8))
    found = plain(
        model=[CELLS.Net, {"name": CELLS.Net, "hidden": [2, 3]}, partial, lambda: nn.Linear(30, 2)],
        loss=CELLS.rows_loss,
        clipping=["none", CELLS.Half(bound=2.0), {"name": CELLS.Half, "factor": 0.25}],
    )
    net, half = "given/Net.py:Net", "given/Half.py:Half"
    assert found["model"] == [net, {"name": net, "hidden": [2, 3]}, {"name": net, "hidden": 8}, "given/model.py:model"]
    assert found["loss"] == "given/rows_loss.py:rows_loss"
    assert found["clipping"] == ["none", {"name": half, "bound": 2.0}, {"name": half, "factor": 0.25}]


def test_registered_methods_and_importable_functions_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpsweep.workers.clipping.by_norm import FlatClipping

    (tmp_path / "objects_models.py").write_text("def net(feature_shape, num_classes):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import objects_models  # type: ignore[import-not-found]

    found = plain(clipping=[FlatClipping(0.5), FlatClipping], model=objects_models.net)
    assert found["clipping"] == [{"name": "flat", "bound": 0.5}, "flat"]
    assert found["model"] == "objects_models:net"


def test_two_objects_of_one_name_are_told_apart() -> None:
    other = run_cells("class Net:\n    def f(self):\n        pass\n").Net
    assert plain(model=[CELLS.Net, other, CELLS.Net])["model"] == [
        "given/Net.py:Net",
        "given/Net_2.py:Net_2",
        "given/Net.py:Net",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(30, 2)}, "model is an object of Linear; every trial makes its own"),
        ({"model": 3}, "model is 3, of type int; give a name, a function or a class"),
        ({"optimizer": nn.Linear}, "optimizer is .*, of type type; give numbers, .* taken as data, model, loss"),
        ({"privacy": {"delta": object()}}, "privacy.delta is .*, of type object; give numbers"),
        ({"loss": nn.CrossEntropyLoss(torch.ones(2))}, "holds a tensor of weights; give a function"),
        ({"model": "__main__:Net"}, "give the function or class itself, as in model=Net"),
    ],
)
def test_what_is_not_taken_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(dpsweep.InvalidInput) as refused:
        dpsweep.plan({**BASE, **changes})
    assert re.search(message, str(refused.value)), refused.value
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("loss", "params"),
    [
        (CELLS.rows_loss, {}),
        ({"name": CELLS.rows_loss, "smoothing": 0.0}, {"smoothing": 0.0}),
        ({"name": CELLS.made_loss, "smoothing": 0.0}, {"smoothing": 0.0}),
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(ignore_index=7), {}),
        (nn.CrossEntropyLoss, {}),
    ],
)
def test_each_form_of_a_loss_is_the_loss_of_rows(loss: object, params: dict[str, float]) -> None:
    """Each is cross-entropy: a function of rows, one that makes such a function, and loss modules of torch."""
    objects = Objects(Path.cwd())
    named = objects.plain({"loss": loss})["loss"]
    component = Component(named if isinstance(named, str) else named["name"], params)
    outputs, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    found = build_loss(component, UserCode(objects.modules))(outputs, labels)
    assert found.equal(build_loss(Component("cross_entropy"))(outputs, labels))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_module_of_loss_sums_or_averages_the_targets_of_a_row(reduction: str) -> None:
    objects = Objects(Path.cwd())
    named = objects.plain({"loss": nn.MSELoss(reduction=reduction)})["loss"]
    found = build_loss(Component(named), UserCode(objects.modules))(torch.ones(2, 3), torch.zeros(2, 3))
    assert found.tolist() == [3.0 if reduction == "sum" else 1.0] * 2


def test_a_model_loads_by_its_stored_source_and_an_edit_is_refused(tmp_path: Path) -> None:
    sweep = {**BASE, "model": {"name": CELLS.Net, "hidden": 3}, "clipping": CELLS.Half(bound=2.0)}
    done = dpsweep.run(sweep, output=tmp_path, address="in-process", tracking_uri="none")
    (trial,) = done.trials.values()
    assert trial.key.startswith("Half-")
    code = tmp_path / "trials" / trial.key / "code" / "given" / "Net.py"
    assert "class Net(nn.Module):" in code.read_text()
    expected = trial.predict(np.zeros((1, 30), np.float32))
    (closed,) = dpsweep.open(tmp_path).trials.values()
    with pytest.raises(dpsweep.InvalidInput, match=r"open the sweep with allow_code=\['.*/code/given/Net.py'\]"):
        closed.model()
    for allowed in ([code], [str(code)], [CELLS.Net]):
        (opened,) = dpsweep.open(tmp_path, allow_code=allowed).trials.values()
        assert (opened.predict(np.zeros((1, 30), np.float32)) == expected).all()
    edited = run_cells(code.read_text().replace("Tanh", "ReLU")).Net
    changed = {**sweep, "model": {"name": edited, "hidden": 3}}
    with pytest.raises(dpsweep.InvalidInput, match=r"given/Net.py has changed since 1 trial"):
        dpsweep.run(changed, output=tmp_path, address="in-process", tracking_uri="none")
    (opened,) = dpsweep.open(tmp_path, allow_code=[edited]).trials.values()
    with pytest.raises(dpsweep.InvalidInput, match=r"given/Net.py has changed since"):
        opened.model()


def test_data_without_their_label_are_refused_without_a_value() -> None:
    for given in (pd.DataFrame({"x": ["secret value"]}), pd.Series(["secret value"])):
        with pytest.raises(
            dpsweep.InvalidInput, match=r"data is of type \w+; give \(features, labels\), \{'frame'"
        ) as refused:
            dpsweep.plan({"name": "any", "data": given, "model": "logistic"})
        assert "secret" not in str(refused.value)
