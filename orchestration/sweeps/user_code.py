"""The user's own modules: which ones a sweep may run, where they are, and how they are shipped to Ray workers.

A sweep file can name any function, so naming one does not permit it to run. A sweep runs only code in its own folder
and modules that the user allows by name. All modules are located on the file system before anything is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store.layout import absolute
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode, UserModule, split_import_path
from dpsweep.workers.own_code.own_modules import SourceFile, python_finds
from dpsweep.workers.own_code.own_sources import is_installed, module_file

_PACKAGE = "dpsweep_user_code"
"""Folder in which the user's modules are shipped. Ray makes the folder importable on every worker, but not the modules
inside it."""


def permitted(
    sweep: SweepSpec, folder: Path, allowed: Sequence[str] = (), given: Sequence[UserModule] = ()
) -> UserCode:
    """Return the user's own code that ``sweep`` names, as it is now, located and read without importing any of it.

    `folder`: the folder of the sweep file; code inside it may run. `allowed`: names of further modules, with their
    submodules, and of files that may run. `given`: modules whose functions and classes the caller has given itself.

    Raises: InvalidInput with one line for each name that may not run, cannot be found, or is also the name of a module
    that Python finds elsewhere.
    """
    importlib.invalidate_caches()  # a file that a refusal named may have been added since
    folder = folder.resolve()
    allowances = {module.location: module for module in map(allowance, allowed)}
    objects = {module.location: module for module in given}
    found: list[UserModule] = []
    refused: list[str] = []
    for what, name in sweep.own_components:
        try:
            location, _ = split_import_path(name, what)
            if location in objects:
                continue
            locate = _own_file if location.endswith(".py") else _own_module
            found.append(locate(location, f"{what} {name!r}", folder, allowances))
        except InvalidInput as error:
            refused.append(str(error))
    if refused:
        raise InvalidInput("\n".join(refused))
    return UserCode((*given, *(module.as_it_is() for module in dict.fromkeys(found))))


def allowed_again(
    sweep: SweepSpec, allowed: Sequence[str], given: Sequence[UserModule] = (), option: str = "--allow-code"
) -> UserCode:
    """Return the part of a stored sweep's user code that ``allowed`` names or ``given`` holds, as it is now; nothing
    is imported.

    The folder of the sweep file is not stored, so an allowed file matches every name that its path ends with. A sweep
    that names a file outside of its folder is matched by the name of the file alone.

    option: what gave ``allowed``, for the message. Raises: InvalidInput if there is none of such a name.
    """
    allowances = [allowance(name, option) for name in allowed]
    locations = [split_import_path(name, what)[0] for what, name in sweep.own_components]
    found = (_meant(location, each) for location in locations for each in allowances)
    distinct = dict.fromkeys(module for module in found if module is not None)
    objects = (module for module in given if module.location in locations)
    return UserCode((*objects, *(module.as_it_is() for module in distinct)))


def _meant(location: str, allowance: UserModule) -> UserModule | None:
    """``allowance`` under the name ``location`` that a sweep gives it; None if they do not match."""
    if not allowance.location.endswith(".py"):
        inside = location == allowance.location or location.startswith(f"{allowance.location}.")
        return replace(allowance, location=location) if inside else None
    file = PurePath(allowance.location)
    if location.endswith(".py"):
        outside = PurePath(location).is_absolute() or ".." in PurePath(location).parts
        is_meant = file.match(PurePath(location).name if outside else location)
        return UserModule(location, str(file)) if is_meant else None
    module = PurePath(*location.split("."))
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if file.match(str(path)):
            return UserModule(location, str(PurePath(*file.parts[: -len(path.parts)])))
    return None


def allowance(name: str, option: str = "--allow-code") -> UserModule:
    """Return the file or module that ``option`` names; a module must be installed or in the working directory.

    Raises: InvalidInput if there is none of that name.
    """
    if name.endswith(".py"):
        file = Path(absolute(name))
        if not file.is_file():
            raise InvalidInput(f"{option} {name!r}: there is no file {file}; correct the path")
        return UserModule(str(file), str(file))
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput(f"{option} is {name!r}, but must be a module or a file ending in .py")
    top = name.partition(".")[0]
    found = python_finds(top)
    if found is not None and found.origin is not None:
        origin = Path(found.origin)
        own = origin.suffix == ".py" and not is_installed(origin.resolve(), Path("/"))
        return UserModule(name, str(origin.parents[origin.name == "__init__.py"]) if own else None)
    if module_file(Path.cwd(), name) is None:
        raise InvalidInput(
            f"{option} {name!r}: no such module is installed or lies in {Path.cwd()}; install it, or name a file"
        )
    return UserModule(name, str(Path.cwd()))


def _own_file(location: str, subject: str, folder: Path, allowances: Mapping[str, UserModule]) -> UserModule:
    """Return a file, named relative to the sweep file's folder. Raises: InvalidInput if it may not run or is
    missing.
    """
    file = Path(absolute(str(folder / location)))
    if str(file) not in allowances:
        _require_inside(folder, [file], subject, str(file))
    if not file.is_file():
        raise InvalidInput(f"{subject}: there is no file {file}; correct the path")
    return UserModule(location, str(file))


def _own_module(location: str, subject: str, folder: Path, allowances: Mapping[str, UserModule]) -> UserModule:
    """Return a module in the sweep file's folder, or one that the user allowed by its name or that of a parent package.

    Raises: InvalidInput if it may not run, is missing, or has the name of another module.
    """
    parts = location.split(".")
    for length in range(len(parts), 0, -1):
        allowed = allowances.get(".".join(parts[:length]))
        if allowed is not None:
            return replace(allowed, location=location)
    file = module_file(folder, location)
    if location == "__main__":
        raise InvalidInput(
            f"{subject}: '__main__' is another module in every process; in Python give the function or class itself, "
            "as in model=Net, or put it into a file"
        )
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
        if not file.is_relative_to(folder) or is_installed(file, folder):
            raise InvalidInput(
                f"{subject}: {file} is not the sweep's own, which lies in {folder} outside of any environment, and no "
                f"other is run unasked; if you trust it, add --allow-code {allowance}"
            )


def _elsewhere(top: str, folder: Path) -> str | None:
    """Return where Python finds the top-level module ``top`` if not in ``folder``, else None."""
    if top in sys.stdlib_module_names:
        return "of the standard library"
    found = python_finds(top)
    if found is None:
        return None
    places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
    resolved = [Path(place).resolve() for place in places]
    ours = (folder / top, folder / top / "__init__.py", folder / f"{top}.py")
    return next((str(place) for place in resolved if place not in ours), None)


@contextlib.contextmanager
def shipped_folders(code: UserCode) -> Iterator[tuple[list[str], UserCode]]:
    """Yield temporary folders for Ray to ship, and ``code`` with sources relative to them; removed when the block ends.

    Shipped are the sources of ``code`` as they were read, and with a module the other files of its top-level package.
    Installed modules are not shipped: they must be installed on the workers too.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, _PACKAGE)
        folders = code.folders
        there = tuple(
            module if module.folder is None else _shipped(module, root, str(folders.index(module.folder)))
            for module in code.modules
        )
        yield ([str(root)] if folders else []), replace(code, modules=there)


