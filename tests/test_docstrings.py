"""The examples in docstrings of the three packages run, and all that orchestration offers has a docstring."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {package: sorted((ROOT / package).rglob("*.py")) for package in ("accounting", "workers", "orchestration")}


def _module(path: Path) -> str:
    return ".".join(("dpsweep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


EXAMPLES = [_module(path) for files in FILES.values() for path in files if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_module_run(name: str) -> None:
    """Found in the source, because some modules import ray or torch."""
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert (found.attempted > 0, found.failed) == (True, 0)


def test_public_functions_and_classes_have_docstrings() -> None:
    """Methods that only implement a protocol may rely on the protocol's docstring."""
    without = [
        f"{_module(path)}.{node.name}"
        for path in FILES["orchestration"]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node) and "overload" not in map(ast.unparse, node.decorator_list)
    ]
    assert without == []
