"""The manifest of a sweep: the submitted sweep file, package versions, git state and hardware.

A stored sweep continues with the same sweep file or a later version of it. A later version may ask for more trials, for
fewer, and for other work on them. Results of trials that it no longer asks for are kept in the folder, and still count
as released by the sweep.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError
from dpsweep.accounting.records.encryption import KeyCheck, new_key_check, require_key
from dpsweep.accounting.records.files import exists, list_files
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.sweeps.grid import GridPoint, Past, drafts
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep

_PACKAGES = ("dpsweep", "ray", "torch", "torchvision", "dp-accounting", "pyarrow", "mlflow", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Manifest:
    """The submitted sweep, and where it ran.

    `sweep_id`: unique to the sweep, unchanged by a resume.
    `text`: the sweep file as submitted.
    `sweep`: the whole specification as plain values, every default written out.
    `created`: ISO 8601, UTC.
    `versions`: of Python and packages, all that have run the sweep, such as ``2.14.0, 2.15.0``.
    `git`: commit of dpsweep's code; empty outside a checkout.
    `hardware`: of the driver's machine.
    `earlier`: earlier versions of the sweep file that asked for trials which the present one leaves out.
    `added`: keys of private trials that a later version has added after others had shown results.
    `calibrations`: noise multipliers found by plans of the sweep, by a digest of the calibration's inputs.
    `key_check`: check value of the key that encrypts private files; None if they are not encrypted.
    `title`: name of the sweep in MLflow, where it is not that of the sweep file.
    `code`: where the user's own modules were when the sweep was last run,
    `dpsweep.workers.own_code.imports.UserCode.places`.
    """

    sweep_id: str
    text: str
    sweep: dict[str, Any]
    created: str
    versions: dict[str, str]
    git: dict[str, str]
    hardware: dict[str, str | int]
    earlier: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    calibrations: dict[str, float] = field(default_factory=dict)
    key_check: KeyCheck | None = None
    title: str = ""
    code: dict[str, str] = field(default_factory=dict)

    def provenance(self) -> dict[str, str]:
        """Return everything except the sweep itself, as flat text entries such as ``versions.torch``."""
        flat = {
            f"{section}.{key}": str(value)
            for section in ("versions", "git", "hardware")
            for key, value in getattr(self, section).items()
        }
        return {"sweep_id": self.sweep_id, "created": self.created, **flat}


def read_manifest(files: SweepFiles) -> Manifest | None:
    """Return the stored manifest, if any. Raises: DataCorruption if it is damaged, or of another version."""
    next_step = "restore it, or run in another folder"
    content = read_sealed(files.manifest, next_step)
    if content is None:
        return None
    try:
        found = _MANIFEST.validate_json(content, extra="forbid")
        datetime.datetime.fromisoformat(found.created)
        if found.key_check is not None:
            bytes.fromhex(found.key_check.salt), bytes.fromhex(found.key_check.check)
        return found
    except ValueError as error:
        raise DataCorruption(f"{files.manifest} is no manifest of this version of dpsweep; {next_step}") from error


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(files: SweepFiles, manifest: Manifest) -> None:
    """Store the manifest as ``sweep.json``, with a checksum."""
    write_sealed(files.manifest, json.dumps(asdict(manifest)).encode())


def require_in_place(files: SweepFiles) -> None:
    """Raise `StorageError` if the manifest of the sweep that runs is gone, as where its folder was removed."""
    if not exists(files.manifest):
        raise StorageError(
            f"{files.manifest} is gone, so {files.root} was removed or moved while the sweep ran: its trials are not "
            "all there; delete what is left of it, and run the sweep again"
        )


def new_manifest(sweep: SweepSpec, text: str) -> Manifest:
    """Return the manifest of a new sweep. text: its sweep file."""
    return Manifest(
        sweep_id=uuid.uuid4().hex,
        text=text,
        sweep=sweep.plain(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        git=_git_state(),
        hardware={
            "machine": platform.machine(),
            "system": platform.platform(),
            "cpus": os.cpu_count() or 1,
        },
        key_check=new_key_check(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _with_versions_here(before: Mapping[str, str]) -> dict[str, str]:
    here = {name: version for name, version in _versions().items() if version not in before.get(name, "").split(", ")}
    return {**before, **{name: ", ".join(filter(None, (before.get(name), here[name]))) for name in here}}


def _git_state() -> dict[str, str]:
    """Commit of dpsweep's code, and whether it had uncommitted changes; empty outside a git checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": str(bool(git("status", "--porcelain", "-uno"))).lower()}
    except (OSError, subprocess.SubprocessError):
        return {}


