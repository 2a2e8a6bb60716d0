"""The largest size of a stored file of each kind, beyond which it is refused before it is read."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Final

_MIB: Final = 2**20
_BY_NAME: Final[Mapping[str, int]] = {
    "results.json": 256 * _MIB,
    "comparison.json": 256 * _MIB,
    "trace.arrow": 64 * _MIB,
}
"""Largest size in bytes of files that grow with the number of trials, some kilobytes each, and of a trace, which has
about 100 bytes for each noise level."""
_BY_ENDING: Final[Mapping[str, int]] = {
    ".json": 64 * _MIB,
    ".jsonl": 1024 * _MIB,
    ".txt": 64 * _MIB,
    ".html": 512 * _MIB,
    ".arrow": 4096 * _MIB,
    ".ipc": 4096 * _MIB,
}
"""Largest size in bytes of other files, by the ending of the name. An object of norms has about 94 MB."""


def largest(uri: str) -> int:
    """Return the largest accepted size of a file in bytes.

    Models, checkpoints and files of a user's own are as large as the user wants, up to half of this machine's memory:
    decoding holds their content twice.

    >>> largest("s3://bucket/runs/a/status.json") // 2**20
    64
    """
    name = uri.rpartition("/")[2]
    return _BY_NAME.get(name) or _BY_ENDING.get(os.path.splitext(name)[1]) or half_of_memory()


@functools.cache
def half_of_memory() -> int:
    """Return half of this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
