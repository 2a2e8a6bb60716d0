"""Finds the sources that a module of the user's consists of: its own file, and the user's files that it imports.

Imports are read from the source, so that nothing runs: imports in functions count, and both branches of an ``if``. A
name that is computed counts as every module of the package that its beginning names, or of the folder. Not found are
files that code opens itself, also to execute them, and modules in folders that code itself adds to `sys.path`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import Final

from dpsweep.workers.own_code.own_modules import SourceFile, python_finds

_INSTALLED = re.compile(r"(^|/)((site|dist)-packages|lib(64)?/python3\.\d+)/")
"""Folders with installed packages; a sweep file's folder may contain a Python environment."""
_ALL: Final = "*"
GIVEN: Final = "given"
"""Folder in the names of the modules of functions and classes that Python code gave: ``given/Net.py``."""


def sources_of(location: str, source: str | None) -> tuple[SourceFile, ...]:
    """Return the sources of a module or file, as they are now; its own one is the first. Empty if there is no such
    file.

    location, source: as of a `dpsweep.workers.own_code.imports.UserModule`. An installed package is one list with the
    sha256 of each of its files, as it changes only when it is installed again.
    """
    importlib.invalidate_caches()
    if location.endswith(".py"):
        file = Path(source or location).resolve()
        return _Search(file.parent, folder_of(location), _is_own).of_file(file)
    if source is not None:
        return _Search(Path(source), PurePath(), _is_own).of_module(location)
    return _of_python(location)


def sources_of_text(location: str, text: str, folder: Path) -> tuple[SourceFile, ...]:
    """Return the sources of a module that is no file: its text, and the user's files that it imports from ``folder``.

    location: its name in a sweep, ``given/Net.py``.
    """
    importlib.invalidate_caches()
    return _Search(folder, folder_of(location), _is_own).of_text(location, text)


def file_module_name(file: Path) -> str:
    """Return the name of the module that a file is loaded as, so that it meets no module of Python's by its own
    name.
    """
    return f"dpsweep_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def digests_of(package: str) -> str:
    """Return the place below `TrialFiles.code` of the list of digests of an installed package."""
    return f"installed/{package}.sha256"


def folder_of(location: str) -> PurePath:
    """Return the folder below `TrialFiles.code` of a file ``location`` and of the modules beside it.

    >>> folder_of("models/net.py").as_posix(), folder_of("/home/me/net.py").as_posix(), folder_of("net.py").as_posix()
    ('models', 'home/me', '.')
    """
    parts = [part for part in PurePath(location).parent.parts if part not in (PurePath(location).anchor, "..")]
    return PurePath(*parts)


def module_file(folder: Path, location: str) -> Path | None:
    """Return the Python file of module ``location`` below ``folder``, or None; imports nothing."""
    stem = folder.joinpath(*location.split("."))
    candidates = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
    return next((file for file in candidates if os.path.isfile(file)), None)  # no file for a name that none can have


def is_installed(file: Path, within: Path) -> bool:
    """Return whether ``file`` belongs to this Python, or to an environment in ``within`` or below.

    An environment can be any folder on Python's path: of `pip install --target`, say.
    """
    place = file.relative_to(within)
    if file.is_relative_to(_standard_library()) or _INSTALLED.search(place.as_posix()) is not None:
        return True
    return any(name in _installed_in(within.joinpath(*place.parts[:depth])) for depth, name in enumerate(place.parts))


