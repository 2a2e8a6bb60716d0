"""How a process that trains should hold on to its memory.

A private step keeps every output gradient until all norms are known. glibc hands such blocks back to the system as soon
as they are free, and the next step pays for each page again: a fifth of a step of ResNet20 on two cores
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping

ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",  # Ray trains in a thread, whose own arena would ignore the threshold
}
"""Environment variables that glibc reads when a process starts; other C libraries ignore them. Memory that was needed
once is kept until the process ends, so its peak does not change."""
