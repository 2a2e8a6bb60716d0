"""Imports the user's own functions, which a sweep names as ``module:function`` or ``file.py:function``.

Only modules listed in a `UserCode` are imported, each from the place given there; a name in a sweep runs no code.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from dpsweep.accounting.errors import DpsweepError, InvalidInput, public_text
from dpsweep.accounting.registry import build, nearest, unlike
from dpsweep.workers.own_code.own_modules import BYTECODE, SourceFile, load_module
from dpsweep.workers.own_code.own_sources import module_file, sources_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class UserModule:
    """A module of the user's own that may be imported.

    `location`: its name in a sweep, ``module`` or ``file.py``. `source`: the path of the file, or of the folder that
    holds the module; None for an installed module. `files`: the sources that run: its own, and those of the user's
    modules that it imports, as they were when the run was planned.
    """

    location: str
    source: str | None = None
    files: tuple[SourceFile, ...] = field(default=(), repr=False)

    def sources(self) -> tuple[SourceFile, ...]:
        """Return `files`, or the sources as they are now if none were read before; see `sources_of`."""
        return self.files or sources_of(self.location, self.source)

    def as_it_is(self) -> UserModule:
        """Return this module with its sources as they are now."""
        return replace(self, files=sources_of(self.location, self.source))

    @property
    def folder(self) -> str | None:
        """The folder whose modules it may import; None for an installed module."""
        is_file = self.source is not None and self.location.endswith(".py")
        return str(Path(self.source or "").resolve().parent) if is_file else self.source


@dataclass(frozen=True)
class GivenData:
    """Data that Python code gave; private data. called: their name in the sweep.

    content: as `dpsweep.workers.data.as_bytes`; empty where they lie at ``path``, for workers of Ray.
    """

    called: str
    content: bytes = field(default=b"", repr=False)
    path: str | None = None


@dataclass(frozen=True)
class UserCode:
    """All modules of the user's own that may be imported, and the data that Python code gave.

    weights: as they were when the run began, where its driver has them: what the sweep names, and its
    `dpsweep.workers.own_code.own_record.lines_of_digests`.
    """

    modules: tuple[UserModule, ...] = ()
    data: tuple[GivenData, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()

    def named(self, location: str) -> UserModule | None:
        """Return the module that a sweep calls ``location``, if it may be imported."""
        return next((module for module in self.modules if module.location == location), None)

    @property
    def places(self) -> dict[str, str]:
        """The path of the file, or of the folder that holds the module, by location; "" for an installed module."""
        return {module.location: module.source or "" for module in self.modules}

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders whose modules may be imported, each once."""
        return tuple(dict.fromkeys(filter(None, (module.folder for module in self.modules))))


NO_CODE: Final = UserCode()


