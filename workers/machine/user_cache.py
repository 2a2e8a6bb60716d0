"""The folder of a user for files that can be made or downloaded again."""

from __future__ import annotations

from pathlib import Path

CACHE = Path("~/.cache/dpsweep")
"""Call ``expanduser`` before use."""
