"""The memory of a container, which is less than that of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpsweep.accounting.records.memory_limits import half_of_memory, limits_of_groups

GIB = 2**30


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": str(4 * GIB)}, [4 * GIB]),
        ("0::/", {"memory.max": str(2 * GIB)}, [2 * GIB]),
        ("0::/on/the/machine", {"memory.max": str(GIB)}, [GIB]),
        ("5:cpu:/c\n4:memory:/c\n0::/", {"memory/c/memory.limit_in_bytes": str(3 * GIB)}, [3 * GIB]),
        ("4:cpu,memory:/c", {"memory/memory.limit_in_bytes": str(GIB), "memory.max": "1"}, [GIB]),
        ("1:name=systemd:/", {"memory.max": "1"}, []),
    ],
)
def test_limits_are_those_of_all_groups_around(
    groups: str, limits: dict[str, str], expected: list[int], tmp_path: Path
) -> None:
    for name, content in limits.items():
        write(tmp_path / name, content)
    assert list(limits_of_groups(groups, str(tmp_path))) == expected


def test_half_of_memory_is_at_most_half_of_the_machine() -> None:
    assert 0 < half_of_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
