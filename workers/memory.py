"""Allocator settings for processes that train.

A private step keeps every output gradient until all norms are known. By default glibc returns such large blocks to the
system as soon as they are freed, and the next step pays for new page faults: a fifth of the time of a ResNet20 step on
two cores (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping

ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the largest that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",  # Ray trains in a thread, whose own arena would ignore the threshold
}
"""Environment variables that glibc reads when a process starts; other C libraries ignore them. Freed memory then stays
with the process until it ends; its peak does not change."""
