"""Servers that tests start on loopback: PostgreSQL, MLflow and an object store that speaks S3."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psycopg2


def closed_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


POSTGRES = next(
    (
        path
        for path in (*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/nowhere").parent)
        if (path / "initdb").exists() and (path / "postgres").exists()
    ),
    None,
)


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL of its own on a free port; the server refuses to run as root, so root hands it to another user."""
    assert POSTGRES is not None
    port = closed_port()
    folder = tempfile.mkdtemp(prefix="dpsweep-postgres-")
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)
    common: dict[str, Any] = {"cwd": folder, "user": user, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(
        [POSTGRES / "initdb", "-D", "data", "-U", "dpsweep", "-A", "trust", "-E", "UTF8", "--no-sync"],
        check=True,
        **common,
    )
    options = ["-D", "data", "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-c", "fsync=off"]
    server = subprocess.Popen([POSTGRES / "postgres", *options], start_new_session=True, **common)
    _GROUPS[port] = server.pid
    try:
        address = f"dpsweep@127.0.0.1:{port}/postgres"
        wait_until(lambda: psycopg2.connect(f"postgresql://{address}").close(), psycopg2.OperationalError)
        yield f"postgresql+psycopg2://{address}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        shutil.rmtree(folder)


@contextmanager
def mlflow_server(
    store: str, artifacts: str, options: Sequence[str] = (), secrets: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """options: more of its command line; secrets: more of its environment.

    Without the eight processes for jobs that MLflow's server starts beside itself, which dpsweep does not use.
    """
    port = closed_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--artifacts-destination", artifacts, "--workers", "1", *options]
    changes = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **secrets}
    with _listening(command, port, {**os.environ, **changes}) as address:
        yield address


_GROUPS: dict[int | None, int] = {}
"""Process groups of the servers that run, by port."""


@contextmanager
def paused(address: str) -> Iterator[None]:
    """Stop a server for the duration of a ``with`` block: it takes connections and answers nothing."""
    group = _GROUPS[urlsplit(address).port]
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def has_s3() -> bool:
    """Whether the packages are here that serve S3 and write to it."""
    return all(importlib.util.find_spec(name) for name in ("moto", "boto3", "flask_cors"))


@contextmanager
def s3(bucket: str) -> Iterator[dict[str, str]]:
    """An S3 server of its own with one bucket; yields the environment by which pyarrow, boto3 and MLflow find it."""
    port = closed_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _listening(command, port, dict(os.environ)) as address:
        found = {
            "AWS_ENDPOINT_URL": address,
            "MLFLOW_S3_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        _client(found).create_bucket(Bucket=bucket)
        yield found


def objects_in(bucket: str, store: Mapping[str, str]) -> dict[str, bytes]:
    """All objects of a bucket of `s3`, by name."""
    client = _client(store)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    names = [item["Key"] for page in pages for item in page.get("Contents", ())]
    return {name: client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names}


def put_object(bucket: str, store: Mapping[str, str], name: str, content: bytes | None) -> None:
    """Store an object in a bucket of `s3`, or delete it."""
    if content is None:
        _client(store).delete_object(Bucket=bucket, Key=name)
    else:
        _client(store).put_object(Bucket=bucket, Key=name, Body=content)


def sent_in_pieces(bucket: str, store: Mapping[str, str]) -> list[str]:
    """The objects of a bucket of `s3` that took more than one request: S3 shows by their tag of how many pieces."""
    pages = _client(store).get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [item["Key"] for page in pages for item in page.get("Contents", ()) if "-" in item["ETag"]]


def _client(store: Mapping[str, str]) -> Any:
    import boto3  # an extra of dpsweep

    return boto3.client(
        "s3",
        endpoint_url=store["AWS_ENDPOINT_URL"],
        aws_access_key_id=store["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=store["AWS_SECRET_ACCESS_KEY"],
        region_name=store["AWS_DEFAULT_REGION"],
    )


@contextmanager
def _listening(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """A server, once it listens on its port, until the block ends."""
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    _GROUPS[port] = server.pid
    try:
        wait_until(lambda: connect_to(server, port), ConnectionRefusedError)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


@contextmanager
def mute() -> Iterator[str]:
    """HOST:PORT of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def connect_to(server: subprocess.Popen[bytes], port: int) -> None:
    assert server.poll() is None, "the server ended by itself"
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def wait_until(attempt: Callable[[], object], failure: type[Exception], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            attempt()
        except failure:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
