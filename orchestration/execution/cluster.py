"""Connect to Ray: an embedded cluster on this machine, or a running one.

An embedded cluster is started for one sweep and stopped with it; it has its own token and folder, and no dashboard. On
a running cluster (``auto`` or ``HOST:PORT``), this process ships its own code to the workers, so that every node runs
the same version. It checks that storage is shared before any trial starts.

Ray ends a driver at once, without running any of its code, when it loses its node or head. Only another process can
tell the user then, and does so on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

import ray
from ray._private import services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.job_config import JobConfig

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs.parallel import fitting
from dpsweep.accounting.records.encryption import KEY_VARIABLE, KeyCheck, require_key
from dpsweep.accounting.records.local_files import make_folders, require_library_files
from dpsweep.orchestration.execution.backend import Connect, Warn
from dpsweep.orchestration.execution.environment import EMBEDDED, require_address, reread_environment
from dpsweep.orchestration.execution.nodes import (
    Question,
    alive_nodes,
    amounts_of,
    answers,
    has_autoscaler,
    is_beyond_autoscaler,
    node_in_words,
    own_address,
    room,
)
from dpsweep.orchestration.execution.session import private_session, told_if_killed
from dpsweep.orchestration.execution.storage_checks import SHARED, Probe
from dpsweep.orchestration.execution.versions import SAME, differences, versions_here
from dpsweep.orchestration.store.background import end_driver, every
from dpsweep.orchestration.sweeps.sections import ResourceSettings
from dpsweep.orchestration.sweeps.user_code import shipped_folders
from dpsweep.workers.machine.memory import ALLOCATOR
from dpsweep.workers.own_code.imports import NO_CODE, UserCode

_DRAINED_WITHIN: Final = 1.0
"""Seconds to wait for the last lines, where a child process still holds the other end."""


@contextlib.contextmanager
def stderr_without(text: bytes) -> Iterator[None]:
    """Leave out the lines with ``text`` that this process writes to stderr during a ``with`` block.

    Other lines are passed on as they come, so that those before a crash of the process are seen.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    passing = threading.Thread(target=_pass_on, args=(reader, kept, text), daemon=True)
    passing.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        passing.join(_DRAINED_WITHIN)


def _pass_on(reader: int, kept: int, text: bytes) -> None:
    with open(reader, "rb") as lines, open(kept, "wb", buffering=0) as stderr:
        for line in lines:
            if text not in line:
                stderr.write(line)


_OBJECT_STORE_BYTES = 128 * 2**20
"""Size of the embedded object store. It holds only specs and progress; large data go through files."""

_CONNECT_WITHIN = 10.0
"""Seconds in which a head takes a connection."""

_ANSWER_WITHIN = 30.0
"""Seconds in which a head that has taken a connection begins to speak gRPC."""

_KILLED = (
    "error: this process was killed by a signal, or by Ray because its node or the head of the cluster was lost; what "
    "is stored stays, and the same command continues"
)

_NODE_PERIOD = 2.0
"""Seconds from one look for the node of an embedded cluster to the next."""

_NO_NODE = (
    "Ray on this machine has ended, as its process was killed or stopped for long; what is stored stays, and the same "
    "command continues"
)

_LOG_LEVEL = "RAY_BACKEND_LOG_LEVEL"
"""Environment variable with the log level of Ray's compiled part."""


@contextlib.contextmanager
def connection(address: str, code: UserCode) -> Iterator[UserCode]:
    """Connect as `connected`, always by a new connection and without a log file."""
    if ray.is_initialized():
        raise InvalidInput("this process is connected to Ray already; call ray.shutdown(), or use another process")
    session = private_session() if address == EMBEDDED else contextlib.nullcontext()
    with told_if_killed(_KILLED), nodes_told_to_the_log(), session:
        try:
            # `logged_to` takes over after connecting, so that no log file is written if no cluster answers
            with _sigterm_handler_kept(), at_level("ray", logging.WARNING):
                reread_environment()
                if address == EMBEDDED:
                    _start_embedded()
                else:
                    code = _join(address, code)
            watched = every(_NODE_PERIOD, _look_for_node, _NODE_PERIOD)  # Ray must not be left during a look
            with watched if address == EMBEDDED else contextlib.nullcontext():
                yield code
        finally:
            with _sigterm_handler_kept():
                ray.shutdown()


