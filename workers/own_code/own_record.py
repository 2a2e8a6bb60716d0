"""The record of the user's code and weights that a trial was trained with, in the trial's folder ``code``.

It holds the sources themselves, not only their digests; of weights, the digests. So a reader sees the difference, a
model loads where its module was edited or lost, and edits that change nothing that runs are recognised. It is no part
of the trial's key: under another key an edited file would silently be trained again, which costs privacy again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Final

from dpsweep.accounting.errors import START_ANEW, InvalidInput
from dpsweep.accounting.records.files import delete_folder, exists, list_files, read_bytes, write_bytes_atomically
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine.folders import at_home
from dpsweep.workers.own_code.imports import UserCode, UserModule, is_import_path
from dpsweep.workers.own_code.own_modules import SourceFile
from dpsweep.workers.own_code.own_sources import digests_of, folder_of
from dpsweep.workers.spec import TrialSpec

PLACE: Final = "weights/"
"""Folder below `TrialFiles.code` with a list of digests for each component that reads weights."""
_KEYS: Final[Mapping[str, str]] = {
    "frozen_features": "weights",
    "hugging_face": "path",
    "resnet20_gn": "initial_weights",
    "text_features": "path",
    "vision": "initial_weights",
}
"""The parameter that names a file or folder with weights, by the component that reads it."""
_READ: Final = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a folder that models of transformers are made from."""


def weight_digests(spec: TrialSpec) -> Mapping[str, bytes]:
    """Return for each component that reads weights the lines ``sha256  path`` of their files, by its `PLACE`.

    Weights that are not on this machine are left out: the component that reads them says what is missing.
    """
    found = {name: lines_of_digests(given) for name, given in _named(spec)}
    return {f"{PLACE}{name}.sha256": lines.encode() for name, lines in found.items() if lines}


def lines_of_digests(given: str) -> str:
    """Return a line ``sha256  path`` for each file of weights of a file, folder or cached model; "" if it is not
    here.
    """
    return "\n".join(f"{digest_of_file(file)}  {path}" for path, file in _files(given))


def with_digests_of_weights(code: UserCode, specs: Iterable[TrialSpec]) -> UserCode:
    """Return ``code`` with the digests of weights that the trials read, as they are now on this machine."""
    named = dict.fromkeys(given for spec in specs for _, given in _named(spec))
    return replace(code, weights=tuple((given, lines) for given in named if (lines := lines_of_digests(given))))


def require_same_weights(spec: TrialSpec, code: UserCode) -> None:
    """Raise InvalidInput if the trial would read other weights than the run began with.

    Weights that are not here are left out, as in `weight_digests`.
    """
    before = dict(code.weights)
    for given in (given for _, given in _named(spec) if given in before):
        now = lines_of_digests(given)
        if now and (changed := _changed(PLACE, before[given].encode(), now.encode())):
            raise InvalidInput(
                f"{has_changed(changed)} since the run began, or differ between machines, and results of both do not "
                "compare; restore the weights and run again, or choose another folder with --output"
            )


def notes_on_weights(spec: TrialSpec) -> tuple[str, ...]:
    """Return a note on each file, folder or model of weights that a trial reads: what its epsilon says nothing of."""
    return tuple(
        f"pretrained weights {given} are taken as public: no ε covers what they were trained on"
        for _, given in _named(spec)
    )


def names_weights(spec: TrialSpec) -> bool:
    """Return whether a trial reads weights, here or elsewhere."""
    return any(_named(spec))


def _named(spec: TrialSpec) -> Iterator[tuple[str, str]]:
    """Yield the components that read weights, and the file, folder or model that they name."""
    for name, component in (("model", spec.model), ("preprocessing", spec.preprocessing)):
        given = None if component is None else component.params.get(_KEYS.get(component.name, ""))
        if isinstance(given, str):
            yield name, given


