"""Read what `torch.save` has stored, without running code, and take sha256 of files that training writes.

A file may come from somebody else. Only tensors and plain values are unpickled, and only from archives whose entries
are stored as they are, as `torch.save` makes them. A few kilobytes that are compressed may unfold to all memory. So may
a few bytes that ask for a ``bytearray`` of some length, which torch allows.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from typing import Any, BinaryIO

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import digest_of, list_files
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles


class NoTensors(Exception):
    """A file holds something else than tensors and plain values, or is damaged; its cause says more."""


def load_tensors(stored: BinaryIO) -> Any:
    """Return the value in the rest of a stream, on the CPU. Raises: NoTensors."""
    import torch  # late: who deletes a checkpoint needs no torch

    start = stored.tell()
    try:
        with zipfile.ZipFile(stored) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise NoTensors("it is compressed, as torch makes none")
            for entry in entries:
                if entry.filename.endswith(".pkl") and _makes_bytes(archive.read(entry)):
                    raise NoTensors("it makes bytes of any length, as dpsweep stores none")
        stored.seek(start)
        return torch.load(stored, map_location="cpu", weights_only=True)
    except NoTensors:
        raise
    except Exception as error:  # the unpickler raises almost anything for damaged bytes
        raise NoTensors(str(error).partition("\n")[0]) from error


def _makes_bytes(pickled: bytes) -> bool:
    """Return whether a pickle names ``bytearray``. Raises: ValueError for damaged bytes."""
    return any(
        operation.name == "GLOBAL" and str(name).rpartition(" ")[2] == "bytearray"
        for operation, name, _ in pickletools.genops(pickled)
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
        *(files.data_fingerprint, files.private_training, files.attacks, files.membership),
        *(files.held_out, files.outcomes),
    )