def _look_for_node(over: threading.Event) -> None:
    """End this process's run if the embedded cluster has lost its only node; Ray itself would wait for another one."""
    with contextlib.suppress(RayError, ConnectionError, RuntimeError):
        if not alive_nodes() and not over.is_set():
            over.set()
            end_driver(_NO_NODE)


@contextlib.contextmanager
def connected(address: str, log: Path, code: UserCode = NO_CODE, connect: Connect = connection) -> Iterator[UserCode]:
    """Connect to Ray for the duration of a ``with`` block; an embedded cluster and its files are removed afterwards.

    `log`: file for Ray's log.
    `code`: the user's own modules; a running cluster gets a copy of them, and the block receives ``code`` with their
    locations on the workers.
    `connect`: by default a connection of its own.
    Raises: InvalidInput if no cluster answers at ``address`` or the cluster requires another token. Also if other code
    has already connected this process to Ray, as leaving the block would end that connection.
    """
    with connect(address, code) as shipped, logged_to(log):
        yield shipped


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Keep the SIGTERM handlers, in any thread, while Ray connects or shuts down.

    Its own exit with code 15 without a word, print a native stack trace, or abort. That of Python is not replaced; that
    of the process, which calls it, is restored. Outside the main thread Ray warns that it sets none; that warning is
    suppressed. Its shutdown leaves no handler, so that the signal would kill.
    """
    of_process, utilities = ctypes.pythonapi.PyOS_getsig, cast("Any", ray_utils)
    of_process.restype = ctypes.c_void_p
    of_python = signal.getsignal(signal.SIGTERM)
    handler, replace = of_process(int(signal.SIGTERM)), getattr(utilities, "set_sigterm_handler", None)
    logger = logging.getLogger(ray_worker.__name__)
    logger.addFilter(_is_not_about_sigterm)
    utilities.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utilities.set_sigterm_handler = replace
        logger.removeFilter(_is_not_about_sigterm)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, of_python)
        ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), ctypes.c_void_p(handler))


@contextlib.contextmanager
def at_level(logger: str, level: int) -> Iterator[None]:
    """Suppress the messages of a logger below a level for the duration of a ``with`` block."""
    found = logging.getLogger(logger)
    before = found.level
    found.setLevel(level)
    try:
        yield
    finally:
        found.setLevel(before)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or class for the duration of a ``with`` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("SIGTERM handler is not set")


_STARTED_WITHIN: Final = 90.0
"""Seconds in which the processes of an embedded Ray start; Ray itself gives up after 30, too few on a busy machine."""


def _start_embedded() -> None:
    try:
        with replaced(services, "get_node", _patient(services.get_node)):
            ray.init(
                address=EMBEDDED,
                job_config=_WithoutWorkingDir(),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
    except UnicodeEncodeError as error:  # it stores the command line and the working directory as text
        raise InvalidInput(
            f"Ray takes names in UTF-8 alone, and this has other bytes: {ascii(error.object)[1:-1]}; rename the file "
            "or folder"
        ) from error
    except Exception as error:  # Ray raises nothing narrower if its processes do not start in time
        reason = " ".join(str(error).split())
        raise InvalidInput(
            f"Ray did not start on this machine ({reason}); end other work on it and try again"
        ) from error


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's question for the node that it starts, which is asked until there is an answer in time."""
    deadline = time.monotonic() + _STARTED_WITHIN

    def asked(*of: Any) -> Any:
        while True:
            try:
                return get_node(*of)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    return asked


