"""Functions that a sweep names: registered ones, and the user's own as ``module:function`` or ``file.py:function``.

A name alone runs nothing: only the modules of a `UserCode` are imported, each from the place that it gives.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

from pydantic import ValidationError, validate_call

from accounting.errors import DpsweepError, InvalidInput, public_text

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class UserModule:
    """A module of the user's own that may be imported.

    location: what a sweep calls it, ``module`` or ``file.py``. source: where it lies, which is the file, or the folder
    that holds the module; None is wherever Python finds an installed one.
    """

    location: str
    source: str | None = None


@dataclass(frozen=True)
class UserCode:
    """All modules of the user's own that may be imported."""

    modules: tuple[UserModule, ...] = ()


NO_CODE: Final = UserCode()


def with_checked_types(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with an `InvalidInput` that names the first argument that is not what its annotation says."""
    checked = validate_call(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return checked(*args, **kwargs)
        except ValidationError as error:
            mistake = error.errors()[0]
            key, reason = ".".join(map(str, mistake["loc"])), mistake["msg"].removeprefix("Value error, ")
            raise InvalidInput(f"{key} is {mistake['input']!r}: {reason}") from error

    return call


def is_import_path(name: str) -> bool:
    return ":" in name


def split_import_path(name: str, what: str) -> tuple[str, str]:
    """Module or file, and function. Raises: InvalidInput when ``name`` is neither form."""
    location, _, function = name.rpartition(":")
    is_location = location.endswith(".py") or all(part.isidentifier() for part in location.split("."))
    if not (is_location and function.isidentifier()):
        raise InvalidInput(f"{what} {name!r} is no import path; write module:function or file.py:function")
    return location, function


def import_function(name: str, what: str, code: UserCode) -> Callable[..., Any]:
    """The function that ``name`` points to; ``what`` says in errors what it was wanted for.

    What it raises when called becomes an `InvalidInput` that names the line of the user's code, and does not quote it.

    Raises:
        InvalidInput: ``code`` does not have the module or file (nothing is imported then), it cannot be imported, or
            the function is not defined there: what a module has imported from elsewhere is not run.
    """
    location, function = split_import_path(name, what)
    allowed = next((module for module in code.modules if module.location == location), None)
    if allowed is None:
        raise InvalidInput(f"{what} {name!r}: {location!r} is not among the code that may be run; allow it first")
    with blamed_on(name, what):
        module = _load(allowed, name, what)
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{what} {name!r}: {location!r} has no function {function!r}")
    home = str(getattr(found, "__module__", None))
    if home != module.__name__ and not home.startswith(f"{module.__name__}."):
        raise InvalidInput(
            f"{what} {name!r}: {function!r} comes from {home!r}; name a function that {location!r} defines itself"
        )

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        with blamed_on(name, what):
            return found(*args, **kwargs)

    return call


def module_file(folder: Path, location: str) -> Path | None:
    """The Python file of module ``location`` below ``folder``, found without importing anything; None if none."""
    stem = folder.joinpath(*location.split("."))
    candidates = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


@contextlib.contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """An error of the user's code, in one line with type and place; its text, which may quote data, is the cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        found = public_text(error)
        if isinstance(error, DpsweepError) and found == str(error):
            raise
        raise InvalidInput(f"{what} {name!r} failed with {found}") from error


def _load(module: UserModule, name: str, what: str) -> ModuleType:
    if module.location.endswith(".py"):
        return _load_file(Path(module.source or module.location), name, what)
    if module.source is not None:
        _make_importable(Path(module.source))
    loaded = _load_module(module.location, name, what)
    if module.source is not None:
        expected, found = module_file(Path(module.source), module.location), loaded.__file__
        if expected is None or found is None or expected.resolve() != Path(found).resolve():
            raise InvalidInput(
                f"{what} {name!r}: Python has another module {module.location!r} ({found}) than the one in "
                f"{module.source}; rename yours"
            )
    return loaded


def _make_importable(folder: Path) -> None:
    """For this process alone, and after everything that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_module(location: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module is there; something that it imports is not
        raise InvalidInput(f"{what} {name!r}: no module {location!r} can be imported here; install it") from error


def _load_file(path: Path, name: str, what: str) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"{what} {name!r}: there is no file {path.absolute()}")
    resolved = path.resolve()
    module_name = f"dpsweep_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{what} {name!r}: {resolved} is not a Python file")
    _make_importable(resolved.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