def past_of(manifest: Manifest) -> Past:
    """Return the history of a stored sweep, for planning. Raises: InvalidInput if a stored text is no valid sweep
    file.
    """
    return Past(tuple(map(parse_sweep, manifest.earlier)), manifest.calibrations)


def opened_manifest(stored: Manifest | None, sweep: SweepSpec, text: str, root: str) -> Manifest:
    """Return the manifest of ``sweep``: a new one, or the stored one as it has `grown`; writes nothing.

    Raises: InvalidInput as `grown`, and if the private files of the stored sweep have another encryption key than this
    process, or only one of the two has a key.
    """
    if stored is None:
        return new_manifest(sweep, text)
    require_key(stored.key_check, f"the sweep in {root}")
    return grown(replace(stored, versions=_with_versions_here(stored.versions)), sweep, text, root)


def grown(manifest: Manifest, sweep: SweepSpec, text: str, root: str) -> Manifest:
    """Return the manifest updated to ``sweep``, with which the stored sweep continues; unchanged if it is the same
    file.

    text: the file of ``sweep``. root: folder of the stored sweep, for errors. Raises: InvalidInput for a sweep of
    another name or delta, and for another release mode if stored results hold statistics of training examples.
    """
    if manifest.sweep == sweep.plain() and manifest.text == text:
        return manifest
    stored = parse_sweep(manifest.text)
    if stored.name != sweep.name:
        raise InvalidInput(
            f"{root} holds the sweep {stored.name!r}, not {sweep.name!r}; restore the name, or choose another folder "
            "with --output"
        )
    before, now = stored.privacy.delta, sweep.privacy.delta
    if before != now:
        raise InvalidInput(
            f"every ε in {root} is at privacy.delta = {before:g}, not {now:g}; restore it, account for what is there "
            f"by `dpsweep account --delta {now:g}`, or choose another folder with --output"
        )
    if stored.release != sweep.release and release_mode(stored.disclosure).statistics is not None:
        raise InvalidInput(
            f"{root} holds results with release: {stored.disclosure}, which show statistics of training examples, so "
            "its release cannot change; restore it, or choose another folder with --output"
        )
    asked = {point.key: point for point in drafts(sweep)}
    left = {point.key for point in drafts(stored)} - asked.keys()
    earlier = [each for each in manifest.earlier if each != text]
    return replace(
        manifest,
        text=text,
        sweep=sweep.plain(),
        earlier=[*earlier, manifest.text] if left and manifest.text not in earlier else earlier,
        added=[*manifest.added, *_added(manifest, asked, root)],
    )


def _added(manifest: Manifest, asked: Mapping[str, GridPoint], root: str) -> list[str]:
    """Return the keys of private trials that no version before has asked for, if the sweep in ``root`` has results.

    These may have decided what was added.
    """
    if not list_files(SweepFiles(root).attempts_of_all):
        return []
    versions = map(parse_sweep, (manifest.text, *manifest.earlier))
    known = {point.key for version in versions for point in drafts(version)}.union(manifest.added)
    return [key for key, point in asked.items() if point.is_private and key not in known]


def begun(tuning: Manifest | None, stage: str) -> str:
    """Return the stored file of the tuning, if it differs from ``stage`` only in the section ``adapted``; else
    ``stage``.

    tuning: manifest that an earlier run left, if any.
    """
    if tuning is None:
        return stage
    before, now = parse_sweep(tuning.text), parse_sweep(stage)
    return tuning.text if before.plain() | {"adapted": None} == now.plain() | {"adapted": None} else stage