class _WithoutWorkingDir(JobConfig):
    """Keeps Ray from putting the driver's working directory first on the workers' import path."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _join(address: str, code: UserCode) -> UserCode:
    """Connect to a running cluster and ship dpsweep and ``code``; return ``code`` with its locations on the workers."""
    _require_listener(address)
    environment = {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    try:
        with shipped_folders(code) as (folders, there), _only_fatal_lines():
            ray.init(
                address=address,
                job_config=_WithoutWorkingDir(),
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"py_modules": [own_package(), *folders], "env_vars": environment},
            )
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise _refusal(address, error) from error
    return there


@contextlib.contextmanager
def _only_fatal_lines() -> Iterator[None]:
    """Let the compiled part of Ray log only fatal errors in this process, unless the user has set its level.

    It writes errors to stderr, such as the recovery of objects of a lost node, and its level, which it reads when the
    process connects, is the only option against that. That it was set is a line on stderr too, which is left out.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "fatal"
    try:
        with stderr_without(b"Set ray log level from environment variable"):
            yield
    finally:
        del os.environ[_LOG_LEVEL]


def _require_listener(address: str) -> None:
    """Fail if nothing listens or answers at ``address``; Ray itself would retry for minutes."""
    require_address(address)
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1"):
        host = own_address()
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, f"{error} at {host}:{port}") from error
    import grpc  # late: it takes 10 MB, and drivers on the head, which join by "auto", do without
    from ray._private.grpc_utils import init_grpc_channel

    channel = init_grpc_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_WITHIN)
    except grpc.FutureTimeoutError as error:
        reason = f"{host}:{port} takes connections, but has not answered within {_ANSWER_WITHIN:g} s"
        raise _no_cluster(address, reason) from error
    finally:
        channel.close()


def _refusal(address: str, error: Exception) -> InvalidInput:
    """Return the reason why Ray did not connect. Ray reports a refused token only in the text or the cause of its
    error.
    """
    reason = " ".join(str(error).split())
    if "AuthenticationError" in f"{error!r} {error.__cause__}":
        return refused_token(address)
    if reason.startswith("Version mismatch"):
        return InvalidInput(f"the Ray cluster at {address!r} has other versions; install the same here ({reason})")
    return _no_cluster(address, reason)


def refused_token(address: str) -> InvalidInput:
    """Return the error for a cluster that rejects this process's token."""
    return InvalidInput(
        f"the Ray cluster at {address!r} requires a token; the one supplied was missing or wrong; copy the "
        "cluster's token (`ray get-auth-token` on its head) to ~/.ray/auth_token or RAY_AUTH_TOKEN"
    )


