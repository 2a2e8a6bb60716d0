"""Folders of this node: that of a run, whose trials share what they have decoded, and the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NODE_FOLDER: Final = "DPSWEEP_NODE_FOLDER"
"""Environment variable with the folder. It belongs to one run and one user, and is removed when the run ends."""


def node_folder() -> Path | None:
    """Return the path in `NODE_FOLDER`; None outside a run that has its machine to itself."""
    given = os.environ.get(NODE_FOLDER)
    return Path(given) if given else None


def at_home(path: str | Path) -> Path:
    """Return a path with the user's home for a leading ``~``; as it is where that home is unknown."""
    return Path(os.path.expanduser(path))


def user_cache() -> Path | None:
    """Return the absolute path of the user's cache; None for a user without a home."""
    folder = at_home("~/.cache/dpsweep")
    return folder.resolve() if folder.is_absolute() else None
