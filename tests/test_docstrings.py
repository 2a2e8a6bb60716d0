"""The examples in docstrings of the three packages run, and all that orchestration offers has a docstring."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
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


def test_the_places_that_docstrings_name_are_there() -> None:
    """Of ``dpsweep.room.file.name`` in backticks the file, or the room, is there and holds the name."""
    modules = {_module(path): path.read_text() for paths in FILES.values() for path in paths}
    named = [
        (name, module)
        for module, text in modules.items()
        for name in re.findall(r"`(dpsweep\.\w+\.[\w.]*\w)`", text)
        if name not in modules
    ]
    assert len(named) > 50
    lost = []
    for name, module in named:
        place = name
        while place not in modules and "." in place:
            place = place.rpartition(".")[0]
        rest = name[len(place) :].split(".")[1:]
        if place not in modules or any(not re.search(rf"\b{each}\b", modules[place]) for each in rest):
            lost.append(f"{module}: {name}")
    assert lost == []


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
