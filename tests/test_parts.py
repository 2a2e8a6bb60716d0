"""Sweeps written with `dpsweep.Sweep` and `dpsweep.parts`: their names, their types and their YAML."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import dpsweep
from dpsweep import parts
from dpsweep.orchestration.sweeps.components import COMPONENTS
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep

ROOT = Path(__file__).parent.parent
STUB = (ROOT / "dpsweep" / "parts.pyi").read_text()
CLASSES = {node.name: node for node in ast.parse(STUB).body if isinstance(node, ast.ClassDef)}
SWEEP: dict[str, Any] = {
    "name": "tumours",
    "data": parts.Data.breast_cancer(),
    "model": parts.Model.mlp(hidden=[16]),
    "sampling": {"method": "poisson", "batch_size": 64},
    "epochs": 2,
    "clipping": ["none", parts.Clipping.flat(bound=[0.5, 1.0])],
    "optimizer": parts.Optimizer.sgd(learning_rate=2.0),
    "privacy": {"target_epsilon": 3, "delta": 1e-5, "accountant": "rdp"},
}


def test_the_types_are_up_to_date() -> None:
    """Else run: python docs/parts.py"""
    assert runpy.run_path(str(ROOT / "docs" / "parts.py"))["module"]() == STUB


@pytest.mark.parametrize("key", COMPONENTS)
def test_an_editor_completes_what_python_takes(key: str) -> None:
    title = "".join(word.capitalize() for word in key.split("_"))
    typed = {node.name for node in CLASSES[f"_{title}"].body if isinstance(node, ast.FunctionDef)}
    assert typed == set(dir(getattr(parts, title)))
    for name in typed:
        made = getattr(getattr(parts, title), name)(some=1)
        assert made == {"name": name.rstrip("_") if name.endswith("_") else name, "some": 1}
        assert made["name"] in COMPONENTS[key]


def test_every_key_of_a_sweep_file_is_an_argument() -> None:
    (init,) = (node for node in CLASSES["Sweep"].body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert {argument.arg for argument in init.args.kwonlyargs} == set(SweepSpec.model_fields) - {"adapted"}


def test_its_yaml_is_the_sweep() -> None:
    sweep = dpsweep.Sweep(**SWEEP)
    assert parse_sweep(sweep.to_yaml()) == parse_sweep(dpsweep.Sweep(**{**SWEEP, "seeds": range(1)}).to_yaml())
    assert [point.params for point in parse_sweep(sweep.to_yaml()).clipping] == [{}, {"bound": 0.5}, {"bound": 1.0}]
    assert dict(sweep) == SWEEP
    assert repr(sweep) == f"<Sweep 'tumours' of {', '.join(list(SWEEP)[1:])}>"


def test_a_sweep_is_planned_as_its_yaml() -> None:
    sweep = dpsweep.Sweep(**SWEEP)
    assert dpsweep.plan(sweep) == dpsweep.plan(sweep.to_yaml())


def test_what_a_file_cannot_hold_is_named() -> None:
    sweep = dpsweep.Sweep(**{**SWEEP, "model": lambda: nn.Linear(30, 2)})
    with pytest.raises(
        dpsweep.InvalidInput, match=r"cannot hold what this sweep has from Python: given/.*module\.py:name"
    ):
        sweep.to_yaml()


def test_unknown_keys_and_components_name_the_nearest() -> None:
    with pytest.raises(dpsweep.InvalidInput, match="unknown key 'epoch'; did you mean 'epochs'"):
        dpsweep.Sweep(**{**SWEEP, "epoch": 3})
    with pytest.raises(AttributeError, match="no component 'flatt' for clipping; did you mean 'flat'"):
        parts.Clipping.flatt(bound=1.0)  # type: ignore[attr-defined]
