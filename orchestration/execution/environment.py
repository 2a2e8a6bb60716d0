"""Environment variables for Ray. Set them before Ray is imported and before its workers start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.machine.memory import ALLOCATOR

EMBEDDED = "local"
"""``--address`` for a Ray cluster that is started for the sweep and stopped with it."""

IN_PROCESS = "in-process"
"""``--address`` for training in this process: one trial after the other, without Ray."""

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
"""Variables for an embedded Ray.

The first makes all its processes listen on 127.0.0.1 only, which is the default outside Linux; on Linux, Ray otherwise
listens on all interfaces and replaces a ``_node_ip_address`` of 127.0.0.1 by the machine's own address. The second
keeps Ray from starting workers in advance: Tune requests workers with its own environment variables, so workers
started earlier would never train a trial and waste seconds of CPU.
"""

_FEW_RETRIES = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""Number of connection attempts, about a second apart, to a head that refuses; by default Ray retries for minutes."""


def prepare_environment(address: str) -> None:
    """Set the variables for ``--address``: quiet output, token authentication, allocator. Values already set are kept.

    An embedded cluster listens on loopback only and takes its own token from the environment, so that Ray writes none
    to the home folder. A running cluster is joined with the user's token if there is one; without this variable, Ray
    uses the token only for ``auto``.
    """
    for name, value in {**_QUIET, **ALLOCATOR, **(_EMBEDDED if address == EMBEDDED else _FEW_RETRIES)}.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address == EMBEDDED:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif _has_token():
        os.environ["RAY_AUTH_MODE"] = "token"


def reread_environment() -> None:
    """Make Ray read its authentication variables again; by itself, it reads them once per process.

    Otherwise, a process that used Ray before with another `RAY_AUTH_MODE` or token would start processes that refuse
    it.
    """
    from ray import _raylet  # imported late: variables must be set before Ray is imported

    _raylet.Config.initialize("")  # type: ignore[attr-defined]  # a compiled module
    _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def require_address(address: str) -> None:
    """Raise InvalidInput for a text that ``--address`` does not take."""
    host, _, port = address.rpartition(":")
    if address not in (EMBEDDED, IN_PROCESS, "auto") and not (host and port.isdigit()):
        raise InvalidInput(
            f"the address {address!r} is none of 'local', 'in-process', 'auto' and HOST:PORT (of the cluster's head)"
        )


def open_cluster(address: str) -> str | None:
    """Return a warning if a cluster is joined without a token; None if a token is used or no cluster is joined.

    Raises: as `require_address`.
    """
    require_address(address)
    if address in (EMBEDDED, IN_PROCESS) or os.environ.get("RAY_AUTH_MODE") == "token":
        return None
    return (
        f"the cluster at {address!r} is joined without authentication: whoever reaches its ports can run code on its "
        "nodes and read what the trials read; start it with RAY_AUTH_MODE=token on every node, and close its ports"
    )


def _has_token() -> bool:
    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    return bool(given) or (Path.home() / ".ray" / "auth_token").is_file()
