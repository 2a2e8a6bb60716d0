"""Write the output files that a user names in options."""

from __future__ import annotations

import os
from pathlib import Path

from accounting.errors import InvalidInput


def write_file(option: str, path: Path, content: bytes, private: bool) -> None:
    """Write a file, replacing an existing one; the mode of its folder is not changed.

    private: only its owner can read it (mode 0600); else its mode is 0664 less the umask, as of other public files.
    Raises: InvalidInput naming ``option``.
    """
    mode = 0o600 if private else 0o664
    try:
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if private:
                os.fchmod(file.fileno(), mode)
            file.write(content)
    except OSError as error:
        raise InvalidInput(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
