"""Writes docs/reference.md from the docstrings: ``python docs/reference.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dpsweep import DPClassifier, PrivateTraining

MODULES = (
    "dpsweep",
    "dpsweep.accounting",
)
"""What users import, in the order of the page."""
FURTHER = "dpsweep.accounting.jobs.release"
"""What the site shows besides."""


def reference() -> str:
    """Return the page: each public function and class with its parameters and the first sentence of its docstring."""
    parts = [
        "# Reference\n\nLook up a name here; `help(dpsweep.run)` says more: types, errors, examples, and "
        f"`help({FURTHER})` how to release statistics of epsilons.\n"
    ]
    listed: set[object] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{_summary(module)}\n")
        parts.append("\n\n".join(_entries(module, listed)) + "\n")
    return "\n".join(parts)


def _entries(module: ModuleType, listed: set[object]) -> Iterator[str]:
    """Yield the exports that no earlier module has."""
    for name, found in _exports(module):
        if found in listed:
            continue
        listed.add(found)
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
    """Return the names and defaults of the parameters: none for properties, errors and classes that functions make."""
    is_error = inspect.isclass(found) and issubclass(found, Exception)
    if not callable(found) or is_error or _is_made_elsewhere(found):
        return ""
    signature = inspect.signature(found)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _is_made_elsewhere(found: object) -> bool:
    return inspect.isclass(found) and found.__module__ == "dpsweep.orchestration.library"


def _summary(found: object) -> str:
    """The first paragraph of the docstring, up to its first full stop, without "Return the"."""
    paragraph = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return re.sub(r"^Return (?:the |a )?(.)", lambda match: match[1].upper(), sentence + "." if stop else paragraph)


if __name__ == "__main__":
    (Path(__file__).parent / "reference.md").write_text(reference())