def _shipped(module: UserModule, root: Path, place: str) -> UserModule:
    """Write the module's files to ``root/place``; return it with these as its source."""
    is_file, top = module.location.endswith(".py"), module.location.partition(".")[0]
    package = Path(module.folder or "", top)
    if not is_file and package.is_dir():
        shutil.copytree(package, root / place / top, ignore=_not_shipped(package.resolve()), dirs_exist_ok=True)
    files = []
    for index, file in enumerate(module.sources()):
        name = PurePath(file.path).name if is_file and not index else _below(file.name, PurePath(file.path).name)
        target = root / place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        files.append(replace(file, path=str(PurePath(place, name))))
    source = str(PurePath(place, PurePath(files[0].path).name)) if is_file else place
    return replace(module, source=source, files=tuple(files))


def _not_shipped(package: Path) -> Callable[[str, list[str]], list[str]]:
    """Return what `shutil.copytree` leaves out of a package: caches, pipes, and links to folders or out of the package.

    Else its author could send files of the user who submits it, or keep the search from ending.
    """

    def stays(path: Path) -> bool:
        if path.name == "__pycache__":
            return True
        if path.is_symlink():
            return not path.is_file() or not path.resolve().is_relative_to(package)
        return not (path.is_dir() or path.is_file())

    return lambda folder, names: [name for name in names if stays(Path(folder, name))]


def _below(module: str, file: str) -> str:
    """Return the path of a module's file below the folder that it is imported from.

    >>> _below("package.nets", "nets.py"), _below("package", "__init__.py")
    ('package/nets.py', 'package/__init__.py')
    """
    path = PurePath(*module.split("."))
    return str(path / file if file == "__init__.py" else path.with_suffix(".py"))


def unpacked(code: UserCode) -> UserCode:
    """Return ``code`` on a worker, with absolute locations of shipped modules. Raises: InvalidInput if they are
    missing.
    """

    def place(source: str) -> str:
        if Path(source).is_absolute():
            return source
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InvalidInput(f"the folder {_PACKAGE}, which Ray ships, did not arrive on this node; run again")
        return str(Path(next(iter(found.submodule_search_locations)), source))

    def placed(file: SourceFile) -> SourceFile:
        return replace(file, path=place(file.path)) if file.name else file

    return replace(
        code,
        modules=tuple(
            module
            if module.source is None
            else replace(module, source=place(module.source), files=tuple(map(placed, module.files)))
            for module in code.modules
        ),
    )
