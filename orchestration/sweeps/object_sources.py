"""The source of a function or class that a process has, such as one of a notebook, as a module that stands alone.

The module holds the definition as it was typed, and what it uses: imports, further definitions, plain values. It can be
read, compared and executed anywhere, like a file. Objects without a known source are stored as bytecode by cloudpickle,
which only the same version of Python reads. Data are refused: the module lies, readable, beside the results.
"""

from __future__ import annotations
import __future__

import ast
import base64
import builtins
import inspect
import io
import linecache
import math
import pickle
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.own_modules import BYTECODE
from dpsweep.workers.own_code.own_sources import is_installed

_LONGEST: Final = 10_000
"""Most characters of a plain value that a definition uses; longer ones are data."""
_DATA: Final = {"torch": ("Tensor",), "pandas": ("DataFrame", "Series", "Index"), "pyarrow": ("Table", "Array")}
"""Types of data, by the library that has to be loaded for them to exist."""
_FUTURE: Final = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def module_source(found: object, name: str, subject: str) -> str:
    """Return the text of a module that defines ``found`` as ``name``.

    subject: what it is used for, for errors. Raises: InvalidInput if it uses data, or cannot be stored.
    """
    module = _Module(subject)
    module.define(name, found)
    return module.text()


@dataclass(frozen=True)
class _Definition:
    """The source of a function or class; it is a statement, or the expression of a lambda. namespace: its names."""

    text: str
    name: str | None
    namespace: Mapping[str, Any]
    has_postponed_annotations: bool


@dataclass
class _Module:
    """Collects the statements of a module. defined: what each of its names stands for."""

    subject: str
    imports: dict[str, None] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    defined: dict[str, object] = field(default_factory=dict)
    postpones_annotations: bool = False
    is_compiled: bool = False

    def text(self) -> str:
        """Return the module."""
        first = [f"{BYTECODE}{sys.version_info.major}.{sys.version_info.minor}"] if self.is_compiled else []
        future = ["from __future__ import annotations"] if self.postpones_annotations else []
        blocks = ["\n".join((*first, *future, *self.imports)), *self.statements]
        return "\n\n".join(filter(None, blocks)) + "\n"

    def define(self, name: str, value: object) -> None:
        """Add what makes ``name`` stand for ``value``, unless it does."""
        if name in self.defined:
            if self.defined[name] is not value and self.defined[name] != value:
                raise InvalidInput(f"{self.subject} uses two things that are called {name!r}; rename one of them")
            return
        self.defined[name] = value
        if isinstance(value, np.generic):
            value = value.item()
        _refuse_data(value, name, self.subject)
        if (imported := _import_of(name, value)) is not None:
            self.imports[imported] = None
        elif _is_plain(value):
            self.statements.append(f"{name} = {_literal(value, name, self.subject)}")
        elif (definition := _definition(value)) is not None and self._takes(name, value, definition):
            return
        else:
            self._pickle(name, value)

    def _takes(self, name: str, value: object, definition: _Definition) -> bool:
        """Add a definition with all that it uses; return False, adding nothing, where its source does not give the
        value.
        """
        try:
            needed, submodules = _used(definition)
        except SyntaxError:
            return False
        if any(each not in definition.namespace and not hasattr(builtins, each) for each in needed.at_once):
            return False
        for each in needed.ever:
            if each in definition.namespace:
                self.define(each, definition.namespace[each])
        self.imports.update({f"import {each}": None for each in submodules})
        self.postpones_annotations |= definition.has_postponed_annotations
        made = definition.text if definition.name is not None else f"{name} = {definition.text}"
        again = "" if definition.name in (None, name) else f"\n\n{name} = {definition.name}"
        if definition.name not in (None, name):
            self.defined.setdefault(str(definition.name), value)
        if not self._gives(made, definition, value):
            return False
        self.statements.append(made + again)
        return True

    def _gives(self, made: str, definition: _Definition, value: object) -> bool:
        """Return whether defaults are what they were: those that a name gives are computed where it is defined."""
        scope = {"__name__": "__dpsweep_given__", **definition.namespace}
        lines = f"{'from __future__ import annotations' if definition.has_postponed_annotations else ''}\n{made}"
        try:
            exec(compile(lines, "<given>", "exec", dont_inherit=True), scope)
            again = scope[definition.name or made.partition(" = ")[0]]
            return _defaults(again) == _defaults(value)
        except Exception:  # whatever the definition raises, such as where it registers itself once
            return False

    def _pickle(self, name: str, value: object) -> None:
        import cloudpickle

        module, out = self, io.BytesIO()

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
            def reducer_override(self, each: Any) -> Any:
                _refuse_data(each, name, module.subject)
                if isinstance(each, type | types.FunctionType) and (home := _own_home(each)) is not None:
                    module.imports[f"import {home}"] = None
                return _untracked(super().reducer_override(each))

        try:
            Pickler(out).dump(value)
        except InvalidInput:
            raise
        except Exception as error:  # what cannot be pickled raises errors of many types
            raise InvalidInput(
                f"{self.subject} uses {name!r}, {_kind(value)}, which cannot be stored for a later process; make it "
                "inside the function, or put the code into a file"
            ) from error
        self.is_compiled = True
        self.imports.update({"import base64": None, "import cloudpickle": None})
        encoded = "\n".join(textwrap.wrap(base64.b64encode(out.getvalue()).decode(), 100))
        self.statements.append(f'{name} = cloudpickle.loads(base64.b64decode("""\n{encoded}\n"""))')


