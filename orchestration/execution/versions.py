"""Versions that must be the same in all processes of a sweep."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_PACKAGES: Final = ("dpsweep", "torch", "numpy", "scipy", "pyarrow", "dp-accounting")
"""Packages whose versions decide results, or how what a process writes is read by another one."""
SAME: Final = "install the same versions on every node, such as those that constraints.txt pins"


def versions_here() -> dict[str, str]:
    """Return versions of Python and of the packages in this process; "" for a package that is not installed.

    The build of a version, as in ``2.15.0+cpu``, is left out: nodes with and without GPUs have different ones.
    """
    return {"Python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return the packages that differ, in words; "" if none does. One that is not installed is no other version:
    dpsweep is sent to nodes that have none.

    >>> differences({"Python": "3.11.7", "torch": "2.15.0"}, {"Python": "3.12.1", "torch": ""})
    'Python 3.12.1 (3.11.7 here)'
    """
    return ", ".join(
        f"{name} {there[name]} ({known} here)"
        for name, known in here.items()
        if known and there.get(name) and there[name] != known
    )
