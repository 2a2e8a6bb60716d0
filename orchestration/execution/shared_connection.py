"""Connect to Ray: for one sweep, once for sweeps that run in turn, or ahead, while the run is imported and planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.store.layout import output_files
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.backend import Connect


@contextlib.contextmanager
def own_connection(address: str, code: UserCode) -> Iterator[UserCode]:
    """Connect as `dpsweep.orchestration.execution.cluster.connection`; a `Connect` that imports Ray when called."""
    from dpsweep.orchestration.execution.cluster import connection  # late: it takes a second

    with connection(address, code) as shipped:
        yield shipped


@contextlib.contextmanager
def shared(connect: Connect) -> Iterator[Connect]:
    """Yield a `Connect` whose first call connects by ``connect``, until the end of this ``with`` block.

    Its later calls yield the same connection. Sweeps that run in turn, such as tuning and the tuned sweep, have one
    address and one code.
    """
    opened: list[UserCode] = []
    with ExitStack() as stack:

        def once(address: str, code: UserCode) -> AbstractContextManager[UserCode]:
            if not opened:
                opened.append(stack.enter_context(connect(address, code)))
            return nullcontext(opened[0])

        yield once


@contextlib.contextmanager
def opened_ahead(connect: Connect, address: str, code: UserCode) -> Iterator[Connect]:
    """As `shared`, but start to connect at once in a thread; the first call waits for it and raises its error.

    The thread lives until the connection is closed, because Linux ends Ray's processes with the thread that started
    them.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="dpsweep-ahead") as thread, ExitStack() as stack:
        opened = thread.submit(lambda: stack.enter_context(connect(address, code)))
        try:
            yield lambda address, code: nullcontext(opened.result())
        finally:
            wait([opened])


@contextlib.contextmanager
def ray_ahead(sweep: SweepSpec, output: str | None, address: str, code: UserCode) -> Iterator[Connect]:
    """Start an embedded Ray, or join a running cluster, in the background for a sweep that runs in this ``with`` block.

    The connection ends with the block; the sweep gets it by the `Connect` that is yielded. output: folder or URI of the
    sweep. If it already holds a sweep, no Ray is started here: the plan may leave nothing to train.
    """
    if address == IN_PROCESS or (address == EMBEDDED and exists(output_files(output, sweep.name).manifest)):
        yield own_connection
        return
    with opened_ahead(_with_nodes_awake, address, code) as connect:
        yield connect


@contextlib.contextmanager
def _with_nodes_awake(address: str, code: UserCode) -> Iterator[UserCode]:
    with own_connection(address, code) as shipped:
        if address != EMBEDDED:
            from dpsweep.orchestration.execution.cluster import wake_nodes  # late, as in `own_connection`

            wake_nodes()
        yield shipped
