"""Write the output files that a user names in options."""

from __future__ import annotations

import os
from pathlib import Path

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records import UnsafeFile, others_can_write, replace_file


def write_file(option: str, path: Path, content: bytes, private: bool) -> None:
    """Write a new file in place of an existing one, under a temporary name first; the mode of its folder stays.

    `private`: only its owner can read it (mode 0600); else its mode is 0644 less the umask, as of other public files. A
    private file goes only into a folder in which nobody else can replace it. Links on the way to the folder are the
    user's own.
    Raises: InvalidInput naming ``option``.
    """
    folder = os.path.realpath(path.expanduser().parent)
    try:
        if private and others_can_write(folder):
            raise InvalidInput(
                f"{option} {path} is private, but other users can change {folder}; name a file in a folder that only "
                "you can change, or `chmod go-w` it"
            )
        replace_file(f"{folder}/{path.name}", (content,), private)
    except OSError as error:
        raise InvalidInput(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
    except UnsafeFile as error:
        raise InvalidInput(f"{option} {path} cannot be written: {error}") from error
