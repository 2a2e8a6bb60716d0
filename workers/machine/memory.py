"""Allocator settings for processes that train, and the peak memory of a process.

A private step keeps every output gradient until all norms are known. By default glibc returns such large blocks to the
system as soon as they are freed, and the next step causes new page faults. They are a fifth of the time of a ResNet20
step on two cores (docs/performance.md).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",  # Ray trains in a thread, whose own arena would ignore the threshold
}
"""Environment variables that make a process keep freed memory until it ends; its peak does not change.

glibc reads them when a process starts; other C libraries ignore them.
"""


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes.

    Falls back to `getrusage`, because on Linux its value includes the peak of the parent process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
