"""Work of a driver in a separate process, whose memory goes with it.

Drivers share the head of a running cluster. A driver there keeps no memory that it needs for a few seconds alone, such
as torch for its plan.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from dpsweep.accounting.errors import DpsweepError

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
_CODE: Final = "from dpsweep.orchestration.execution.apart import _serve; _serve()"
_LOOK: Final = 1.0
"""Seconds between two looks at whether the driver still runs."""


def run_apart(
    doing: str, work: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Answer:
    """Return ``work(*args, **kwargs)``, called in another process, which ends with this one.

    `doing`: the work in words, for the error. `work`: a function of a module. Raises: the `DpsweepError` that it
    raises, and DpsweepError if the process is killed.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CODE, str(os.getpid())],
        input=pickle.dumps((work, args, kwargs)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the other one
        check=False,
    )
    if done.returncode:
        raise DpsweepError(
            f"the process that {doing} ended with {done.returncode}; its error is above, or the memory of this machine "
            "did not suffice"
        )
    found: Answer | DpsweepError = pickle.loads(done.stdout)
    if isinstance(found, DpsweepError):
        raise found
    return found


def _serve() -> None:
    """Do the work given on standard input, and write its answer, or its error, to standard output."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the user's code prints
    work, args, kwargs = pickle.load(sys.stdin.buffer)
    found: Any
    try:
        found = work(*args, **kwargs)
    except DpsweepError as error:
        found = error
    with answer:
        pickle.dump(found, answer)


def _end_with(driver: int) -> None:
    """End this process at once when the driver is gone: another one may run in the folder."""
    while os.getppid() == driver:
        time.sleep(_LOOK)
    os._exit(1)
