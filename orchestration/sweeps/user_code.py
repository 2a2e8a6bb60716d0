"""The user's own modules: which ones a sweep may run, where they are, and how they are shipped to Ray workers.

A sweep file can name any function, so naming one does not permit it to run: a sweep runs only code in its own folder
and modules that the user allows by name. All modules are located on the file system before anything is imported.
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
"""Folder in which the user's modules are shipped. Ray makes the folder importable on every worker, but not the modules
inside it."""
_INSTALLED = re.compile(r"(site|dist)-packages|python3\.\d+")
"""Names of folders with installed packages; a sweep file's folder may contain a Python environment."""


def permitted(sweep: SweepSpec, folder: Path, allowed: Sequence[str] = ()) -> UserCode:
    """The user's own code that ``sweep`` names, located without importing any of it.

    folder: the folder of the sweep file; code inside it may run. allowed: names of further modules, with their
    submodules, and of files that may run.

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
    """The part of a stored sweep's user code that ``allowed`` names; nothing is imported.

    The folder of the sweep file is not stored, so an allowed file matches every name that its path ends with.
    """
    allowances = [_allowance(name) for name in allowed]
    locations = [split_import_path(name, what)[0] for what, name in sweep.own_components]
    found = (_meant(location, allowance) for location in locations for allowance in allowances)
    return UserCode(tuple(dict.fromkeys(module for module in found if module is not None)))


def _meant(location: str, allowance: UserModule) -> UserModule | None:
    """``allowance`` under the name ``location`` that a sweep gives it; None if they do not match."""
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
    """The file or module that ``--allow-code`` names; a module must be installed or in the working directory.

    Raises: InvalidInput if there is none of that name.
    """
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise InvalidInput(f"--allow-code {name!r}: there is no file {file}; correct the path")
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
    """A file, named relative to the sweep file's folder. Raises: InvalidInput if it may not run or is missing."""
    file = (folder / location).resolve()
    if str(file) not in allowances:
        _require_inside(folder, [file], subject, str(file))
    if not file.is_file():
        raise InvalidInput(f"{subject}: there is no file {file}; correct the path")
    return UserModule(location, str(file))


def _own_module(location: str, subject: str, folder: Path, allowances: Mapping[str, UserModule]) -> UserModule:
    """A module in the sweep file's folder, or one that the user allowed by its name or that of a parent package.

    Raises: InvalidInput if it may not run, is missing, or has the name of another module.
    """
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
    """Raises: InvalidInput for a file that, after following links, is outside ``folder`` or in an environment in it."""
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
    """Where Python finds the top-level module ``top`` if not in ``folder``, else None."""
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
    except ValueError:  # a module without a spec, such as __main__
        return None


@contextlib.contextmanager
def packed(code: UserCode) -> Iterator[tuple[list[str], UserCode]]:
    """Temporary folders for Ray to ship, and ``code`` with sources relative to them; removed when the block ends.

    A file is shipped alone, a module with its top-level package. Installed modules are not shipped: they must be
    installed on the workers too.
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
    """The file or package folder to ship for a module that is not installed."""
    source = Path(module.source or "")
    if module.location.endswith(".py"):
        return source
    top = module.location.partition(".")[0]
    file = module_file(source, top)
    return file if file is not None and file.name == f"{top}.py" else source / top


def _shipped(module: UserModule, root: Path, place: str) -> UserModule:
    """Copy the module into ``root/place``; return it with the copy as its source."""
    source, target = _source(module), root / place / _source(module).name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    return replace(module, source=str(PurePath(place, source.name) if module.location.endswith(".py") else place))


def unpacked(code: UserCode) -> UserCode:
    """``code`` on a worker, with absolute locations of shipped modules. Raises: InvalidInput if they are missing."""

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
