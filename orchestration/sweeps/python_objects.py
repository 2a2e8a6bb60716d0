"""A sweep as Python has it: functions, classes, numbers of numpy and ranges in place of names and lists.

Each function or class becomes its own module (`object_sources`), which the sweep then names like a file, so that
it is recorded, compared and shipped as files are. One that an importable module defines is named by that module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import yaml

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import build
from dpsweep.orchestration.sweeps.object_sources import module_source
from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.orchestration.sweeps.user_code import allowance
from dpsweep.workers.own_code.imports import GivenData, UserModule
from dpsweep.workers.own_code.own_sources import GIVEN, sources_of_text

_ROLES: Final = {"data": "data source", "model": "model", "loss": "loss", "clipping": "clipping method"}
"""Keys of a sweep whose values may be functions and classes, with what these are called in errors."""
_OF_ROWS: Final = """

_{name}_of_rows = {name}


def {name}(**params):
    return functools.partial(_{name}_of_rows, **params)
"""
_OF_EACH: Final = """

def {name}():
    return of_each_row({made})
"""


@dataclass
class Objects:
    """Collects the modules of the functions and classes that a sweep is given. folder: where they import from."""

    folder: Path
    _modules: dict[str, UserModule] = field(default_factory=dict)
    _known: list[tuple[object, str]] = field(default_factory=list)
    data: list[GivenData] = field(default_factory=list)

    @property
    def modules(self) -> tuple[UserModule, ...]:
        """The modules so far."""
        return tuple(self._modules.values())

    def plain(self, sweep: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sweep with names in place of functions and classes, and plain numbers and lists.

        Raises: InvalidInput, naming the key, for an object that a sweep does not take there.
        """
        return {
            str(key): self._components(value, _ROLES[key]) if key in _ROLES else _plain(value, str(key))
            for key, value in sweep.items()
        }

    def _components(self, value: object, role: str) -> Any:
        if isinstance(value, list) or (isinstance(value, tuple) and (role != _ROLES["data"] or _given(value) is None)):
            return [self._component(each, role) for each in value]
        return self._component(value, role)

    def _data(self, params: Mapping[str, Any], cuts: Mapping[str, Any]) -> dict[str, Any]:
        """Keep data in memory, and return how the sweep names them."""
        from dpsweep.workers.data import Source, as_bytes, source_of_arrays, source_of_frame

        called = str(cuts.get("called", "data"))
        if called in {each.called for each in self.data}:
            raise InvalidInput(f"two data sets are called {called!r}; give each another name by the key `called`")
        match params:
            case {"source": Source() as source}:
                pass
            case {"frame": frame, **declared}:
                source = build({"frame": source_of_frame}, "frame", {"frame": frame, **declared}, "data")
            case _:
                source = build({"arrays": source_of_arrays}, "arrays", params, "data")
        self.data.append(GivenData(called, as_bytes(source)))
        return {"name": GIVEN, "called": called, **{key: _plain(each, f"data.{key}") for key, each in cuts.items()}}

    def _component(self, value: object, role: str) -> Any:
        if role == _ROLES["data"] and (given := _given(value)) is not None:
            return self._data(*given)
        match value:
            case None | str():
                return value
            case Mapping() if "name" not in value or isinstance(value["name"], str):
                return _plain(value, role)
            case Mapping():
                params = {str(key): _plain(each, f"{role}.{key}") for key, each in value.items() if key != "name"}
                return self._named(value["name"], params, role)
            case partial(args=()):
                params = {key: _plain(each, f"{role}.{key}") for key, each in value.keywords.items()}
                return self._named(value.func, params, role)
        return self._named(value, {}, role)

    def _named(self, value: object, params: dict[str, Any], role: str) -> Any:
        """Return the component that a function, class or object of the user's is."""
        if role == _ROLES["clipping"]:
            value, params = _clipping(value, params)
        name = value if isinstance(value, str) else self.name(value, role, params)
        return {"name": name, **params} if params else name

    def name(self, value: object, role: str, params: Mapping[str, Any] | None = None) -> str:
        """Return the import path of a function or class, and collect its module.

        Raises: InvalidInput for another object, and for one that cannot be stored.
        """
        for known, named in self._known:
            if known is value:
                return named
        is_loss = role == _ROLES["loss"]
        _require_callable(value, role)
        path = self._importable(value) if not (is_loss and _is_of_rows(value, params or {})) else None
        if path is None:
            called = self._unused(_called(value, role))
            subject = f"{role} {called!r}"
            text = _loss(value, called, subject, params or {}) if is_loss else module_source(value, called, subject)
            location = str(PurePath(GIVEN, f"{called}.py"))
            self._modules[location] = UserModule(location, None, sources_of_text(location, text, self.folder))
            path = f"{location}:{called}"
        self._known.append((value, path))
        return path

    def _importable(self, value: object) -> str | None:
        """Return the import path of an object that a module besides the notebook defines; collect that module."""
        home, called = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        module = sys.modules.get(home or "")
        if home in (None, "__main__") or getattr(module, called, None) is not value or not called.isidentifier():
            return None
        try:
            self._modules[str(home)] = allowance(str(home)).as_it_is()
        except InvalidInput:  # Python does not find it by its name: what it defines is stored by itself
            return None
        return f"{home}:{called}"

    def _unused(self, called: str) -> str:
        """Return the name, numbered where another object has it."""
        taken = {PurePath(location).stem for location in self._modules if location.endswith(".py")}
        numbered = (f"{called}_{count}" if count > 1 else called for count in range(1, len(taken) + 2))
        return next(name for name in numbered if name not in taken)


