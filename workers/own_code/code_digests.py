"""Digests of the code of functions as it is loaded, and the modules among the loaded ones that are the user's own."""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property, partial, partialmethod
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Final

from dpsweep.workers.own_code.own_sources import is_installed

PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
"""Types whose values a text tells whole."""
EMPTY: Final = object()
"""Content of a cell whose variable has no value yet."""
_AROUND: Final = (staticmethod, classmethod, property, cached_property, partial, partialmethod, MethodType)
"""Types of Python whose objects hold a function."""


_DIGESTS: Final[dict[int, tuple[CodeType, str]]] = {}
"""Digests of code by id. The code is kept, so that no other one gets its id. A hash would go through all of it."""


def code_digest(code: CodeType) -> str:
    """Return a sha256 of the behaviour of a function, wherever it is written."""
    if (known := _DIGESTS.get(id(code))) is None:
        known = _DIGESTS[id(code)] = code, _digest_of(code)
    return known[1]


def _digest_of(code: CodeType) -> str:
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
    """Yield names and digests of the functions that a module or its classes define, and of those that these hold.

    A function holds those that it wraps, reads from its closure or has as defaults. Other names for one of them, for a
    class or for a module come with what they stand for.
    """
    yield from _codes_among(vars(module), "", module.__name__, {})


def _codes_among(
    members: Mapping[str, object], prefix: str, home: str, given: dict[int, str]
) -> Iterator[tuple[str, str]]:
    """Yield those of a module or class. home: its module. given: names of classes whose members were given, by id."""
    for key, value in list(members.items()):  # tens of thousands in a large program, of which most are neither
        name = f"{prefix}{key}"
        if isinstance(value, FunctionType):
            yield name, code_digest(value.__code__)
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__ or "__wrapped__" in vars(value):
                yield from _codes_inside(name, value, {id(value): name})
        elif isinstance(value, type):
            if value.__module__ != home:
                yield name, f"{value.__module__}.{value.__qualname__}"
            elif (known := given.setdefault(id(value), name)) != name:
                yield name, known
            else:
                yield from _codes_among(vars(value), f"{name}.", home, given)
        elif isinstance(value, ModuleType):
            yield name, value.__name__
        elif callable(value) or isinstance(value, _AROUND):
            kind: type = type(value)
            yield name, f"{kind.__module__}.{kind.__qualname__}"
            yield from _codes_inside(name, value, {id(value): name})


def _codes_inside(name: str, value: object, given: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Yield those that a function, or what a decorator made of it, holds. given: names of these so far, by id."""
    for key, inner in _held_by(value):
        if isinstance(inner, (FunctionType, *_AROUND)):
            place = f"{name}.{key}"
            if (known := given.setdefault(id(inner), place)) != place:
                yield place, known
                continue
            if isinstance(inner, FunctionType):
                yield place, code_digest(inner.__code__)
            yield from _codes_inside(place, inner, given)


def _held_by(value: object) -> Iterator[tuple[str, object]]:
    """Yield what may be functions in a function, or in what a decorator made of it, by name."""
    match value:
        case FunctionType():
            yield "__wrapped__", vars(value).get("__wrapped__")
            yield from _bound_in(value)
        case staticmethod() | classmethod() | MethodType():
            yield "__func__", value.__func__
        case property():
            yield from (("fget", value.fget), ("fset", value.fset))
        case cached_property():
            yield "func", value.func
        case partial() | partialmethod():
            yield "func", value.func
            yield from ((f"argument {place}", each) for place, each in enumerate(value.args))
            yield from value.keywords.items()
        case _:
            yield "__wrapped__", inspect.getattr_static(value, "__wrapped__", None)


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
        if isinstance(each, _AROUND):
            waiting += (inner for _, inner in _held_by(each))
        elif isinstance(each, FunctionType) and id(each) not in found and not is_of_a_package(str(each.__module__)):
            read = dict(_read_by(each))
            values = sorted((name, repr(value)) for name, value in read.items() if isinstance(value, PLAIN))
            found[id(each)] = each, repr((code_digest(each.__code__), values))
            waiting += read.values()
    return sorted(digest for _, digest in found.values())


def _read_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what a function reads outside of its arguments, by name: defaults, closure and globals."""
    yield from _bound_in(function)
    names = _globals_read(function.__code__)
    yield from ((name, function.__globals__[name]) for name in names if name in function.__globals__)


def _bound_in(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the defaults and the closure of a function, by name."""
    yield from ((f"default {place}", each) for place, each in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    yield from zip(function.__code__.co_freevars, map(content_of, function.__closure__ or ()), strict=True)


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
