"""The memory that this process may use, to which files from somebody else are compared before they unfold."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Final

_GROUPS: Final = "/sys/fs/cgroup"
"""Where Linux shows control groups, which limit the memory of containers."""


@functools.cache
def half_of_memory() -> int:
    """Return half of the bytes that this process may use: of the machine's memory, or that of its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with (
        contextlib.suppress(OSError),
        open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as groups,
    ):  # a system without control groups
        limits += limits_of_groups(groups.read(), _GROUPS)
    return min(limits) // 2


def limits_of_groups(groups: str, root: str) -> Iterator[int]:
    """Yield the limits in bytes of control groups, of both versions, and of all groups around them.

    groups: as in /proc/self/cgroup. root: the folder that shows them. A container may show its own group at the top,
    and not at the path that it has on the machine.
    """
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            folder, name = root, "memory.max"
        elif "memory" in kinds.split(","):
            folder, name = f"{root}/memory", "memory.limit_in_bytes"
        else:
            continue
        around = path.rstrip("/")
        while True:
            with contextlib.suppress(OSError, ValueError), open(f"{folder}{around}/{name}", encoding="utf-8") as limit:
                yield int(limit.read())  # not of "max", which is none
            if not around:
                break
            around = around.rpartition("/")[0]
