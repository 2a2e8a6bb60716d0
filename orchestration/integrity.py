"""Whether the files of a trained trial are still those that it wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from accounting.errors import DataCorruption
from accounting.layout import TrialFiles
from accounting.manifest import MANIFEST
from accounting.shards import NormShards, read_epsilons
from accounting.storage import exists, list_files, read_bytes
from orchestration.results import TrialResult


def digests(files: TrialFiles) -> dict[str, str]:
    """sha256 of every file of a trained trial, by name, but for its result and for shards, which have manifests."""
    names = [name for name in list_files(files.root) if not name.startswith("private/") or not name.endswith(".arrow")]
    return {name: _digest(uri) for name in names if (uri := f"{files.root}/{name}") != files.result}


def damages(files: TrialFiles, result: TrialResult) -> Iterator[str]:
    """One line for each damaged file: what is wrong with it, and what to do. Reads everything that is there.

    What its owner deleted as a whole, such as all norms, is not missed.
    """
    expected = {f"{files.root}/{name}": digest for name, digest in result.digests.items()}
    altered = [uri for uri, digest in expected.items() if exists(uri) and _digest(uri) != digest]
    for uri in altered:
        yield (
            f"{uri}: its sha256 differs from the trial's result; restore the file from a backup, or delete the trial's "
            "folder and resume the sweep"
        )
    for directory, read in (
        (files.norms, _read_norms),
        (files.exact_norms, _read_norms),
        (files.epsilons, read_epsilons),
    ):
        manifest = f"{directory}/{MANIFEST}"
        if exists(manifest) and manifest not in altered:
            try:
                read(directory)
            except DataCorruption as error:
                yield str(error)


def _read_norms(directory: str) -> None:
    shards = NormShards(directory)
    for part in shards.parts:
        shards.read(part)


def _digest(uri: str) -> str:
    return hashlib.sha256(read_bytes(uri)).hexdigest()