_TRACKED: Final = {"_make_skeleton_class": 4, "_make_skeleton_enum": 5}
"""Functions by which cloudpickle makes classes anew, with the place of the argument that ties a copy to this process's
class: loading it here would write into that class, and its number differs in every process."""


def _untracked(reduced: Any) -> Any:
    if not isinstance(reduced, tuple) or getattr(reduced[0], "__name__", "") not in _TRACKED:
        return reduced
    made, arguments, *rest = reduced
    place = _TRACKED[made.__name__]
    return made, (*arguments[:place], None, *arguments[place + 1 :]), *rest


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _refuse_data(value: object, name: str, subject: str) -> None:
    """Raises: InvalidInput for arrays, tensors and frames, which the readable code beside results must not hold."""
    known = (getattr(sys.modules.get(library), kind, None) for library, kinds in _DATA.items() for kind in kinds)
    if isinstance(value, (np.ndarray, *(each for each in known if isinstance(each, type)))):
        raise InvalidInput(
            f"{subject} uses {name!r}, {_kind(value)}; code is stored readable beside the results, so it must hold no "
            "data: give numbers as parameters, or make or load it inside the function"
        )


def _import_of(name: str, value: object) -> str | None:
    """Return the statement that imports a value which a module other than the notebook has; None if there is none."""
    if isinstance(value, types.ModuleType):
        path, _, last = value.__name__.rpartition(".")
        if value.__name__ == "__main__":
            return None
        return f"import {last}" if (path, last) == ("", name) else f"import {value.__name__} as {name}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
        home, called = getattr(value, "__module__", None), getattr(value, "__qualname__", None) or value.__name__
        home = home or pickle.whichmodule(value, called)  # type: ignore[attr-defined]  # documented by pickle's source
        if home != "__main__" and called.isidentifier() and getattr(sys.modules.get(home), called, None) is value:
            if home == "builtins" and name == called:
                return ""
            return f"from {home} import {called}" + ("" if name == called else f" as {name}")
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return f"from torch import {str(value).removeprefix('torch.')} as {name}"
    return None


def _own_home(value: type | types.FunctionType) -> str | None:
    """Return the module of the user's own that pickle refers to, else None."""
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    is_own = file is not None and value.__module__ != "__main__" and not is_installed(Path(file).resolve(), Path("/"))
    return value.__module__ if is_own and value.__module__.partition(".")[0] != "dpsweep" else None


def _is_plain(value: object) -> bool:
    match value:
        case None | bool() | int() | str() | bytes():
            return type(value) in (type(None), bool, int, str, bytes)
        case float():
            return math.isfinite(value)
        case tuple() | list():
            return type(value) in (tuple, list) and all(map(_is_plain, value))
        case dict():
            return type(value) is dict and all(map(_is_plain, [*value, *value.values()]))
    return False


def _literal(value: object, name: str, subject: str) -> str:
    text = repr(value)
    if len(text) > _LONGEST:
        raise InvalidInput(
            f"{subject} uses {name!r}, a {type(value).__name__} of {len(text):,} characters; code is stored readable "
            "beside the results, so it must hold no data: load it inside the function"
        )
    return text


def _definition(value: object) -> _Definition | None:
    """Return the source of a function or class as the process executed it, or None where none is known."""
    if isinstance(value, type):
        return _of_class(value)
    inner = inspect.unwrap(value) if callable(value) else None
    return _of_function(inner, inner is not value) if isinstance(inner, types.FunctionType) else None


def _of_function(function: types.FunctionType, is_wrapped: bool) -> _Definition | None:
    """is_wrapped: whether the value is not the function itself; then only decorators beside it can have made it."""
    code = function.__code__
    text = _executed(code)
    if text is None:
        return None
    node = _node_of(code, ast.parse(text))
    if node is None or is_wrapped != bool(getattr(node, "decorator_list", ())):
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    namespace = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    return _as_definition(node, text, namespace, code)


