"""A definition of a notebook becomes a module that stands alone, reads as it was typed, and gives the same."""

from __future__ import annotations

from typing import Any

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.object_sources import module_source
from dpsweep.workers.own_code.own_modules import BYTECODE
from tests.orchestration.sweeps.cells import run_cells


def loaded(text: str) -> dict[str, Any]:
    """The names of the module, executed with nothing around it."""
    names: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text, "alone", "exec", dont_inherit=True), names)
    return names


USES = """
import math, json as j
import xml.etree.ElementTree
from functools import cache
WIDTH, NAMES = 8, {"a": (1, 2.5), "b": None}
x = [0.0] * 100_000  # data that only has the name of an argument

def double(value):  # a comment that is kept
    return 2 * value

@cache
def cached(value):
    return value + 1

class Base:
    width = WIDTH
    def scaled(self, x):
        return double(x) * self.width

class Found(Base):
    '''A class.'''
    def scaled(self, x, y: int = WIDTH):
        return super().scaled(x) + math.floor(y) + cached(x) + len(NAMES) + len(xml.etree.ElementTree.__name__)
"""


def test_a_definition_brings_what_it_uses_and_no_more() -> None:
    cells = run_cells(USES)
    text = module_source(cells.Found, "Found", "model 'Found'")
    assert loaded(text)["Found"]().scaled(3) == cells.Found().scaled(3)
    assert "# a comment that is kept" in text
    assert "import math" in text
    assert "import xml.etree.ElementTree" in text
    assert "json" not in text
    assert "x = " not in text
    assert not text.startswith(BYTECODE), text


@pytest.mark.parametrize(
    "expression",
    [
        "made(3)",
        "(lambda x: x + 1), (lambda x: x + 2)",
        "(lambda x, y=WIDTH: x * y)",
        "Outer.Inner",
        "later",
    ],
)
def test_lambdas_closures_and_inner_classes(expression: str) -> None:
    cells = run_cells(
        f"""
WIDTH = 2
def made(count):
    text = '''two
    lines'''
    def inner(x):
        return x * count + len(text) + len('''a
    b''')
    return inner
class Outer:
    class Inner:
        def __new__(cls, x):
            return x - WIDTH
def later(x):
    return unknown_so_far(x) if x > 100 else x
FOUND = ({expression},)
"""
    )
    for each in cells.FOUND:
        text = module_source(each, "found", "model")
        assert loaded(text)["found"](5) == each(5)
        assert not text.startswith(BYTECODE), text


def test_postponed_annotations_stay_postponed() -> None:
    cells = run_cells("from __future__ import annotations\ndef found(x: Nothing) -> None:\n    return x\n")
    assert loaded(module_source(cells.found, "found", "model"))["found"](1) == 1


def test_defaults_are_those_of_the_moment() -> None:
    """A name that a default was read from may stand for something else by now."""
    cells = run_cells("WIDTH = 2\ndef found(x, y=WIDTH):\n    return x * y\n", "")
    cells.found.__globals__["WIDTH"] = 7
    assert loaded(module_source(cells.found, "found", "model"))["found"](5) == 10


@pytest.mark.parametrize("kind", ["def found(x):\n    return x + ADDED\n", "found = lambda x: x + ADDED\n"])
def test_without_source_bytecode_is_stored(kind: str) -> None:
    cells = run_cells("ADDED = 3\n" + kind, is_known=False)
    text = module_source(cells.found, "found", "model")
    assert text.startswith(BYTECODE)
    assert loaded(text)["found"](4) == 7


def test_bytecode_of_a_class_is_the_same_again_and_does_not_touch_the_class() -> None:
    cells = run_cells("class Found:\n    def f(self):\n        return 1\n", is_known=False)
    before = cells.Found.f
    text = module_source(cells.Found, "Found", "model")
    assert loaded(text)["Found"] is not cells.Found
    assert cells.Found.f is before
    assert module_source(cells.Found, "Found", "model") == text


def test_a_class_that_was_changed_is_stored_as_it_is() -> None:
    cells = run_cells("class Found:\n    def f(self):\n        return 1\n", "Found.f = lambda self: 2\n")
    assert loaded(module_source(cells.Found, "Found", "model"))["Found"]().f() == 2


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("import numpy as np\nrows = np.zeros((3, 2))", r"'rows', a ndarray of shape \(3, 2\)"),
        ("import torch\nrows = torch.zeros(3, 2)", r"'rows', a Tensor of shape \(3, 2\)"),
        ("import pandas\nrows = pandas.DataFrame({'a': [1]})", r"'rows', a DataFrame of shape \(1, 1\)"),
        ("rows = [0.5] * 5000", "'rows', a list of 25,000 characters"),
    ],
)
def test_data_are_no_code(data: str, named: str, is_known: bool) -> None:
    if "list" in named and not is_known:
        pytest.skip("only arrays are found inside bytecode")
    cells = run_cells(data, "def found(x):\n    return x @ rows\n", is_known=is_known)
    with pytest.raises(InvalidInput, match=named if is_known else "it must hold no data"):
        module_source(cells.found, "found", "model 'found'")


def test_what_cannot_be_stored_is_one_line() -> None:
    cells = run_cells(
        "import threading\nlock = threading.Lock()\n", "def found(x):\n    with lock:\n        return x\n"
    )
    with pytest.raises(InvalidInput, match="model uses 'lock', a lock, which cannot be stored"):
        module_source(cells.found, "found", "model")