def digest_of_file(file: Path) -> str:
    """Return the sha256 of a file, read once for each inode, size and time of change."""
    status = file.stat()
    return _digest(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(1024)
def _digest(file: Path, *_: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(given: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of weights, each with its path as the sweep names it."""
    path = at_home(given)
    if path.is_file():
        yield given, path
        return
    folder = model_folder(given)
    if folder is not None:
        files = {file for pattern in _READ for file in folder.glob(pattern) if file.is_file()}
        yield from ((f"{given}/{file.name}", file) for file in sorted(files))


def model_folder(given: str) -> Path | None:
    """Return a folder, or that of a model in the cache of huggingface_hub; None if neither is on this machine."""
    path = at_home(given)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download  # late: an extra

        return Path(snapshot_download(given, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed, not there, no name of a model
        return None


def own_locations(spec: TrialSpec) -> tuple[str, ...]:
    """Return the modules and files of the user's own that a trial names, each once."""
    names = (spec.data.name, spec.model.name, spec.loss.name, spec.clipping.name)
    return tuple(dict.fromkeys(name.rpartition(":")[0] for name in names if is_import_path(name)))


def own_code(spec: TrialSpec, code: UserCode) -> Mapping[str, bytes]:
    """Return the sources that a trial runs of ``code``, and the digests of the weights that it reads, by their place
    below `TrialFiles.code`.

    Raises: InvalidInput if its components import different modules by one name, as a process has only one of them.
    """
    modules = filter(None, map(code.named, own_locations(spec)))
    found: dict[str, SourceFile] = {}
    for file in (file for module in modules for file in module.sources()):
        same = found.setdefault(file.name or file.place, file)
        if same.content != file.content:
            raise InvalidInput(
                f"the trial's own components import two modules as {file.name!r}, {same.path} and {file.path}; rename "
                "one of them"
            )
    return {**{file.place: file.content for file in found.values()}, **weight_digests(spec)}


def store_code(files: TrialFiles, spec: TrialSpec, code: UserCode) -> None:
    """Store the sources that the trial is about to run, in place of an earlier start's."""
    found = own_code(spec, code)
    if own_locations(spec) or found:
        delete_folder(files.code)
    for place, content in found.items():
        write_bytes_atomically(f"{files.code}/{place}", content)


def changed_code(files: TrialFiles, spec: TrialSpec, code: UserCode) -> tuple[str, ...]:
    """Return the files of ``code`` that are not as they were when the trial began, by their place below
    `TrialFiles.code`, and the paths of weights that are not.

    Only modules that are in ``code``, and weights that are on this machine, are compared. Comments, layout and texts
    that nothing reads do not count. A file that is gone counts if all modules that the trial names are in ``code``.
    """
    now = own_code(spec, code)
    changed = [name for place in now for name in _changed(place, _stored(files, place), now[place])]
    modules = [code.named(location) for location in own_locations(spec)]
    is_whole = bool(now) and all(module is not None and module.sources() for module in modules)
    if changed or not is_whole:
        return tuple(changed)
    return tuple(name for name in list_files(files.code) if name not in now and not name.startswith(PLACE))


def require_same_code(files: TrialFiles, spec: TrialSpec, code: UserCode, next_step: str = START_ANEW) -> None:
    """Raise InvalidInput, ending in ``next_step``, if files of ``code`` are not as they were when the trial began."""
    changed = changed_code(files, spec, code)
    if changed:
        raise InvalidInput(
            f"{has_changed(changed)} since the trial in {files.root} began; restore what is kept in {files.code} (of "
            f"weights, their sha256), or {next_step}"
        )


def has_changed(files: Sequence[str]) -> str:
    """Return words for files that are not as they were.

    >>> has_changed(["net.py"]), has_changed(["net.py", "layers.py"])
    ('net.py has changed', 'net.py and layers.py have changed')
    """
    *others, last = files
    return f"{', '.join(others)} and {last} have changed" if others else f"{last} has changed"


def stored_code(files: TrialFiles, spec: TrialSpec) -> UserCode:
    """Return the code that a trial in a local folder was trained with, from its record; installed modules as they
    are.
    """
    return UserCode(tuple(_recorded(files, location).as_it_is() for location in own_locations(spec)))


def _recorded(files: TrialFiles, location: str) -> UserModule:
    path = PurePath(files.code, folder_of(location))
    if location.endswith(".py"):
        return UserModule(location, str(path / PurePath(location).name))
    top = location.partition(".")[0]
    is_installed = exists(f"{files.code}/{digests_of(top)}")
    return UserModule(location, None if is_installed else str(path))


def _stored(files: TrialFiles, place: str) -> bytes | None:
    try:
        return read_bytes(f"{files.code}/{place}")
    except FileNotFoundError:
        return None


def _changed(place: str, before: bytes | None, now: bytes) -> tuple[str, ...]:
    """Return the files at a place that differ: itself, or weights or files of an installed package that its digests
    name.
    """
    if before == now:
        return ()
    if not place.endswith(".py"):
        lines = {*(before or b"").decode().splitlines()} ^ {*now.decode().splitlines()}
        kind = "" if place.startswith(PLACE) else " (installed)"
        return tuple(sorted({f"{line.partition('  ')[2]}{kind}" for line in lines}))
    return () if before is not None and _meaning(before) == _meaning(now) else (place,)


def _meaning(source: bytes) -> str | bytes:
    """Return what a source runs: its syntax without positions, comments and texts that stand alone; itself if it has
    none.

    Where a source reads a ``__doc__``, texts count.
    """
    try:
        tree = ast.parse(source)
        nodes = [*ast.walk(tree)]
        names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in nodes}
        if not names & {"__doc__", "getdoc"}:
            for node in nodes:
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(node, name, None)
                    if isinstance(block, list):
                        setattr(node, name, [each for each in block if not _is_text(each)])
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of one that is nested deeply
        return source


def _is_text(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False
