"""Writes docs/reference.md from the docstrings: ``python docs/reference.py``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dpsweep import DPClassifier, PrivateTraining

MODULES = (
    "dpsweep",
    "dpsweep.accounting",
    "dpsweep.accounting.release",
)
"""What users import, in the order of the page."""


def reference() -> str:
    """The page: each public function and class with its signature and the first sentence of its docstring."""
    parts = [
        "# Reference\n\nWritten by `python docs/reference.py` from docstrings, which say more: `help(dpsweep.run)`.\n"
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{_summary(module)}\n")
        parts.append("\n".join(_entries(module)) + "\n")
    return "\n".join(parts)


def _entries(module: ModuleType) -> Iterator[str]:
    for name, found in _exports(module):
        yield f"- `{name}{_signature(found)}`: {_summary(found)}"
        if _is_made_elsewhere(found) or found in (DPClassifier, PrivateTraining):
            for key, value in vars(found).items():
                if not key.startswith("_") and (isinstance(value, property) or inspect.isfunction(value)):
                    yield f"  - `.{key}{_signature(value)}`: {_summary(value)}"


def _exports(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the names in ``__all__``, or else the module's own public functions and classes, in their order."""
    for name in getattr(module, "__all__", None) or vars(module):
        found = getattr(module, name)
        own = hasattr(module, "__all__") or getattr(found, "__module__", None) == module.__name__
        if not name.startswith("_") and own and (inspect.isclass(found) or inspect.isfunction(found)):
            yield name, found


def _signature(found: object) -> str:
    """Empty for properties, errors and classes that only other functions make."""
    is_error = inspect.isclass(found) and issubclass(found, Exception)
    if not callable(found) or is_error or _is_made_elsewhere(found):
        return ""
    signature = inspect.signature(found)
    parameters = [
        parameter.replace(annotation=_Written(parameter.annotation))
        if parameter.annotation is not parameter.empty
        else parameter
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    returned = signature.return_annotation
    returned = returned if returned is signature.empty else _Written(returned)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _is_made_elsewhere(found: object) -> bool:
    return inspect.isclass(found) and found.__module__ == "dpsweep.orchestration.library"


class _Written:
    """An annotation as it is written in the source."""

    def __init__(self, annotation: object) -> None:
        self._text = str(getattr(annotation, "__forward_arg__", annotation))

    def __repr__(self) -> str:
        return self._text


def _summary(found: object) -> str:
    """The first paragraph of the docstring, up to its first full stop."""
    paragraph = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + "." if stop else paragraph


if __name__ == "__main__":
    (Path(__file__).parent / "reference.md").write_text(reference())