def _of_class(found: type) -> _Definition | None:
    functions = [each for each in map(_plain_function, vars(found).values()) if each is not None]
    own = [each for each in functions if linecache.getlines(each.__code__.co_filename)]
    if not own or any(each.__code__.co_filename != "<string>" for each in functions if each not in own):
        return None
    text = _executed(own[0].__code__)
    if text is None or any(_executed(each.__code__) != text for each in own):
        return None
    lines = {each.__code__.co_firstlineno for each in own}
    name = found.__qualname__.rpartition(".")[2]
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        if node.name == name and all(node.lineno < line <= (node.end_lineno or 0) for line in lines)
    ]
    if len(nodes) != 1:
        return None
    namespace = dict(own[0].__globals__)
    for function in own:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        namespace.update({each: cell.cell_contents for each, cell in cells if each != "__class__"})
    return _as_definition(nodes[0], text, namespace, own[0].__code__)


def _plain_function(value: object) -> types.FunctionType | None:
    """Return the function behind an attribute of a class, if there is one."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    return inspect.unwrap(value) if isinstance(value, types.FunctionType) else None


def _executed(code: types.CodeType) -> str | None:
    """Return the text of the cell or file that the code was compiled from; None if it is unknown or has changed."""
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not text:
        return None
    flags = code.co_flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        whole = compile(text, code.co_filename, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return text if any(each == code for each in _codes(whole)) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _codes(each)


def _node_of(code: types.CodeType, tree: ast.Module) -> ast.AST | None:
    """Return the definition that the code is of; of several lambdas in one line, the one whose result lies there."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == code.co_name:
                found += [node] if _first_line(node) == code.co_firstlineno else []
            case ast.Lambda() if code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
                found.append(node)
    if len(found) > 1:
        columns = [column for line, _, column, _ in code.co_positions() if line == code.co_firstlineno and column]
        around = [node for node in found if columns and _spans(node, min(columns), max(columns))]
        found = sorted(around, key=lambda node: getattr(node, "col_offset", 0))[-1:]  # the inner one
    return found[0] if len(found) == 1 else None


def _spans(node: ast.AST, first: int, last: int) -> bool:
    """Return whether a lambda lies around these columns, or goes on in further lines."""
    if not isinstance(node, ast.Lambda) or node.col_offset > first:
        return False
    return node.end_lineno != node.lineno or last < (node.end_col_offset or 0)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _as_definition(node: ast.AST, text: str, namespace: Mapping[str, Any], code: types.CodeType) -> _Definition:
    """A definition inside another one is written again, because taking away its indent could change its texts."""
    postpones = bool(code.co_flags & __future__.annotations.compiler_flag)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        lines = text.splitlines()[_first_line(node) - 1 : node.end_lineno]
        whole = "\n".join(lines) if node.col_offset == 0 else ast.unparse(node)
        return _Definition(whole, node.name, namespace, postpones)
    return _Definition(ast.unparse(node), None, namespace, postpones)


@dataclass(frozen=True)
class _Needed:
    """Names that a definition reads of the module around it. at_once: those that defining it reads already."""

    at_once: tuple[str, ...]
    ever: tuple[str, ...]


def _used(definition: _Definition) -> tuple[_Needed, tuple[str, ...]]:
    """Return the names that a definition uses, and the submodules that it reaches as attributes."""
    table = symtable.symtable(definition.text, "<given>", "exec")
    at_once = [each.get_name() for each in table.get_symbols() if each.is_referenced() and not each.is_assigned()]
    ever, inner = dict.fromkeys(at_once), [*table.get_children()]
    while inner:
        scope = inner.pop()
        inner += scope.get_children()
        ever.update({each.get_name(): None for each in scope.get_symbols() if each.is_global()})
    ever.pop(definition.name or "", None)
    chains = (_chain(node) for node in ast.walk(ast.parse(definition.text)) if isinstance(node, ast.Attribute))
    reached = {
        path
        for first, *rest in filter(None, chains)
        if isinstance(module := definition.namespace.get(first), types.ModuleType) and first in ever
        for path in _submodules(module, rest)
    }
    return _Needed(tuple(at_once), tuple(sorted(ever))), tuple(sorted(reached))


def _chain(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; none of another expression."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            before = _chain(value)
            return [*before, name] if before else []
    return []


def _submodules(module: types.ModuleType, names: list[str]) -> Iterator[str]:
    """Yield the modules below one that a chain of attributes leads through, if they were imported as such."""
    path = module.__name__
    for name in names:
        path = f"{path}.{name}"
        if not isinstance(sys.modules.get(path), types.ModuleType):
            return
        yield path


def _defaults(value: object) -> object:
    """Return the defaults of a function, or of the functions of a class, with its plain attributes."""
    if isinstance(value, types.FunctionType):
        return value.__defaults__, value.__kwdefaults__
    attributes = vars(value) if isinstance(value, type) else {}
    functions = {name: _plain_function(each) for name, each in attributes.items()}
    plain = {name: each for name, each in attributes.items() if _is_plain(each) and not name.startswith("__")}
    return {name: _defaults(each) for name, each in functions.items() if each is not None}, plain
