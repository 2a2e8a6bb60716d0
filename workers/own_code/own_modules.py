"""Runs the user's own modules from sources that were read before: what runs is what was planned, recorded and shown.

Python itself reads a module once for each process, and compiled files by the time and size of their source. An edited
file would thus run as it was in one process and as it is in the next. Modules with a `SourceFile` are executed from its
bytes instead, and loaded again where a process has executed other bytes under their name.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final
from weakref import WeakKeyDictionary

from pydantic import Base64Bytes

from dpsweep.accounting.errors import InvalidInput

BYTECODE: Final = "# Compiled code, as no source of it was known. Python "
"""Beginning of a file with bytecode, before the version of Python that reads it."""


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the user's as it was when it was read.

    `name`: of its module in an import; "" for the list of digests of an installed package. `place`: its path below
    `TrialFiles.code`, the same on every machine. `path`: where it was read, the ``__file__`` of the module.
    """

    name: str
    place: str
    path: str
    content: Base64Bytes = field(repr=False)


class _Loader(SourceFileLoader):
    """Executes given bytes; reads and writes no compiled file. files: what the module may import, by name."""

    def __init__(self, file: SourceFile, files: Mapping[str, SourceFile]) -> None:
        super().__init__(file.name, file.path)
        self.file, self.files = file, files

    def get_data(self, path: str) -> bytes:
        return self.file.content if path == self.file.path else super().get_data(path)

    def path_stats(self, path: str) -> dict[str, int]:
        """Refuse, by which `SourceLoader` knows that there is no compiled file to use. Raises: OSError."""
        raise OSError("a source that was read before has no time")


class _Finder(MetaPathFinder):
    """Gives `load_module` and the user's modules the sources that were read together, before Python looks on its path.

    Imports of anybody else, such as of a notebook that reloads an edited file, find the file as it is.
    wanted: the sources that `load_module` imports just now.
    """

    def __init__(self) -> None:
        self.wanted: Mapping[str, SourceFile] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        files = _importers_files()
        file = files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file.path, loader=_Loader(file, files))


