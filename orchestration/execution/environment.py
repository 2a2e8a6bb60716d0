"""Environment variables that Ray reads when it is imported, or its workers when they start: set them first."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from workers.memory import ALLOCATOR

EMBEDDED = "local"
"""The address of a Ray cluster that is started for the sweep and ends with it."""

IN_PROCESS = "in-process"
"""The address of this process: trials train one after the other, without Ray."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Every process listens on 127.0.0.1 only, as Ray does outside Linux by default: on Linux it listens on all interfaces,
and takes a ``_node_ip_address`` of 127.0.0.1 to mean the machine's own address."""

_IMPATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""How often to try a head that listens but does not let us in, about a second apart; Ray would go on for minutes."""


def prepare_environment(address: str) -> None:
    """Keep Ray quiet, its clusters closed to strangers and the memory of trials at hand; what the user has set stays.

    An embedded cluster is reached from this machine alone, and gets a token of its own, so nothing is written to the
    home folder. A running one is joined with the user's token where there is one: Ray does so by itself only for
    ``auto``.
    """
    for name, value in {**_QUIET, **ALLOCATOR, **(_LOOPBACK if address == EMBEDDED else _IMPATIENT)}.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address == EMBEDDED:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"


def _has_token() -> bool:
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()
