"""What workers of an embedded Ray import as they start. Ray imports this module in each of them.

Those that find a place among the first import what a trial needs, while the driver is still planning. The others, such
as those that account, do not: it takes seconds of CPU and hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # each worker imports this module
    from orchestration.sweeps.resources import ResourceSettings

_OPTION: Final = "RAY_preload_python_modules"
_SESSION: Final = "RAY_TMPDIR"
"""Variable with the folder of the session (`orchestration.execution.session`), in which each place is a file."""
_THREADS: Final = "OMP_NUM_THREADS"
"""Variable that torch reads when it is imported. Ray sets it only later, when it gives a worker its trial."""
_PLACE: Final = "preloaded-{}"
_MOST: Final = 4


@dataclass(frozen=True)
class Places:
    """How many workers import ahead, and the threads that a trial has."""

    number: int = 0
    threads: int = 1


NO_PLACES: Final = Places()


def places_for(sections: Sequence[ResourceSettings]) -> Places:
    """Places on half of the cores, as the driver plans meanwhile, and at most four.

    None for trials with GPUs or several ranks, or whose threads differ: what they are given must be known before.
    """
    threads = {max(math.floor(each.cpus), 1) for each in sections}
    if len(threads) > 1 or any(each.gpus or each.processes > 1 for each in sections):
        return NO_PLACES
    return Places(min(max(len(os.sched_getaffinity(0)) // 2, 1), _MOST), *threads)


@contextlib.contextmanager
def preloading(places: Places) -> Iterator[None]:
    """Let workers of the Ray that is started in this ``with`` block, within a session's folder, import ahead."""
    for number in range(places.number):
        Path(os.environ[_SESSION], _PLACE.format(number)).write_text(str(places.threads))
    os.environ[_OPTION] = __name__
    try:
        yield
    finally:
        del os.environ[_OPTION]


def take_place(session: Path) -> int | None:
    """Take one of the places, which is given to no other process: the threads of a trial. None where none is left."""
    for number in range(_MOST):
        place = session / _PLACE.format(number)
        with contextlib.suppress(OSError):
            threads = int(place.read_text())
            place.unlink()
            return threads
    return None


def _import_ahead() -> None:
    threads = take_place(Path(os.environ[_SESSION]))
    if threads is not None:
        os.environ.setdefault(_THREADS, str(threads))
        importlib.import_module("orchestration.execution.tune")


if _OPTION in os.environ and _SESSION in os.environ:
    _import_ahead()
