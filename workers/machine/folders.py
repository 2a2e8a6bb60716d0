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


CACHE = Path("~/.cache/dpsweep")
"""Call ``expanduser`` before use."""
