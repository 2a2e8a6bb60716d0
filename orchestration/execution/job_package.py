"""What `dpsweep submit` sends to a cluster: the sweep file, the user's own modules, and dpsweep itself. No data."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from accounting.errors import InvalidInput
from accounting.records import KeyCheck, new_key_check
from orchestration.execution.cluster import own_packages
from orchestration.records.limits import NO_LIMITS, Limits
from orchestration.sweeps.user_code import packed, unpacked
from workers.imports import UserCode

LARGEST: Final = 20 * 2**20
"""Most bytes of the user's own files; data belong into storage that the nodes share."""
_FOLDER = "dpsweep_job"
"""The folder with the job's description; Ray makes it importable for the driver, as it does with every package."""
_DATA: Final = frozenset(
    f".{ending}"
    for endings in (
        ("csv", "tsv", "parquet", "arrow", "feather", "h5", "hdf5", "db", "sqlite", "npy", "npz", "pkl", "pickle"),
        ("pt", "pth", "ckpt", "safetensors", "onnx", "bin"),
        ("zip", "gz", "bz2", "xz", "tar", "tgz", "jpg", "jpeg", "png"),
    )
    for ending in endings
)
"""Endings of files that are data or weights, and are left out."""


@dataclass(frozen=True)
class Asked:
    """When the run of a job ends early, and which trials it trains anew; see `pipeline.RunRequest`."""

    limits: Limits = NO_LIMITS
    retry: tuple[str, ...] = ()


ONLY_TO_RUN: Final = Asked()


@dataclass(frozen=True)
class JobDescription:
    """The sweep that a job runs. origin: name of the sweep file, for messages. output: absolute path or URI, as the
    nodes see it. code: the user's modules, located as `sweeps.user_code.packed` ships them. key_check: of the key that
    private files are to be encrypted with, which is not sent. asked: see `Asked`."""

    text: str
    origin: str
    output: str
    code: UserCode
    key_check: KeyCheck | None
    asked: Asked = ONLY_TO_RUN


@dataclass(frozen=True)
class Package:
    """Folders for Ray to ship. own: the user's files with their bytes. left_out: files of the user's packages that
    stay here. dpsweep: bytes of dpsweep itself."""

    folders: tuple[str, ...]
    own: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    dpsweep: int


_DESCRIPTION = TypeAdapter(JobDescription)


@contextlib.contextmanager
def packaged(text: str, origin: str, output: str, code: UserCode, asked: Asked = ONLY_TO_RUN) -> Iterator[Package]:
    """The package of a sweep in temporary folders, removed when the ``with`` block ends.

    Of the user's packages it holds everything but hidden files, ``__pycache__`` and files with an ending of data.
    Raises: InvalidInput if the user's files are larger than `LARGEST` together.
    """
    with packed(code) as (shipped, there), tempfile.TemporaryDirectory() as temporary:
        left_out = [path for folder in shipped for path in _prune(Path(folder))]
        job = Path(temporary, _FOLDER)
        job.mkdir()
        description = JobDescription(text, origin, output, there, new_key_check(), asked)
        (job / "job.json").write_text(json.dumps(asdict(description)))
        own = ((origin, len(text.encode())), *(each for folder in shipped for each in _sizes(Path(folder))))
        _require_small(own)
        folders = own_packages()
        dpsweep = sum(size for folder in folders for _, size in _sizes(Path(folder)))
        yield Package((*folders, *shipped, str(job)), own, tuple(left_out), dpsweep)


def read_job() -> JobDescription:
    """The job that this process was started for, with its code where Ray has put it.

    Raises: InvalidInput where no job's package is importable.
    """
    found = importlib.util.find_spec(_FOLDER)
    if found is None or not found.submodule_search_locations:
        raise InvalidInput("there is no job here: `dpsweep drive` is started by the jobs of `dpsweep submit`")
    content = Path(next(iter(found.submodule_search_locations)), "job.json").read_bytes()
    job = _DESCRIPTION.validate_json(content)
    return replace(job, code=unpacked(job.code))


def _prune(folder: Path) -> list[str]:
    """Delete from a copy what is not shipped; return the data files among it, relative to the copy."""
    left_out = []
    for path in sorted(folder.rglob("*"), reverse=True):  # what a folder holds comes before the folder
        if path.name.startswith(".") and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_file() and path.suffix.lower() in _DATA:
            left_out.append(_shown(path, folder))
            path.unlink()
        elif path.name.startswith("."):
            path.unlink()
    return left_out


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return ((_shown(path, folder), path.stat().st_size) for path in files)


def _shown(path: Path, folder: Path) -> str:
    """The file as its user knows it: without the number of the place that it is shipped from."""
    return "/".join(path.relative_to(folder).parts[1:])


def _require_small(own: tuple[tuple[str, int], ...]) -> None:
    total = sum(size for _, size in own)
    if total > LARGEST:
        name, size = max(own, key=lambda each: each[1])
        raise InvalidInput(
            f"the sweep's own files have {total / 2**20:.1f} MiB, but at most {LARGEST // 2**20} MiB are sent (the "
            f"largest is {name} with {size / 2**20:.1f} MiB); keep data in storage that the nodes share"
        )
