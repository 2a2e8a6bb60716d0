"""Connect to Ray: a cluster embedded in this machine, or one that runs already.

Embedded: started for this sweep and stopped with it, without dashboard, protected by a token of its own, its files in a
folder of its own.
Running (``auto`` or ``HOST:PORT``): this process's code is shipped to the workers, so every node runs the same
version, and the storage is proven to be shared before anything starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accounting.errors import InvalidInput, StorageError
from accounting.records.files import read_bytes, write_bytes_atomically
from orchestration.execution.environment import EMBEDDED
from orchestration.execution.session import private_session
from orchestration.sweeps.schema import AccountingSettings, ResourceSettings
from orchestration.sweeps.user_code import packed
from workers.imports import NO_CODE, UserCode
from workers.memory import ALLOCATOR

_PACKAGES = ("accounting", "workers", "orchestration")
_OBJECT_STORE_BYTES = 128 * 2**20
"""Specs and progress pass through Ray's object store; everything large passes through files."""


@contextlib.contextmanager
def connected(address: str, log: Path, code: UserCode = NO_CODE) -> Iterator[UserCode]:
    """A connection to Ray for the length of a ``with`` block; an embedded cluster and its files end with it.

    log: file that takes what Ray would print. code: the user's own, which remote workers need too; what the block gets
    is the same code as workers find it. Raises `InvalidInput` when no cluster answers at ``address`` or it wants
    another token, and where this process is connected to Ray already, as that connection would end with the block.
    """
    if ray.is_initialized():
        raise InvalidInput("this process is connected to Ray already; call ray.shutdown(), or use another process")
    with private_session() if address == EMBEDDED else contextlib.nullcontext():
        try:
            with _termination_as_before():
                if address == EMBEDDED:
                    _start_embedded()
                else:
                    code = _join(address, code)
            with _logged_to(log):
                yield code
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _termination_as_before() -> Iterator[None]:
    """Ray takes SIGTERM for itself and dies with a native stack: give it back to whom it belonged."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _start_embedded() -> None:
    try:
        ray.init(
            address=EMBEDDED,
            job_config=_OwnPath(),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    except Exception as error:  # Ray raises no narrower one where its processes do not start in time
        reason = " ".join(str(error).split())
        raise InvalidInput(
            f"Ray did not start on this machine ({reason}); end other work on it and try again"
        ) from error


class _OwnPath(JobConfig):
    """Workers import from their own path: Ray would put the working directory before all that is installed."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _join(address: str, code: UserCode) -> UserCode:
    """Ships dpsweep's packages and ``code``; returns the latter as workers find it."""
    _require_listener(address)
    environment = {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    try:
        with packed(code) as (folders, there):
            ray.init(
                address=address,
                job_config=_OwnPath(),
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"py_modules": [*map(_package_folder, _PACKAGES), *folders], "env_vars": environment},
            )
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _refusal(address, error) from error
    return there


def _require_listener(address: str) -> None:
    """Ray itself would try for minutes to reach an address where nothing listens."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInput(
            f"the address {address!r} is none of 'local', 'in-process', 'auto' and HOST:PORT (of the cluster's head)"
        )
    if host in ("localhost", "127.0.0.1"):
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # what Ray makes of it
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, f"{error} at {host}:{port}") from error


def _refusal(address: str, error: Exception) -> InvalidInput:
    """Why Ray did not connect; it hides a refused token in the error that caused another one."""
    reason = " ".join(str(error).split())
    if "AuthenticationError" in f"{error!r} {error.__cause__}":
        return InvalidInput(
            f"the Ray cluster at {address!r} requires a token; the one supplied was missing or wrong; copy the "
            "cluster's token (`ray get-auth-token` on its head) to ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    if reason.startswith("Version mismatch"):
        return InvalidInput(f"the Ray cluster at {address!r} has other versions; install the same here ({reason})")
    return _no_cluster(address, reason)


def _no_cluster(address: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start --head`, "
        "or leave --address out to run embedded"
    )


def _package_folder(name: str) -> str:
    """Where a package of this process lies, as Ray ships it."""
    found = importlib.util.find_spec(name)
    assert found is not None, f"{name} is a package of dpsweep"
    assert found.origin is not None, f"{name} has an __init__.py"
    return str(Path(found.origin).parent)


class _LogFile(logging.FileHandler):
    """Log handler that ignores I/O errors; a full disk is reported when results are written."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Send the log of Ray and Tune to a file instead of the terminal."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path)
    except OSError as error:
        raise InvalidInput(f"cannot write to {path.parent}: {error.strerror}; choose another --output") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("ray")
    before, propagate = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before, propagate
        handler.close()


def check_resources(resources: ResourceSettings, accounting: AccountingSettings) -> None:
    """Refuse what this cluster, which does not grow, can never give: Ray would wait for it without end.

    Raises: InvalidInput with what one trial and the accounting actors reserve together, and what there is.
    """
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    reserved = {"CPU": resources.cpus + accounting.actors * accounting.cpus, "GPU": resources.gpus}
    for name, needed in reserved.items():
        if needed > there.get(name, 0.0):
            raise InvalidInput(
                f"a trial and the accounting actors reserve {needed:g} {name}s, but this machine has "
                f"{there.get(name, 0.0):g}; lower resources.{name.lower()}s, or join a cluster with --address"
            )


def check_shared_storage(uri: str) -> None:
    """Write a probe from here and read it on every node; `InvalidInput` names the nodes that cannot."""
    content = secrets.token_bytes(16)
    try:
        write_bytes_atomically(uri, content)
    except StorageError as error:
        raise InvalidInput(str(error)) from error
    nodes = _alive_nodes()
    probe = ray.remote(num_cpus=0, max_retries=2)(_reads_back)
    pending = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            uri, content
        )
        for node in nodes
    ]
    blind = [
        node["NodeManagerAddress"] for node, answer in zip(nodes, pending, strict=True) if not _answers_yes(answer)
    ]
    if blind:
        raise InvalidInput(
            f"{uri} was written here but cannot be read on {len(blind)} of {len(nodes)} nodes "
            f"({', '.join(sorted(set(blind)))}); choose an --output that every node shares, such as s3:// or NFS"
        )


def _reads_back(uri: str, content: bytes) -> bool:
    try:
        return read_bytes(uri) == content
    except (OSError, StorageError):
        return False


def _answers_yes(answer: ray.ObjectRef[bool]) -> bool:
    try:
        return bool(ray.get(answer, timeout=120))
    except RayError:
        return False


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
