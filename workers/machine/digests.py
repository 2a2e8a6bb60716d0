"""sha256 of the files that training writes, computed by the process that writes them."""

from __future__ import annotations

import json

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records import (
    TrialFiles,
    digest_of,
    list_files,
    parsed_json,
    read_private_sealed,
    write_private_sealed,
)


def note_written(files: TrialFiles) -> None:
    """Store the digest of each file that training has written and will not write again, all of them in ``private/``.

    `TrialFiles.private_digests` holds them until the trial is accounted, and from then on the digests of private files
    alone.
    """
    there = set(list_files(files.root))
    digests = {name: digest_of(uri) for uri in _written(files) if (name := uri.removeprefix(f"{files.root}/")) in there}
    write_private_sealed(files.private_digests, json.dumps(digests).encode())


def noted_when_written(files: TrialFiles) -> dict[str, str]:
    """Return what `note_written` stored, by name.

    Empty once the trial is accounted, and where the file is damaged.
    """
    try:
        content = read_private_sealed(files.private_digests, "")
    except DataCorruption:
        return {}
    noted: dict[str, str] = {} if content is None else parsed_json(content)
    return noted if files.model.removeprefix(f"{files.root}/") in noted else {}


def _written(files: TrialFiles) -> tuple[str, ...]:
    return (
        *(files.spec, files.model, files.inputs, files.trace, files.device),
        *(files.data_fingerprint, files.private_training, files.attacks, files.held_out, files.outcomes),
    )
