"""Imports that take seconds, shared by the processes of all phases. Nothing here touches the device."""

from __future__ import annotations

import contextlib
import importlib
import signal
from typing import Any, Final

_MOST_SECONDS: Final = 90


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError(f"importing took more than {_MOST_SECONDS} s")


signal.signal(signal.SIGALRM, _give_up)
signal.alarm(_MOST_SECONDS)
for _name in (
    "torch",
    "dpsweep.workers.trials.trial",
    "transformers",
    "peft",
    "torchvision",
    "opacus",
    "opake.dpsgd.clipping",
):
    with contextlib.suppress(Exception):  # the phase that needs it tells why it cannot be imported
        importlib.import_module(_name)
signal.alarm(0)
