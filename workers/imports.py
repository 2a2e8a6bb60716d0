"""Functions that a sweep names: registered ones, and the user's own as ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError, validate_call

from accounting.errors import DpsweepError, InvalidInput

P = ParamSpec("P")
R = TypeVar("R")


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


def import_function(name: str, what: str) -> Callable[..., Any]:
    """The function that ``name`` points to; ``what`` says in errors what it was wanted for.

    What it raises when called becomes an `InvalidInput` that names the line of the user's code.

    Raises:
        InvalidInput: the module or file cannot be found or imported, or has no such function.
    """
    location, _, function = name.rpartition(":")
    load = _load_file if location.endswith(".py") else _load_module
    with blamed_on(name, what):
        module = load(location, name, what)
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{what} {name!r}: {location!r} has no function {function!r}")

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        with blamed_on(name, what):
            return found(*args, **kwargs)

    return call


@contextlib.contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """An error of the user's code, in one line with the place where it was raised."""
    try:
        yield
    except DpsweepError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInput(f"{what} {name!r} failed with {reason} ({place.filename}:{place.lineno})") from error


def _load_module(location: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module is there; something that it imports is not
        raise InvalidInput(
            f"{what} {name!r}: no module {location!r} can be imported; "
            "add its folder to PYTHONPATH, or name the file: /absolute/path/to/file.py:function"
        ) from error


def _load_file(location: str, name: str, what: str) -> ModuleType:
    path = Path(location)
    if not path.is_file():
        raise InvalidInput(f"{what} {name!r}: there is no file {path.absolute()}")
    resolved = path.resolve()
    module_name = f"dpsweep_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{what} {name!r}: {resolved} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
