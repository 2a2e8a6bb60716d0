"""Which of the user's own modules a sweep may run, where they lie, and how they reach the workers of a cluster.

A sweep file names functions, and a name is all that it takes to run one. So a sweep runs only what lies in its own
folder, and what the user allows by name; all is located on the file system, before anything is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath

from accounting.errors import InvalidInput
from orchestration.sweeps.schema import SweepSpec
from workers.imports import UserCode, UserModule, module_file, split_import_path

_PACKAGE = "dpsweep_user_code"
"""The folder that the user's modules travel in: Ray puts it on the path of every worker, and them no place there."""
_INSTALLED = re.compile(r"(site|dist)-packages|python3\.\d+")
"""Folders of an environment, also where that lies beside a sweep file."""


def permitted(sweep: SweepSpec, folder: Path, allowed: Sequence[str] = ()) -> UserCode:
    """The user's own code that ``sweep`` names, located without importing any of it.

    folder: that of the sweep file; what lies in it may run, as may the modules and files ``allowed`` by name, with the
    modules inside them.

    Raises: InvalidInput with one line for each name that may not run, cannot be found, or is also the name of a module
    that Python finds elsewhere.
    """
    importlib.invalidate_caches()  # a file that a refusal named may have been added since
    folder = folder.resolve()
    allowances = {module.location: module for module in map(_allowance, allowed)}
    found: list[UserModule] = []
    refused: list[str] = []
    for what, name in sweep.own_components:
        try:
            location, _ = split_import_path(name, what)
            locate = _own_file if location.endswith(".py") else _own_module
            found.append(locate(location, f"{what} {name!r}", folder, allowances))
        except InvalidInput as error:
            refused.append(str(error))
    if refused:
        raise InvalidInput("\n".join(refused))
    return UserCode(tuple(dict.fromkeys(found)))


def allowed_again(sweep: SweepSpec, allowed: Sequence[str]) -> UserCode:
    """Of the user's own code that a stored ``sweep`` names, what ``allowed`` names; nothing is imported.

    Where its sweep file lay is not stored: a file is meant by every name that its path ends with.
    """
    allowances = [_allowance(name) for name in allowed]
    locations = [split_import_path(name, what)[0] for what, name in sweep.own_components]
    found = (_meant(location, allowance) for location in locations for allowance in allowances)
    return UserCode(tuple(dict.fromkeys(module for module in found if module is not None)))


def _meant(location: str, allowance: UserModule) -> UserModule | None:
    """``allowance`` under the name ``location`` of a sweep, if it may be that one."""
    if not allowance.location.endswith(".py"):
        inside = location == allowance.location or location.startswith(f"{allowance.location}.")
        return replace(allowance, location=location) if inside else None
    file = PurePath(allowance.location)
    if location.endswith(".py"):
        return UserModule(location, str(file)) if file.match(location) else None
    module = PurePath(*location.split("."))
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if file.match(str(path)):
            return UserModule(location, str(PurePath(*file.parts[: -len(path.parts)])))
    return None


def _allowance(name: str) -> UserModule:
    """What ``--allow-code`` names: a file, or a module that is installed or lies in the working directory."""
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise InvalidInput(f"--allow-code {name!r}: there is no file {file}")
        return UserModule(str(file), str(file))
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput(f"--allow-code is {name!r}, but must be a module or a file ending in .py")
    top = name.partition(".")[0]
    found = _found_by_python(top)
    if found is not None and found.origin is not None:
        origin = Path(found.origin)
        own = origin.suffix == ".py" and not _is_installed(origin.resolve(), Path("/"))
        return UserModule(name, str(origin.parents[origin.name == "__init__.py"]) if own else None)
    if module_file(Path.cwd(), name) is None:
        raise InvalidInput(
            f"--allow-code {name!r}: no such module is installed or lies in {Path.cwd()}; install it, or name a file"
        )
    return UserModule(name, str(Path.cwd()))


def _own_file(location: str, subject: str, folder: Path, allowances: Mapping[str, UserModule]) -> UserModule:
    """A file, relative to the sweep file's folder."""
    file = (folder / location).resolve()
    if str(file) not in allowances:
        _require_inside(folder, [file], subject, str(file))
    if not file.is_file():
        raise InvalidInput(f"{subject}: there is no file {file}")
    return UserModule(location, str(file))


