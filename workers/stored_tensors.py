"""Reads what `torch.save` has stored: tensors and plain values, and no code.

A file may come from somebody else. Only tensors and plain values are unpickled, and only from archives whose entries
are stored as they are, as `torch.save` makes them: a few kilobytes that are compressed may unfold to all memory.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any


class NoTensors(Exception):
    """A file holds something else than tensors and plain values, or is damaged; its cause says more."""


def load_tensors(stored: io.BytesIO) -> Any:
    """Return the value in the rest of a stream, on the CPU. Raises: NoTensors."""
    import torch  # late: who deletes a checkpoint needs no torch

    start = stored.tell()
    try:
        with zipfile.ZipFile(stored) as archive:
            is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        if is_compressed:
            raise NoTensors("it is compressed, as torch makes none")
        stored.seek(start)
        return torch.load(stored, map_location="cpu", weights_only=True)
    except NoTensors:
        raise
    except Exception as error:  # the unpickler raises almost anything for damaged bytes
        raise NoTensors(str(error).partition("\n")[0]) from error