_CUTS: Final = ("called", "keep", "test_fraction", "public_fraction", "split_seed")


def _given(value: object) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return data in memory as arguments of a source and as keys of the sweep; None for data that are named.

    They are arrays in a tuple, a data set of torch, a `Source`, or a mapping with ``features`` or ``frame``.
    """
    torch_data, base = sys.modules.get("torch.utils.data"), sys.modules.get("dpsweep.workers.data.base")
    if base is not None and isinstance(value, base.Source):
        return {"source": value}, {}
    if isinstance(value, Mapping):
        if not {"features", "frame", "dataset"} & value.keys() or "name" in value:
            return None
        params = {str(key): each for key, each in value.items() if key not in _CUTS}
        cuts = {str(key): each for key, each in value.items() if key in _CUTS}
        if "dataset" in params:
            params |= _of_columns(params.pop("dataset"))
        return params, cuts
    is_dataset = torch_data is not None and isinstance(value, torch_data.Dataset)
    is_arrays = isinstance(value, tuple) and len(value) in (2, 3) and all(hasattr(each, "shape") for each in value)
    return (_of_columns(value), {}) if is_dataset or is_arrays else None


def _of_columns(data: object) -> dict[str, Any]:
    from dpsweep.workers.data import columns_of

    return dict(zip(("features", "labels", "groups"), columns_of(data), strict=False))


def _called(value: object, role: str) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else re.sub(r"\W", "_", role)


def _require_callable(value: object, role: str) -> None:
    if inspect.isclass(value) or inspect.isroutine(value) or (role == _ROLES["loss"] and callable(value)):
        return
    kind = type(value).__name__
    if role == _ROLES["data"]:  # whose text may quote rows
        raise InvalidInput(
            f"data is of type {kind}; give (features, labels), {{'frame': a data frame, 'label': its column}}, a name "
            "or a function"
        )
    if role == _ROLES["model"] and callable(value):
        raise InvalidInput(
            f"model is an object of {kind}; every trial makes its own from its seed, so give the class, or a function "
            "that makes it: lambda: ..."
        )
    raise InvalidInput(f"{role} is {shortly(value)}, of type {kind}; give a name, a function or a class")


def _is_of_rows(value: object, params: Mapping[str, Any]) -> bool:
    """Return whether a loss is the function of outputs and labels itself, and not one that makes it."""
    if inspect.isclass(value):
        return str(getattr(value, "__module__", "")).startswith("torch.nn")
    if not inspect.isroutine(value):
        return True
    parameters = inspect.signature(value).parameters.values()
    needed = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        if each.default is each.empty and each.name not in params
    ]
    return len(needed) >= 2


def _loss(value: Any, name: str, subject: str, params: Mapping[str, Any]) -> str:
    """Return the module of a loss: of a function that makes one, of one itself, or of a loss module of torch."""
    kind = value if inspect.isclass(value) else type(value)
    if hasattr(value, "reduction") or (inspect.isclass(value) and kind.__module__.startswith("torch.nn")):
        imports = f"from {kind.__module__} import {kind.__name__} as _{name}"
        first = f"{imports}\n\nfrom dpsweep.workers.tasks.losses import of_each_row\n"
        return first + _OF_EACH.format(name=name, made=f"_{name}({_arguments(value, kind, subject)})")
    text = module_source(value, name, subject)
    is_itself = _is_of_rows(value, params)
    return _with_import(text, "functools") + _OF_ROWS.format(name=name) if is_itself else text


def _with_import(text: str, module: str) -> str:
    """Return the text with an import after the lines that have to stand first."""
    lines = text.splitlines(keepends=True)
    after = next((at for at, line in enumerate(lines) if not line.startswith(("#", "from __future__"))), 0)
    return "".join([*lines[:after], f"import {module}\n", *lines[after:]])


def _arguments(value: object, kind: type, subject: str) -> str:
    """Return the arguments that made a loss module of torch: it keeps each under its name."""
    if inspect.isclass(value):
        return ""
    usual = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    kept = {name: getattr(value, name, None) for name in usual}
    given = {name: each for name, each in kept.items() if each is not None and each is not usual[name]}
    if given.get("reduction") == "none":  # as every loss is taken
        del given["reduction"]
    if "weight" in given or "pos_weight" in given:
        raise InvalidInput(
            f"{subject} holds a tensor of weights; give a function, which makes it where the outputs are: lambda "
            "outputs, labels: F.cross_entropy(outputs, labels, outputs.new_tensor([1.0, 4.0]), reduction='none')"
        )
    return ", ".join(f"{name}={_plain(each, f'{subject}: {name}')!r}" for name, each in given.items())


def _clipping(value: object, params: dict[str, Any]) -> tuple[object, dict[str, Any]]:
    """Return the name or class of a clipping method, and its parameters, also where an object of it is given."""
    kind = value if inspect.isclass(value) else type(value)
    if not any(base.__module__.startswith("dpsweep.workers.clipping") for base in kind.__mro__):
        return value, params
    from dpsweep.workers.clipping import CLIPPING

    if kind is not value:
        params = {
            each.name: _plain(getattr(value, each.name), f"clipping.{each.name}")
            for each in fields(value)  # type: ignore[arg-type]  # every clipping method is a dataclass
            if each.init and getattr(value, each.name) != each.default
        } | params
    return next((name for name, registered in CLIPPING.items() if registered is kind), kind), params


def _plain(value: object, key: str) -> Any:
    """Return numbers, texts, lists and maps of them. Raises: InvalidInput, naming the key, for anything else."""
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return _plain(value.item(), key)
        case int() | float():
            return value
        case np.ndarray():
            return _plain(value.tolist(), key)
        case range() | list() | tuple():
            return [_plain(each, key) for each in value]
        case Mapping():
            return {str(name): _plain(each, f"{key}.{name}") for name, each in value.items()}
        case PurePath():
            return str(value)
    raise InvalidInput(
        f"{key} is {shortly(value)}, of type {type(value).__name__}; give numbers, text, lists and maps"
        + ("; functions and classes are taken as data, model, loss and clipping" if callable(value) else "")
    )


def as_text(sweep: Mapping[str, Any]) -> str:
    """Return a sweep without functions, classes and data in memory as the YAML text of a sweep file.

    Raises: InvalidInput, naming the key, for a value that a file cannot hold.
    """
    objects = Objects(Path.cwd())
    plain = objects.plain(sweep)
    held = [f"data {each.called!r}" for each in objects.data] + [each.location for each in objects.modules]
    if held:
        raise InvalidInput(
            f"a sweep file cannot hold what this sweep has from Python: {', '.join(held)}; put it into a module and "
            "name it `module.py:name`, store the data in a file, or give the sweep itself to dpsweep.run"
        )
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def allowed_objects(allowed: Sequence[object], folder: Path) -> tuple[tuple[str, ...], tuple[UserModule, ...]]:
    """Return the names among what the user allows, and the modules of the functions and classes among it."""
    if isinstance(allowed, str | PurePath) or not isinstance(allowed, Sequence):
        raise InvalidInput(f"allow_code is {shortly(allowed)}; give a list of modules, files, functions and classes")
    objects, names = Objects(folder), []
    for each in allowed:
        if isinstance(each, str | PurePath):
            names.append(str(each))
        else:
            objects.name(each, "allow_code")
    return tuple(names), objects.modules
