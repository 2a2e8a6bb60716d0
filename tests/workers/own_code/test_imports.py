"""The user's own code: found, called, and blamed in one line when it fails."""

import inspect
import sys
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, UserModule, import_function
from tests.workers.user_modules import allowed


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "def good(size, scale=2):\n    return size * scale\n\ndef bad():\n    raise RuntimeError('a\\nb')\n"
    )
    return path


def test_function_of_a_file_keeps_its_signature(user_file: Path) -> None:
    function = import_function(f"{user_file}:good", "model", allowed(user_file))
    assert function(3) == 6
    assert list(inspect.signature(function).parameters) == ["size", "scale"]


def test_error_of_the_users_function_is_one_line_with_its_place(user_file: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        import_function(f"{user_file}:bad", "model", allowed(user_file))()
    assert str(caught.value) == f"model '{user_file}:bad' failed with RuntimeError in bad (mine.py:5)"
    assert str(caught.value.__cause__) == "a\nb"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_package_here\n", "ModuleNotFoundError"),
        ("1 / 0\n", "ZeroDivision"),
        ("import sys\nsys.exit(3)\n", "SystemExit in <module>"),
    ],
)
@pytest.mark.parametrize("attempt", [1, 2])
def test_code_that_cannot_be_imported(tmp_path: Path, code: str, reason: str, attempt: int) -> None:
    path = tmp_path / f"broken{attempt}.py"
    path.write_text(code)
    for _ in range(attempt):  # the second attempt must not find a half-imported module
        with pytest.raises(InvalidInput, match=reason) as caught:
            import_function(f"{path}:f", "data source", allowed(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module_here:f", ":f", "os:", "os:nothing", "os:sep", "/nowhere/mine.py:f"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(InvalidInput, match="model"):
        import_function(name, "model", allowed(name.rpartition(":")[0]))


@pytest.mark.parametrize("name", ["subprocess:getoutput", "os:system", "own_module:f", "/nowhere/mine.py:f"])
def test_what_was_not_allowed_is_not_imported(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(InvalidInput, match="is not among the code that may be run"):
        import_function(name, "model", NO_CODE)
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["os:path.join", "os.:system", ".os:system", "a b:f", "os", "os:system()", "a:os:f"])
def test_a_name_is_a_module_and_one_function(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no import path; write module:function or file\.py:function"):
        import_function(name, "model", allowed("os", "a"))


BORROWED = """
import os
import subprocess
from functools import partial
from os import system
from subprocess import getoutput

shell = partial(subprocess.getoutput)
"""


@pytest.mark.parametrize("function", ["system", "getoutput", "shell", "__class__", "__init__"])
def test_what_a_module_has_from_elsewhere_is_not_run(tmp_path: Path, function: str) -> None:
    module = f"borrowing_{function}"
    file = tmp_path / f"{module}.py"
    file.write_text(BORROWED)
    for name, code in ((file, allowed(file)), (module, UserCode((UserModule(module, str(tmp_path)),)))):
        with pytest.raises(InvalidInput, match=f"{function!r} comes from .*; name a function that .* defines itself"):
            import_function(f"{name}:{function}", "model", code)
    with pytest.raises(InvalidInput, match="'system' comes from 'posix'"):
        import_function("os:system", "model", allowed("os"))


def test_a_package_may_have_its_functions_from_its_own_modules(tmp_path: Path) -> None:
    package = tmp_path / "re_exporting"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import make\n")
    (package / "inner.py").write_text("def make():\n    return 3\n")
    assert import_function("re_exporting:make", "model", UserCode((UserModule("re_exporting", str(tmp_path)),)))() == 3


def test_another_module_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def f():\n    return 3\n")
    with pytest.raises(InvalidInput, match="Python has another module 'colorsys'"):
        import_function("colorsys:f", "model", UserCode((UserModule("colorsys", str(tmp_path)),)))