def with_checked_types(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with arguments checked against their annotations. Raises: InvalidInput naming the first
    mismatch, also for a key that a dataclass among them does not have.
    """
    checked = validate_call(config=ConfigDict(extra="forbid"))(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return checked(*args, **kwargs)
        except ValidationError as error:
            mistake = error.errors()[0]
            *place, unknown = map(str, mistake["loc"])
            if place and mistake["type"] == "unexpected_keyword_argument":
                valid = _keys(get_type_hints(function).get(place[0]))
                raise InvalidInput(
                    f"unknown key {unknown!r} of {'.'.join(place)}; {nearest(unknown, valid)}"
                ) from error
            key, reason = ".".join(map(str, mistake["loc"])), mistake["msg"].removeprefix("Value error, ")
            if mistake["type"] in ("tuple_type", "list_type") or mistake.get("ctx", {}).get("class") == "Sequence":
                reason = f"it takes a list, such as [{mistake['input']}]"
            if mistake["type"] == "literal_error":
                reason = unlike(reason, mistake["input"])
            raise InvalidInput(f"{key} is {mistake['input']!r}: {reason}") from error

    return call


def _keys(annotation: object) -> list[str]:
    """Return the fields of the dataclasses in an annotation."""
    if is_dataclass(annotation):
        return [each.name for each in fields(annotation)]
    return [key for part in get_args(annotation) for key in _keys(part)]


def is_import_path(name: str) -> bool:
    """Return whether ``name`` is ``module:function`` or ``file.py:function``, rather than a registered name."""
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
    """Return the function called ``name``; ``what`` describes it in errors, such as "model".

    An error while the function is called becomes an `InvalidInput` that gives its type and line, but not its text.

    Raises:
        InvalidInput: the module or file is not in ``code``, and is not imported then, or it cannot be imported. Or the
            function is not defined in it, but imported from elsewhere.
    """
    location, function = split_import_path(name, what)
    allowed = code.named(location)
    if allowed is None:
        raise InvalidInput(
            f"{what} {name!r}: {location!r} is not among the code that may be run; if you trust it, name its module or "
            "file: --allow-code FILE.py"
        )
    with blamed_on(name, what):
        module = _load(allowed, code, f"{what} {name!r}")
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{what} {name!r}: {location!r} has no function {function!r}; name one that it defines")
    home = str(getattr(found, "__module__", None))
    is_own = home == module.__name__ or home.startswith(f"{module.__name__}.")
    if not is_own and not any(map(_is_compiled, allowed.files)):
        raise InvalidInput(
            f"{what} {name!r}: {function!r} comes from {home!r}; name a function that {location!r} defines itself"
        )

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        with blamed_on(name, what):
            return found(*args, **kwargs)

    return call


def build_named(
    registry: Mapping[str, Callable[..., T]], name: str, params: Mapping[str, Any], what: str, code: UserCode
) -> T | Any:
    """Build the registered component ``name`` or, for an import path, call the user's own function with ``params``.

    Raises: InvalidInput as `build` and `import_function`.
    """
    if is_import_path(name):
        return build({name: import_function(name, what, code)}, name, params, what)
    return build(registry, name, params, what)


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


def _load(module: UserModule, code: UserCode, subject: str) -> ModuleType:
    """Import a module of ``code``. subject: what it is imported for, for errors."""
    location, files = module.location, module.sources()
    _require_readable(files, subject)
    if location.endswith(".py"):
        if not files:
            raise InvalidInput(
                f"{subject}: there is no file {Path(module.source or location).absolute()}; correct the path"
            )
        return load_module(files[0].name, files, code.folders, subject)
    try:
        loaded = load_module(location, files, code.folders, subject)
    except ModuleNotFoundError as error:
        if not location.startswith(error.name or "\0"):
            raise  # the module exists, but something that it imports does not
        raise InvalidInput(f"{subject}: no module {location!r} can be imported here; install it") from error
    if module.source is not None and not _lies_in(loaded, module, files):
        raise InvalidInput(
            f"{subject}: Python has another module {location!r} ({loaded.__file__}) than the one in {module.source}; "
            "rename yours"
        )
    return loaded


def _is_compiled(file: SourceFile) -> bool:
    return file.content.startswith(BYTECODE.encode())


def _require_readable(files: tuple[SourceFile, ...], subject: str) -> None:
    """Raises: InvalidInput for bytecode of another version of Python."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in filter(_is_compiled, files):
        there = file.content[len(BYTECODE) :].split(b"\n", 1)[0].decode()
        if there != here:
            raise InvalidInput(
                f"{subject}: {file.place} is compiled code of Python {there}, as no source of it was known; load it "
                f"with Python {there} (here it is {here}), or give a function of a file or a notebook"
            )


def _lies_in(loaded: ModuleType, module: UserModule, files: tuple[SourceFile, ...]) -> bool:
    """Return whether the loaded module is that of the folder `UserModule.source`."""
    expected = files[0].path if files else module_file(Path(module.source or ""), module.location)
    found = loaded.__file__
    return expected is not None and found is not None and Path(found).resolve() == Path(expected).resolve()
