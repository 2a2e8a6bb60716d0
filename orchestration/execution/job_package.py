"""The package that `dpsweep submit` sends to a cluster: sweep file, the user's modules and dpsweep, but no data."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import KeyCheck, new_key_check
from dpsweep.accounting.records.files import read_bytes
from dpsweep.orchestration.execution.cluster import own_package
from dpsweep.orchestration.records.limits import FIRST_COME, NO_LIMITS, Limits, Turn
from dpsweep.orchestration.sweeps.user_code import packed, unpacked
from dpsweep.workers.own_code.imports import UserCode

LARGEST: Final = 20 * 2**20
"""Largest total size of the user's own files, in bytes; data belong in storage that the nodes share."""
_FOLDER = "dpsweep_job"
"""Folder of the job's description; Ray makes it importable for the driver, like every shipped package."""
_DATA: Final = frozenset(
    f".{ending}"
    for endings in (
        ("csv", "tsv", "parquet", "arrow", "feather", "h5", "hdf5", "db", "sqlite", "npy", "npz", "pkl", "pickle"),
        ("pt", "pth", "ckpt", "safetensors", "onnx", "bin"),
        ("zip", "gz", "bz2", "xz", "tar", "tgz", "jpg", "jpeg", "png"),
    )
    for ending in endings
)
"""Suffixes of data and weight files, which are left out of the package."""


@dataclass(frozen=True)
class Asked:
    """Limits of the run of a job, trials that it trains again, its turn, its name in MLflow, and where the user's own
    modules lie; see `pipeline.RunRequest`."""

    limits: Limits = NO_LIMITS
    retry: tuple[str, ...] = ()
    turn: Turn = FIRST_COME
    name: str | None = None
    submitted_from: Mapping[str, str] = field(default_factory=dict)


ONLY_TO_RUN: Final = Asked()


@dataclass(frozen=True)
class JobDescription:
    """The sweep that a job runs.

    `text`: of the sweep file. `origin`: name of the sweep file, for messages. `output`: absolute path or URI, as the
    nodes see it. `code`: the user's modules at the locations that `sweeps.user_code.packed` ships them to. `key_check`:
    identifies the key that private files must be encrypted with; the key itself is not sent. `tracking`: where and as
    whom the driver records in MLflow, as `tracking.access.sealed` returns it.
    """

    text: str
    origin: str
    output: str
    code: UserCode
    key_check: KeyCheck | None
    asked: Asked = ONLY_TO_RUN
    tracking: str = ""


@dataclass(frozen=True)
class Package:
    """Folders for Ray to ship.

    `own`: names and sizes in bytes of the user's files. `left_out`: files of the user's packages that are not shipped.
    `dpsweep`: size of dpsweep itself in bytes. `code`: sha256 of each of the user's modules that runs, by its place in
    the record of a trial.
    """

    folders: tuple[str, ...]
    own: tuple[tuple[str, int], ...]
    left_out: tuple[str, ...]
    dpsweep: int
    code: Mapping[str, str] = field(default_factory=dict)


_DESCRIPTION = TypeAdapter(JobDescription)


@contextlib.contextmanager
def packaged(
    text: str, origin: str, output: str, code: UserCode, asked: Asked = ONLY_TO_RUN, tracking: str = ""
) -> Iterator[Package]:
    """Yield the package of a sweep in temporary folders, which are removed when the ``with`` block ends.

    It holds the user's packages without hidden files, ``__pycache__`` and files with a suffix of data or weights.
    Raises: InvalidInput if the user's files exceed `LARGEST` together.
    """
    with packed(code) as (shipped, there), tempfile.TemporaryDirectory() as temporary:
        left_out = [path for folder in shipped for path in _prune(Path(folder))]
        job = Path(temporary, _FOLDER)
        job.mkdir()
        description = JobDescription(text, origin, output, there, new_key_check(), asked, tracking)
        (job / "job.json").write_bytes(_DESCRIPTION.dump_json(description))
        own = ((origin, len(text.encode())), *(each for folder in shipped for each in _sizes(Path(folder))))
        _require_small(own)
        dpsweep = own_package()
        sources = (file for module in code.modules for file in module.sources())
        digests = {file.place: hashlib.sha256(file.content).hexdigest() for file in sources}
        yield Package((dpsweep, *shipped, str(job)), own, tuple(left_out), _bytes_of(dpsweep), digests)


def read_job() -> JobDescription:
    """Return the job that this process was started for, with the paths at which Ray has put its code.

    Raises: InvalidInput if no job's package is importable, or what describes it was altered; UnsafeFile.
    """
    found = importlib.util.find_spec(_FOLDER)
    if found is None or not found.submodule_search_locations:
        raise InvalidInput("there is no job here: `dpsweep drive` is started by the jobs of `dpsweep submit`")
    folder = os.path.realpath(next(iter(found.submodule_search_locations)))
    try:
        job = _DESCRIPTION.validate_json(read_bytes(f"{folder}/job.json"))
    except (FileNotFoundError, ValidationError) as error:
        raise InvalidInput(
            "the job was submitted by another version of dpsweep, or is none; submit it with the version of the head"
        ) from error
    return replace(job, code=unpacked(job.code))


def _prune(folder: Path) -> list[str]:
    """Delete from a copy the files that are not shipped; return the deleted data files, relative to the copy."""
    left_out = []
    for path in sorted(folder.rglob("*"), reverse=True):  # files before their folder
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


def _bytes_of(package: str) -> int:
    """Return the size of the files of a package that Ray ships, which has links to its parts in a checkout."""
    walked = [each for each in os.walk(package, followlinks=True) if "__pycache__" not in each[0]]
    return sum(Path(folder, name).stat().st_size for folder, _, names in walked for name in names)


def _shown(path: Path, folder: Path) -> str:
    """Return the path of a file as the user knows it, without the numbered folder that it is shipped in."""
    return "/".join(path.relative_to(folder).parts[1:])


def _require_small(own: tuple[tuple[str, int], ...]) -> None:
    total = sum(size for _, size in own)
    if total > LARGEST:
        name, size = max(own, key=lambda each: each[1])
        raise InvalidInput(
            f"the sweep's own files have {total / 2**20:.1f} MiB, but at most {LARGEST // 2**20} MiB are sent (the "
            f"largest is {name} with {size / 2**20:.1f} MiB); keep data in storage that the nodes share"
        )
