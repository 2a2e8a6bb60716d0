"""The sha256 of the files of weights that a trial reads: with other weights it is another experiment."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

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
    found = {name: digest_of(given) for name, given in _named(spec)}
    return {f"{PLACE}{name}.sha256": lines.encode() for name, lines in found.items() if lines}


def digest_of(given: str) -> str:
    """Return a line ``sha256  path`` for each file of weights of a file, folder or cached model; "" if it is not
    here.
    """
    return "\n".join(f"{_digest(file)}  {path}" for path, file in _files(given))


def names_weights(spec: TrialSpec) -> bool:
    """Return whether a trial reads weights, here or elsewhere."""
    return any(_named(spec))


def _named(spec: TrialSpec) -> Iterator[tuple[str, str]]:
    """Yield the components that read weights, and the file, folder or model that they name."""
    for name, component in (("model", spec.model), ("preprocessing", spec.preprocessing)):
        given = None if component is None else component.params.get(_KEYS.get(component.name, ""))
        if isinstance(given, str):
            yield name, given


def _digest(file: Path) -> str:
    status = file.stat()
    return _digest_of(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(1024)
def _digest_of(file: Path, *_: int) -> str:
    """Return the sha256 of a file, read once for each inode, size and time of change."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(given: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of weights, each with its path as the sweep names it."""
    path = Path(given).expanduser()
    if path.is_file():
        yield given, path
        return
    folder = model_folder(given)
    if folder is not None:
        files = {file for pattern in _READ for file in folder.glob(pattern)}
        yield from ((f"{given}/{file.name}", file) for file in sorted(files))


def model_folder(given: str) -> Path | None:
    """Return a folder, or that of a model in the cache of huggingface_hub; None if neither is on this machine."""
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download  # late: an extra

        return Path(snapshot_download(given, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed, not there, no name of a model
        return None