@cache
def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()  # asked for each of thousands of modules


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Return the names in ``folder`` that the records of packages installed there begin with."""
    records = (record.read_text(encoding="utf-8", errors="replace") for record in folder.glob("*.dist-info/RECORD"))
    return frozenset(re.split("[/,]", line)[0] for record in records for line in record.splitlines())


def _is_own(file: Path) -> bool:
    return not is_installed(file.resolve(), Path("/"))


def _of_python(location: str) -> tuple[SourceFile, ...]:
    """Return the sources of a module that Python finds by itself; see `sources_of`. The standard library has none."""
    top = location.partition(".")[0]
    spec = None if top in sys.stdlib_module_names else python_finds(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ()
    origin = Path(spec.origin)
    package = origin.parent if origin.name == "__init__.py" else origin
    if _is_own(origin):
        return _Search(package.parent, PurePath(), _is_own).of_module(location)
    files = _Search(package.parent, PurePath(), lambda file: file.is_relative_to(package)).of_module(location)
    lines = sorted(f"{hashlib.sha256(file.content).hexdigest()}  {file.place}" for file in files)
    return (SourceFile("", digests_of(top), "", "\n".join(lines).encode()),)


class _Search:
    """Follows the imports of files. root: the folder whose modules they may import. place: its name in the record.

    is_ours: whether a file is followed.
    """

    def __init__(self, root: Path, place: PurePath, is_ours: Callable[[Path], bool]) -> None:
        self._root, self._place, self._is_ours = root, place, is_ours
        self._files: dict[str, SourceFile] = {}
        self._folders: dict[str, list[Path]] = {}
        self._unread: list[SourceFile] = []
        self._taken: set[Path] = set()

    def of_file(self, file: Path) -> tuple[SourceFile, ...]:
        """Return the sources of a file that is loaded under its own name; none if it is not there."""
        name = file_module_name(file)
        if file.is_file():
            self._add(name, file, PurePath(file.name))
        return self._reached(name)

    def of_text(self, location: str, text: str) -> tuple[SourceFile, ...]:
        """Return the sources of a module with this text, which is loaded under its own name."""
        name = file_module_name(Path(location))
        self._take(SourceFile(name, location, location, text.encode()))
        return self._reached(name)

    def of_module(self, name: str) -> tuple[SourceFile, ...]:
        """Return the sources of a module; none if it is not there, or not followed."""
        self.find(name)
        return self._reached(name)

    def _reached(self, first: str) -> tuple[SourceFile, ...]:
        while self._unread:
            for name in _imported(self._unread.pop()):
                self.find(name)
        if first not in self._files:
            return ()
        return tuple(sorted(self._files.values(), key=lambda file: (file.name != first, file.name)))

    def find(self, dotted: str) -> None:
        """Add the module and the packages that it lies in, as far as they are the user's own."""
        parts = dotted.split(".")
        for length, part in enumerate(parts, start=1):
            name = ".".join(parts[:length])
            if part == _ALL:
                self._find_all(".".join(parts[: length - 1]))
            elif not self._is_found(name):
                return

    def _is_found(self, name: str) -> bool:
        if name in self._files or name in self._folders:
            return True
        parent, _, last = name.rpartition(".")
        if not parent:
            return self._is_found_at_top(name)
        for folder in self._folders.get(parent, ()):
            file = module_file(folder, last)
            if file is not None and self._is_ours(file):
                self._add_module(name, file)
                return True
        spaces = [folder / last for folder in self._folders.get(parent, ()) if (folder / last).is_dir()]
        self._folders.update({name: spaces} if spaces else {})
        return bool(spaces)

    def _is_found_at_top(self, name: str) -> bool:
        known = name == "dpsweep" or name in sys.stdlib_module_names
        spec = None if known else python_finds(name, self._root)
        if spec is None:
            return False
        if spec.origin is not None and spec.origin.endswith(".py"):
            is_ours = self._is_ours(Path(spec.origin))
            if is_ours:  # of two modules of the user's, the one beside the module that imports it
                self._add_module(name, module_file(self._root, name) or Path(spec.origin))
            return is_ours
        spaces = [Path(each) for each in spec.submodule_search_locations or () if self._is_ours(Path(each))]
        self._folders.update({name: spaces} if spaces else {})
        return bool(spaces)

    def _find_all(self, package: str) -> None:
        """Add every module of a package; of the root, those in it and in packages there."""
        for folder in self._folders.get(package, ()) if package else (self._root,):
            resolved = folder.resolve()
            if resolved in self._taken:
                continue
            self._taken.add(resolved)
            for path in sorted(folder.iterdir()):
                name = f"{package}.{path.stem}" if package else path.stem
                if path.suffix == ".py" and path.stem.isidentifier() and path.stem != "__init__":
                    self.find(name)
                elif path.name.isidentifier() and (path / "__init__.py").is_file():
                    self.find(f"{name}.{_ALL}")

    def _add_module(self, name: str, file: Path) -> None:
        is_package = file.name == "__init__.py"
        if is_package:
            self._folders[name] = [file.parent]
        place = PurePath(*name.split("."))
        self._add(name, file, place / "__init__.py" if is_package else place.with_suffix(".py"))

    def _add(self, name: str, file: Path, place: PurePath) -> None:
        self._take(SourceFile(name, (self._place / place).as_posix(), str(file), file.read_bytes()))

    def _take(self, source: SourceFile) -> None:
        self._files[source.name] = source
        self._unread.append(source)


def _imported(file: SourceFile) -> Iterator[str]:
    """Yield the dotted names that a source imports anywhere; ``*`` as the last part stands for every module there."""
    try:
        tree = ast.parse(file.content)
    except (SyntaxError, ValueError, RecursionError):
        return  # said where it is imported
    package = file.name if file.place.endswith("__init__.py") else file.name.rpartition(".")[0]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _resolved(module or "", level, package)
                yield from (f"{base}.{alias.name}" for alias in names if base)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[name, *_]):
                if called in ("import_module", "__import__"):
                    yield from _computed(name, package)


def _resolved(module: str, level: int, package: str) -> str:
    """Return the absolute name of a module that is imported relative to ``package``; "" beyond its top."""
    if not level:
        return module
    parts = package.split(".") if package else []
    kept = parts[: len(parts) - (level - 1)] if level <= len(parts) else []
    return ".".join((*kept, *filter(None, [module]))) if kept else ""


def _computed(name: ast.expr, package: str) -> Iterator[str]:
    """Yield the modules that an expression may name: one, or all that begin as its constant beginning does."""
    match name:
        case ast.Constant(value=str(text)):
            known, rest = text, ""
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            known, rest = text, _ALL
        case ast.BinOp(left=ast.Constant(value=str(text))):
            known, rest = text, _ALL
        case _:
            known, rest = "", _ALL
    level = len(known) - len(known.lstrip("."))
    beginning = known[level:] if not rest else known[level:].rpartition(".")[0]
    base = _resolved(beginning, level, package)
    yield f"{base}.{rest}" if base and rest else base or rest
