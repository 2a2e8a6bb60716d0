"""Start an embedded Ray while the rest of the run is still being imported and planned, to use all cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dpsweep.accounting.records import exists
from dpsweep.orchestration.execution.environment import EMBEDDED
from dpsweep.orchestration.execution.shared_connection import opened_ahead
from dpsweep.orchestration.records.layout import output_files
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode


@contextlib.contextmanager
def ray_ahead(sweep: SweepSpec, output: str | None, address: str, code: UserCode) -> Iterator[None]:
    """Start an embedded Ray in the background for a new sweep that runs in this ``with`` block; it ends with the block.

    output: folder or URI of the sweep. If it already holds a sweep, Ray is not started here: the plan may leave
    nothing to train.
    """
    if address != EMBEDDED or exists(output_files(output, sweep.name).manifest):
        yield
        return
    with opened_ahead(lambda: _started(code)):
        yield


@contextlib.contextmanager
def _started(code: UserCode) -> Iterator[UserCode]:
    from dpsweep.orchestration.execution.cluster import connection  # imported in the thread: it takes a second

    with connection(EMBEDDED, code) as shipped:
        yield shipped
