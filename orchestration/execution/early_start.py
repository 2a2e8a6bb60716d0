"""Connect to Ray while the rest of the run is still being imported and planned, to use all cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.execution.shared_connection import opened_ahead
from dpsweep.orchestration.records.layout import output_files
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode


@contextlib.contextmanager
def ray_ahead(sweep: SweepSpec, output: str | None, address: str, code: UserCode) -> Iterator[None]:
    """Start an embedded Ray, or join a running cluster, in the background for a sweep that runs in this ``with`` block.

    The connection ends with the block. output: folder or URI of the sweep. If it already holds a sweep, no Ray is
    started here: the plan may leave nothing to train.
    """
    if address == IN_PROCESS or (address == EMBEDDED and exists(output_files(output, sweep.name).manifest)):
        yield
        return
    with opened_ahead(lambda: _opened(address, code)):
        yield


@contextlib.contextmanager
def _opened(address: str, code: UserCode) -> Iterator[UserCode]:
    from dpsweep.orchestration.execution.cluster import connection, wake_nodes  # in the thread: it takes a second

    with connection(address, code) as shipped:
        if address != EMBEDDED:
            wake_nodes()
        yield shipped