def _importers_files() -> Mapping[str, SourceFile]:
    """Return the sources that the module which imports just now was read with; none if it is not the user's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_globals.get("__name__") == "importlib"
    ):
        frame = frame.f_back
    if frame.f_globals is globals():
        return _finder.wanted
    loader = getattr(frame.f_globals.get("__spec__"), "loader", None)
    return loader.files if isinstance(loader, _Loader) else {}


_finder: Final = _Finder()
_adopted: Final = WeakKeyDictionary[ModuleType, tuple[object, SourceFile]]()
"""Modules that Python loaded from a file that has not changed since: the spec of then, and the source."""
_appended: Final[list[str]] = []
"""Folders that were appended to the import path of this process."""
_lock: Final = threading.RLock()


def load_module(name: str, files: Iterable[SourceFile], folders: Iterable[str], subject: str) -> ModuleType:
    """Import the module ``name``, and what it imports of ``files``, from their bytes.

    A module that was loaded from other bytes is loaded again, with all of the user's modules, which may hold parts of
    it; objects made before keep what they were made from. `folders`: where Python may find what ``files`` lack, after
    all else on its path. `subject`: what is imported, for errors.

    Raises: InvalidInput if Python has loaded another file by one of these names, and whatever the module raises.
    """
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _append(folders)
        importlib.invalidate_caches()
        wanted = {file.name: file for file in files if file.name}
        loaded = {each: sys.modules[each] for each in wanted if each in sys.modules}
        forgotten: dict[str, ModuleType] = {}
        if not all(_is_executed(module, wanted[each], subject) for each, module in loaded.items()):
            others = {each: module for each, module in sys.modules.copy().items() if _source(module) is not None}
            forgotten = {**loaded, **others}
            _forget(forgotten)
        _finder.wanted = wanted
        try:
            return importlib.import_module(name)
        finally:
            _keep_packages(forgotten)


def python_finds(name: str, *folders: Path) -> ModuleSpec | None:
    """Return where Python finds the top-level module ``name``, whatever this process has loaded; ``folders`` come
    last.
    """
    path = [*(entry for entry in sys.path if entry not in _appended), *map(str, folders)]
    for finder in [*sys.meta_path]:
        if finder is _finder or not hasattr(finder, "find_spec"):
            continue
        found = PathFinder.find_spec(name, path) if finder is PathFinder else finder.find_spec(name, None)
        if found is not None:
            return found
    return None


def _append(folders: Iterable[str]) -> None:
    """Make exactly these folders importable, after all that Python finds without them."""
    given = [*folders]
    for folder in [*_appended]:
        if folder not in given:
            _appended.remove(folder)
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
    for folder in given:
        if folder not in sys.path:
            sys.path.append(folder)
            _appended.append(folder)


def _forget(names: Iterable[str]) -> None:
    """Take modules from `sys.modules` and from the packages that they are attributes of."""
    for name in names:
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        package = sys.modules.get(parent)
        if package is not None and getattr(package, last, None) is module:
            delattr(package, last)


def _keep_packages(forgotten: Mapping[str, ModuleType]) -> None:
    """Put back the forgotten packages that modules still lie in, which somebody else imported, unless loaded again.

    Python takes a module for one of its package, and an import of it by name fails where the package is missing.
    """
    for name, package in forgotten.items():
        if name not in sys.modules and any(each.startswith(f"{name}.") for each in sys.modules.copy()):
            sys.modules[name] = package
    for name, module in sys.modules.copy().items():
        parent, _, last = name.rpartition(".")
        if parent in forgotten and not hasattr(sys.modules[parent], last):
            setattr(sys.modules[parent], last, module)


def _is_executed(module: ModuleType, file: SourceFile, subject: str) -> bool:
    """Return whether the loaded module was executed from ``file``. Raises: InvalidInput if Python loaded it from
    elsewhere.
    """
    known = _source(module)
    if known is not None:
        return (known.path, known.content) == (file.path, file.content)
    origin = getattr(module, "__file__", None)
    if origin is not None and Path(origin).resolve() != Path(file.path).resolve():
        raise InvalidInput(
            f"{subject}: Python has another module {file.name!r} ({origin}) than the one in "
            f"{Path(file.path).parent}; rename yours, or load it in a process of its own"
        )
    if origin is None or not _is_unchanged(module, file):
        return False
    _adopted[module] = module.__spec__, file
    return True


def _source(module: ModuleType) -> SourceFile | None:
    """Return what a module was executed from, if it is known: a module that somebody has reloaded has another spec."""
    spec = getattr(module, "__spec__", None)
    if isinstance(loader := getattr(spec, "loader", None), _Loader):
        return loader.file
    try:
        adopted, file = _adopted.get(module, (None, None))
    except TypeError:  # not every entry of `sys.modules` is a module
        return None
    return file if adopted is spec else None


def _is_unchanged(module: ModuleType, file: SourceFile) -> bool:
    """Return whether a module that Python loaded is certain to be ``file``, so that objects made from it keep their
    type.

    Its file is older than this process, and what Python compiled of it is what it compiles to now.
    """
    try:
        if Path(file.path).read_bytes() != file.content or os.stat(file.path).st_ctime >= process_start():
            return False
        cached = getattr(module, "__cached__", None)
        if cached is None or not os.path.exists(cached):
            return True
        compiled = marshal.loads(Path(cached).read_bytes()[_HEADER:])
        return bool(compiled == compile(file.content, file.path, "exec", dont_inherit=True))
    except (OSError, ValueError, EOFError, TypeError, SyntaxError):
        return False


_HEADER: Final = 16
"""Bytes before the code in a compiled file (PEP 552)."""


def process_start() -> float:
    """Return a time before this process began, in seconds since 1970. Raises: OSError where the system has no /proc."""
    ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    booted = next(
        line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if line.startswith("btime")
    )
    return float(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") - 2.0
