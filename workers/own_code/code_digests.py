"""Digests of the code of functions as it is loaded, and the modules among the loaded ones that are the user's own."""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Final

from dpsweep.workers.own_code.own_sources import is_installed

PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values a text tells whole."""
EMPTY: Final = object()
"""Content of a cell whose variable has no value yet."""


@lru_cache(maxsize=2**15)
def code_digest(code: CodeType) -> str:
    """Return a sha256 of the behaviour of a function, wherever it is written."""
    constants = [code_digest(each) if isinstance(each, CodeType) else _written(each) for each in code.co_consts]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _written(constant: object) -> str:
    """Return a constant as text, equal in every process: the order of a set of texts is not."""
    return repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


@cache
def is_of_a_package(home: str) -> bool:
    """Return whether the module is of Python, of dpsweep or of an installed package, whose globals keep no examples.

    Packages may be installed in several environments: one with access to the system's packages, that of a cluster job,
    conda's.
    """
    if home.partition(".")[0] == "dpsweep":  # which may run from a checkout
        return True
    file = getattr(sys.modules.get(home), "__file__", None)
    return home != "__main__" if file is None else _is_installed(file)


@cache
def _is_installed(file: str) -> bool:
    return is_installed(Path(file).resolve(), Path("/"))  # asked of thousands of modules


def own_loaded_modules() -> list[ModuleType]:
    """Return the loaded modules that are not part of Python, of an installed package or of dpsweep, by name."""
    own = [module for name, module in sys.modules.copy().items() if not is_of_a_package(name)]
    return sorted(own, key=lambda module: module.__name__)


def codes_of(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Names and digests of the functions that a module or its classes define, and of those that decorators wrap."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for key, member in list(vars(value).items()):
                yield from _codes_in(f"{name}.{key}", member)
        else:
            yield from _codes_in(name, value)


def _codes_in(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, FunctionType):
        yield name, code_digest(value.__code__)
    if isinstance(value, FunctionType | staticmethod | classmethod | property | cached_property) or callable(value):
        for key in ("__wrapped__", "__func__", "fget", "func"):
            inner = inspect.getattr_static(value, key, None)
            if isinstance(inner, FunctionType) and inner is not value:
                yield from _codes_in(f"{name}.{key}", inner)


def code_behind(objects: Iterable[object]) -> list[str]:
    """Return digests of the user's own functions behind ``objects``, sorted: themselves, methods of their classes, and
    functions that these read, each with the numbers and texts that it reads.
    """
    given = list(objects)
    kinds = {kind for each in given for kind in type(each).__mro__ if not is_of_a_package(str(kind.__module__))}
    waiting = [*given, *(member for kind in kinds for member in vars(kind).values())]
    found = dict[int, tuple[object, str]]()  # objects are kept, so that no other one gets their id
    while waiting:
        each = waiting.pop()
        if isinstance(each, partial | MethodType | staticmethod | classmethod | property | cached_property):
            waiting += (getattr(each, name, None) for name in ("func", "__func__", "fget"))
        elif isinstance(each, FunctionType) and id(each) not in found and not is_of_a_package(str(each.__module__)):
            read = dict(_read_by(each))
            values = sorted((name, repr(value)) for name, value in read.items() if isinstance(value, PLAIN))
            found[id(each)] = each, repr((code_digest(each.__code__), values))
            waiting += read.values()
    return sorted(digest for _, digest in found.values())


def _read_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function reads outside of its arguments, by name: defaults, closure and globals."""
    code = function.__code__
    yield from ((f"default {place}", each) for place, each in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from zip(code.co_freevars, map(content_of, function.__closure__ or ()), strict=True)
    yield from ((name, function.__globals__[name]) for name in _globals_read(code) if name in function.__globals__)


def _globals_read(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_read(constant)


def content_of(cell: CellType) -> object:
    """Return the value of a variable of a closure, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
