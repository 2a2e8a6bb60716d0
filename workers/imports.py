"""The user's own functions, named in a sweep as ``module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from accounting.errors import InvalidInput


def is_import_path(name: str) -> bool:
    return ":" in name


def import_function(name: str, what: str) -> Callable[..., Any]:
    """The function that ``name`` points to; ``what`` says in errors what it was wanted for.

    Raises:
        InvalidInput: the module or file cannot be found, or has no such function.
    """
    location, _, function = name.rpartition(":")
    module = _load_file(Path(location), name, what) if location.endswith(".py") else _load_module(location, name, what)
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{what} {name!r}: {location!r} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def _load_module(location: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise
        raise InvalidInput(
            f"{what} {name!r}: no module {location!r} can be imported; "
            "add its folder to PYTHONPATH, or name the file: /absolute/path/to/file.py:function"
        ) from error


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
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