def _no_cluster(address: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start --head`, "
        "or leave --address out to run embedded"
    )


def own_package() -> str:
    """Return the folder of dpsweep that this process imports, for Ray to ship; Ray follows links in it."""
    return str(files("dpsweep"))


class _LogFile(logging.FileHandler):
    """Log handler that ignores I/O errors; a full disk is reported when results are written."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Send the log of Ray and Tune to a file instead of the terminal.

    Raises: InvalidInput if it is not writable; UnsafeFile for a link in its place.
    """
    try:
        make_folders(str(path.parent), 0o755)
        require_library_files((str(path),))
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


def nodes_told_to_the_log() -> contextlib.AbstractContextManager[None]:
    """Send messages of nodes, such as the last lines of a raylet that died, to Ray's log.

    Ray 2.60 prints them to stdout, whatever ``log_to_driver`` is, and has no option to turn that off.
    """
    return replaced(ray_worker, "print_to_stdstream", _log_node_message)


def _log_node_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    logging.getLogger("ray").warning("(%s) %s", data["pid"], "\n".join(data["lines"]))


def check_resources(needs: Mapping[str, Mapping[str, float]], patience: float = 0.0) -> None:
    """Refuse a sweep if some piece of its work fits on no node that is there or that an autoscaler may start.

    Ray itself would wait forever. needs: the resources that each kind of work reserves on one node. patience: seconds
    to wait for nodes that are still joining. Raises: InvalidInput with the reserved and the available resources.
    """
    deadline = time.monotonic() + patience
    while misfits := [work for work, each in needs.items() if not any(fitting(node, each) for node in _amounts())]:
        if has_autoscaler():
            refused = next((work for work in misfits if is_beyond_autoscaler(needs[work])), None)
            if refused is None:
                return
            raise InvalidInput(_misfit(refused, needs[refused]))
        if time.monotonic() > deadline:
            raise InvalidInput(_misfit(misfits[0], needs[misfits[0]]))
        time.sleep(0.5)


def check_ranks(sections: Sequence[ResourceSettings], patience: float = 0.0) -> None:
    """Refuse trials with more ranks on several nodes than these have room for together, without an autoscaler.

    patience: as of `check_resources`. Raises: InvalidInput with both numbers.
    """
    deadline = time.monotonic() + patience
    while lacking := [each for each in sections if room(_amounts(), each.on_each_node) < each.times]:
        if has_autoscaler():
            return
        if time.monotonic() > deadline:
            ranks, there = lacking[0].processes, room(_amounts(), lacking[0].on_each_node)
            raise InvalidInput(
                f"a trial has {ranks} ranks on nodes that have room for {there} together; give it fewer, or join a "
                "cluster with more nodes with --address"
            )
        time.sleep(0.5)


def _misfit(work: str, needs: Mapping[str, float]) -> str:
    most = {name: max((node.get(name, 0.0) for node in _amounts()), default=0.0) for name in needs}
    reserved = " and ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount > 0.0)
    there = " and ".join(f"{most[name]:g} {name}" for name, amount in needs.items() if amount > 0.0)
    return (
        f"{work} reserves {reserved}, but no single node has that (at most {there}), and no autoscaler starts one that "
        "does; lower what it reserves, or join a cluster with such nodes with --address"
    )


def _amounts() -> list[dict[str, float]]:
    return [*map(amounts_of, alive_nodes())]


def wake_nodes() -> None:
    """Let every node start a process that imports this module, and so answers the checks below at once. Returns without
    waiting.
    """
    for node in alive_nodes():
        Question("the processes", _awake).sent_to(node)


def _awake() -> None:
    return


def check_versions(warn: Warn) -> None:
    """Require this process's versions on every node. Raises: InvalidInput with a line for each node with others."""
    here, question = versions_here(), Question("the versions", versions_here)
    told = [(node_in_words(node), differences(here, there)) for node, there in answers(question, alive_nodes(), warn)]
    if wrong := [f"{name} has {others}; {SAME}" for name, others in told if others]:
        raise InvalidInput("\n".join(wrong))


def check_shared_storage(probe: Probe, warn: Warn) -> None:
    """Read the probe on every node. Raises: InvalidInput naming the nodes that cannot, and why the first cannot."""
    told = answers(Question("the shared storage", Probe.obstacle, (probe,)), alive_nodes(), warn)
    if blind := [(node, why) for node, why in told if why]:
        where, why = _counted([node for node, _ in blind]), blind[0][1]
        raise InvalidInput(f"{probe.uri} was written here but cannot be read on {where}: {why}; {SHARED}")


def check_keys(check: KeyCheck | None, warn: Warn) -> None:
    """Require that every node has the encryption key that ``check`` was made from, or no key if ``check`` is None.

    The key itself is not sent, because Ray stores and logs the environment of workers. Raises: InvalidInput naming the
    nodes with another key or, if one is required, none.
    """
    told = answers(Question("the encryption key", _has_key, (check,)), alive_nodes(), warn)
    if others := [node for node, holds in told if not holds]:
        here, there = ("set", "the same key") if check else ("not set", "no key")
        raise InvalidInput(
            f"{KEY_VARIABLE} is {here} here, but not so on {_counted(others)}; start Ray there with {there} in its "
            "environment"
        )


def _counted(nodes: Sequence[Mapping[str, Any]]) -> str:
    addresses = sorted({node["NodeManagerAddress"] for node in nodes})
    return f"{len(nodes)} of {len(alive_nodes())} nodes ({', '.join(addresses)})"


def _has_key(check: KeyCheck | None) -> bool:
    try:
        require_key(check, "the node")
    except InvalidInput:
        return False
    return True