def _own_module(location: str, subject: str, folder: Path, allowances: Mapping[str, UserModule]) -> UserModule:
    """A module that was allowed, by its own name or that of one it lies in, or one of the sweep file's folder."""
    parts = location.split(".")
    for length in range(len(parts), 0, -1):
        allowance = allowances.get(".".join(parts[:length]))
        if allowance is not None:
            return replace(allowance, location=location)
    file = module_file(folder, location)
    if file is None:
        raise InvalidInput(
            f"{subject}: {location!r} is no module in the sweep file's folder {folder}, and no other is run unasked; "
            f"if you trust it, add --allow-code {location}"
        )
    packages = [folder.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts))]
    _require_inside(folder, [file, *filter(Path.is_file, packages)], subject, location)
    elsewhere = _elsewhere(parts[0], folder)
    if elsewhere is not None:
        raise InvalidInput(
            f"{subject}: {parts[0]!r} beside the sweep file has the name of another module ({elsewhere}); rename it, "
            f"or name the file: {file.relative_to(folder)}:function"
        )
    return UserModule(location, str(folder))


def _require_inside(folder: Path, files: Sequence[Path], subject: str, allowance: str) -> None:
    """Links are followed; an environment that lies in the folder is no part of it."""
    for file in map(Path.resolve, files):
        if not file.is_relative_to(folder) or _is_installed(file, folder):
            raise InvalidInput(
                f"{subject}: {file} is not the sweep's own, which lies in {folder} outside of any environment, and no "
                f"other is run unasked; if you trust it, add --allow-code {allowance}"
            )


def _is_installed(file: Path, within: Path) -> bool:
    """Whether ``file`` belongs to this Python, or to an environment below ``within``."""
    standard = file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
    return standard or any(map(_INSTALLED.fullmatch, file.relative_to(within).parts))


def _elsewhere(top: str, folder: Path) -> str | None:
    """Where Python finds the top-level module ``top``, if that is not ``folder``."""
    if top in sys.stdlib_module_names:
        return "of the standard library"
    found = _found_by_python(top)
    if found is None:
        return None
    places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
    resolved = [Path(place).resolve() for place in places]
    ours = (folder / top, folder / top / "__init__.py", folder / f"{top}.py")
    return next((str(place) for place in resolved if place not in ours), None)


def _found_by_python(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a specification, such as __main__
        return None


@contextlib.contextmanager
def packed(code: UserCode) -> Iterator[tuple[list[str], UserCode]]:
    """Folders for Ray to ship, which last as long as the block, and ``code`` with sources relative to them.

    A file is shipped alone, and a module with its top-level package; installed ones have to be installed there.
    """
    places = sorted({_source(module).parent for module in code.modules if module.source is not None})
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, _PACKAGE)
        there = tuple(
            module if module.source is None else _shipped(module, root, str(places.index(_source(module).parent)))
            for module in code.modules
        )
        yield ([str(root)] if places else []), UserCode(there)


def _source(module: UserModule) -> Path:
    """What is shipped of a module that is not installed: a file, or the folder of a package."""
    source = Path(module.source or "")
    if module.location.endswith(".py"):
        return source
    top = module.location.partition(".")[0]
    file = module_file(source, top)
    return file if file is not None and file.name == f"{top}.py" else source / top


def _shipped(module: UserModule, root: Path, place: str) -> UserModule:
    """Copies into the folder ``place`` below ``root``, and names it as the source."""
    source, target = _source(module), root / place / _source(module).name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    return replace(module, source=str(PurePath(place, source.name) if module.location.endswith(".py") else place))


def unpacked(code: UserCode) -> UserCode:
    """``code`` on a worker: what was shipped lies where Ray has put it."""

    def place(source: str) -> str:
        if Path(source).is_absolute():
            return source
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InvalidInput(f"the folder {_PACKAGE}, which Ray ships, did not arrive on this node; run again")
        return str(Path(next(iter(found.submodule_search_locations)), source))

    return UserCode(
        tuple(
            module if module.source is None else replace(module, source=place(module.source)) for module in code.modules
        )
    )
