"""Imports the user's own functions, which a sweep names as ``module:function`` or ``file.py:function``.

Only modules listed in a `UserCode` are imported, each from the place given there; a name in a sweep runs no code.
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

    location: its name in a sweep, ``module`` or ``file.py``. source: the path of the file, or of the folder that holds
    the module; None for an installed module.
    """

    location: str
    source: str | None = None


@dataclass(frozen=True)
class UserCode:
    """All modules of the user's own that may be imported."""

    modules: tuple[UserModule, ...] = ()


NO_CODE: Final = UserCode()


def with_checked_types(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with arguments checked against their annotations. Raises: InvalidInput naming the first mismatch."""
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
    """Whether ``name`` is ``module:function`` or ``file.py:function``, rather than a registered name."""
    return ":" in name


def split_import_path(name: str, what: str) -> tuple[str, str]:
    """Split an import path into module or file, and function. Raises: InvalidInput when ``name`` is no import path.

    >>> split_import_path("own_model.py:residual", "model")
    ('own_model.py', 'residual')
    """
    location, _, function = name.rpartition(":")
    is_location = location.endswith(".py") or all(part.isidentifier() for part in location.split("."))
    if not (is_location and function.isidentifier()):
        raise InvalidInput(f"{what} {name!r} is no import path; write module:function or file.py:function")
    return location, function


def import_function(name: str, what: str, code: UserCode) -> Callable[..., Any]:
    """The function called ``name``; ``what`` describes it in errors, such as "model".

    An error while the function is called becomes an `InvalidInput` that gives its type and line, but not its text.

    Raises:
        InvalidInput: the module or file is not in ``code`` (nothing is imported then) or cannot be imported, or the
            function is not defined in it (functions that it imported from elsewhere are refused).
    """
    location, function = split_import_path(name, what)
    allowed = next((module for module in code.modules if module.location == location), None)
    if allowed is None:
        raise InvalidInput(
            f"{what} {name!r}: {location!r} is not among the code that may be run; if you trust it, name its module or "
            "file: --allow-code FILE.py, or allow_code=['FILE.py'] in Python"
        )
    with blamed_on(name, what):
        module = _load(allowed, name, what)
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{what} {name!r}: {location!r} has no function {function!r}; name one that it defines")
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
    """The Python file of module ``location`` below ``folder``, or None; imports nothing."""
    stem = folder.joinpath(*location.split("."))
    candidates = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
    return next((file for file in candidates if file.is_file()), None)


@contextlib.contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """Turn errors of the user's code into an `InvalidInput` with their type and place.

    Their text may quote data, so it stays in the cause. Errors raised by dpsweep's own code pass unchanged.
    """
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
    """Append ``folder`` to the import path of this process, after installed packages."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_module(location: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module exists, but something that it imports does not
        raise InvalidInput(f"{what} {name!r}: no module {location!r} can be imported here; install it") from error


def _load_file(path: Path, name: str, what: str) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"{what} {name!r}: there is no file {path.absolute()}; correct the path")
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
