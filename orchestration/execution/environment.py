"""Environment variables for Ray. Set them before Ray is imported and before its workers start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from workers.memory import ALLOCATOR

EMBEDDED = "local"
"""``--address`` of a Ray cluster that is started for the sweep and stopped with it."""

IN_PROCESS = "in-process"
"""``--address`` of this process: trials train one after the other, without Ray."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "inf",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}
"""Turns off Ray's usage reports, warnings and progress output, and features of Tune that are not used here."""

_EMBEDDED = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_prestart_worker_first_driver": "0"}
"""For a Ray that is started for a sweep. The first makes all its processes listen on 127.0.0.1 only, as by default
outside Linux; on Linux, Ray listens on all interfaces otherwise, and replaces a ``_node_ip_address`` of 127.0.0.1 by
the machine's own address. The second keeps it from starting workers before one is asked for: Tune asks for workers with
variables of its own, so that those train no trial and end unused, after seconds of CPU."""

_IMPATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""Number of connection attempts, about a second apart, to a head that refuses us; Ray would retry for minutes."""


def prepare_environment(address: str) -> None:
    """Set the variables for ``--address``: quiet output, token authentication, allocator. Values already set are kept.

    An embedded cluster listens on loopback only and gets its own token from the environment, so that Ray writes none
    to the home folder. A running cluster is joined with the user's token if there is one; by itself, Ray uses it only
    for ``auto``.
    """
    for name, value in {**_QUIET, **ALLOCATOR, **(_EMBEDDED if address == EMBEDDED else _IMPATIENT)}.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address == EMBEDDED:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"


def reread_environment() -> None:
    """Make Ray, which reads the variables of authentication once per process, read them again.

    Without it, a process that used Ray before with another `RAY_AUTH_MODE` or token starts processes that refuse it.
    """
    from ray import _raylet  # late: the other variables are set before Ray is imported

    _raylet.Config.initialize("")  # type: ignore[attr-defined]  # a compiled module
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def open_cluster(address: str) -> str | None:
    """A warning for whoever joins a cluster without a token; None where one is used, or no cluster is joined."""
    if address in (EMBEDDED, IN_PROCESS) or os.environ.get("RAY_AUTH_MODE") == "token":
        return None
    return (
        f"the cluster at {address!r} is joined without authentication: whoever reaches its ports can run code on its "
        "nodes and read what the trials read; start it with RAY_AUTH_MODE=token on every node, and close its ports"
    )


def _has_token() -> bool:
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()
