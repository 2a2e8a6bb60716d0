"""Files that libraries load from the working directory, which may be a folder from somebody else."""

from __future__ import annotations

import glob
import itertools
import os
import platform
from collections.abc import Iterator
from typing import Final

from dpsweep.accounting.errors import InvalidInput

_CONFIGURATION: Final = ".numba_config.yaml"
"""numba reads it when it is imported; it can name a folder of machine code, which is unpickled."""
_LIBRARIES: Final = ("libcuda.so.1", "libnvrtc.so.12", "libnvrtc.so.13", "libcask_profile_interface.so")
"""torch brings a libcusparseLt.so.0 whose search path has an empty entry: it looks for these in the working directory,
before the system's folders, when torch is imported or first computes."""
_VARIANTS: Final = ("tls", "haswell", "avx512_1", "xeon_phi", platform.machine())
"""Folders, in one another too, that the loader of glibc looks in as well; glibc-hwcaps is another."""


def require_harmless_working_directory() -> None:
    """Refuse a working directory from which numba or torch would load code. Raises: InvalidInput naming the file."""
    for name in _looked_for():
        if os.path.lexists(name):
            raise InvalidInput(
                f"the working directory holds {name}, which a library that dpsweep uses would load from there, and so "
                "run what somebody else may have put there; change to another directory, and name folders and files "
                "by their paths"
            )


def _looked_for() -> Iterator[str]:
    """Yield the names that libraries look for, relative to the working directory."""
    yield _CONFIGURATION
    first = [name for name in _VARIANTS if os.path.isdir(name)]
    folders = [("",), *itertools.product(first), *itertools.product(first, _VARIANTS)]
    folders += [*itertools.product(first, _VARIANTS, _VARIANTS)]
    for folder in (*map("/".join, folders), *glob.glob("glibc-hwcaps/*")):
        for library in _LIBRARIES:
            yield os.path.join(folder, library)
