"""Files that SQLite obeys."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
_SECTOR, _PAGE = 512, 4096


def plant_journal(database: Path, named: Path | None) -> None:
    """Put a journal beside a database that is played back at its next use, and ends with the name of another file.

    The layout is that of SQLite's file format, section 3; the number of the page is that of `PAGER_SJ_PGNO`.
    """
    pages = database.stat().st_size // _PAGE
    journal = (_MAGIC + struct.pack(">IIIII", 0, 1, pages, _SECTOR, _PAGE)).ljust(_SECTOR, b"\0")
    if named is not None:
        name = str(named).encode()
        journal += struct.pack(">I", 0x40000000 // _PAGE + 1) + name + struct.pack(">II", len(name), sum(name)) + _MAGIC
    Path(f"{database}-journal").write_bytes(journal)
