"""The user's own code: found, called, and blamed in one line when it fails."""

import inspect
from pathlib import Path

import pytest

from accounting.errors import InvalidInput
from workers.imports import import_function


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "def good(size, scale=2):\n    return size * scale\n\ndef bad():\n    raise RuntimeError('a\\nb')\n"
    )
    return path


def test_function_of_a_file_keeps_its_signature(user_file: Path) -> None:
    function = import_function(f"{user_file}:good", "model")
    assert function(3) == 6
    assert list(inspect.signature(function).parameters) == ["size", "scale"]


def test_error_of_the_users_function_is_one_line_with_its_place(user_file: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        import_function(f"{user_file}:bad", "model")()
    assert str(caught.value) == f"model '{user_file}:bad' failed with RuntimeError: a b ({user_file}:5)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_package_here\n", "ModuleNotFoundError"),
        ("1 / 0\n", "ZeroDivision"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("attempt", [1, 2])
def test_code_that_cannot_be_imported(tmp_path: Path, code: str, reason: str, attempt: int) -> None:
    path = tmp_path / f"broken{attempt}.py"
    path.write_text(code)
    for _ in range(attempt):  # the second attempt must not find a half-imported module
        with pytest.raises(InvalidInput, match=reason) as caught:
            import_function(f"{path}:f", "data source")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module_here:f", ":f", "os:", "os:nothing", "os:sep", "/nowhere/mine.py:f"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(InvalidInput, match="model"):
        import_function(name, "model")
