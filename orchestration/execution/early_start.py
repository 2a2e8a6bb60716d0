"""An embedded Ray that starts while the rest of a run is still imported and planned, so that all cores have work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accounting.records import exists
from orchestration.execution.environment import EMBEDDED
from orchestration.execution.shared_connection import opened_ahead
from orchestration.records.layout import SweepFiles, absolute, default_output
from orchestration.sweeps.schema import SweepSpec
from workers.imports import UserCode


@contextlib.contextmanager
def ray_ahead(sweep: SweepSpec, output: str | None, address: str, code: UserCode) -> Iterator[None]:
    """Start an embedded Ray for the run of a new sweep in this ``with`` block; it ends with the block.

    output: folder or URI of the sweep. One that holds a sweep already may have nothing left to train, so that there Ray
    waits for the plan.
    """
    if address != EMBEDDED or exists(SweepFiles(absolute(output or default_output(sweep.name))).manifest):
        yield
        return
    with opened_ahead(lambda: _started(code)):
        yield


@contextlib.contextmanager
def _started(code: UserCode) -> Iterator[UserCode]:
    from orchestration.execution.cluster import connection  # late: it takes a second, which is the thread's own

    with connection(EMBEDDED, code) as shipped:
        yield shipped
