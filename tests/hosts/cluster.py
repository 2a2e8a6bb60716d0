"""A cluster on hosts of a `Network`: a head, nodes, and a host with MLflow on PostgreSQL and an object store."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.hosts.network import Host, Network
from tests.orchestration.servers import POSTGRES

TOKEN = "c0" * 32
_PATIENCE = 400.0


def wait_for(holds: Callable[[], bool], what: str, seconds: float = _PATIENCE) -> None:
    """Wait until ``holds()``. Raises: AssertionError, naming ``what``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.25)


@dataclass
class Services:
    """MLflow on PostgreSQL, and an object store, on one host."""

    host: Host
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which drivers and workers find both."""
        store = f"http://{self.host.address}:9000"
        return {
            "MLFLOW_TRACKING_URI": f"http://{self.host.address}:5000",
            "AWS_ENDPOINT_URL": store,
            "MLFLOW_S3_ENDPOINT_URL": store,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }

    def begin(self) -> None:
        """Start all three."""
        self.start_database(is_new=True)
        self.start_mlflow()
        command = (sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", 9000)
        self.running["S3"] = self.host.start(*command, log="s3")
        self._listens(9000)
        bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
        made = self.host.run(sys.executable, "-c", bucket, **self.environment)
        assert made.returncode == 0, made.stderr

    def start_database(self, is_new: bool = False) -> None:
        """Start PostgreSQL; as it is of no use to root, under its own user."""
        assert POSTGRES is not None, "PostgreSQL is not installed"
        folder = self.host.folder / "postgres"
        as_user = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "env", "HOME=/tmp")
        if is_new:
            folder.mkdir()
            shutil.chown(folder, "postgres")
            initdb = (POSTGRES / "initdb", "-D", folder / "data", "-U", "mlflow", "-A", "trust", "--no-sync")
            made = self.host.run(*as_user, *initdb, "-E", "UTF8")
            assert made.returncode == 0, made.stderr
        options = ("-h", "127.0.0.1", "-p", 5432, "-k", folder, "-c", "fsync=off")
        server = (POSTGRES / "postgres", "-D", folder / "data", *options)
        self.running["PostgreSQL"] = self.host.start(*as_user, *server, log="database")
        self._listens(5432, "127.0.0.1")
        time.sleep(2.0)

    def start_mlflow(self) -> None:
        """Start the server of MLflow."""
        store = "postgresql+psycopg2://mlflow@127.0.0.1:5432/postgres"
        command = (sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "0.0.0.0")
        options = ("--port", 5000, "--artifacts-destination", self.host.folder / "artifacts", "--workers", 1)
        self.running["MLflow"] = self.host.start(
            *command, *options, "--allowed-hosts", "*", log="mlflow", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"
        )
        self._listens(5000)

    def pause(self, name: str) -> None:
        """Let a server neither answer nor end."""
        assert self._to_all_of(name, signal.SIGSTOP), f"{name} does not run"

    def resume(self, name: str) -> None:
        """Let a paused server go on, unless it was killed meanwhile."""
        self._to_all_of(name, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Kill a server with its processes."""
        assert self._to_all_of(name, signal.SIGKILL), f"{name} does not run"
        self.running[name].wait()

    def _to_all_of(self, name: str, number: signal.Signals) -> int:
        words = {"MLflow": ("mlflow",), "PostgreSQL": ("postgres",), "S3": ("moto.server",)}[name]
        return self.host.signal(number, *words)

    def _listens(self, port: int, address: str = "") -> None:
        probe = f"import socket; socket.create_connection(({address or self.host.address!r}, {port}), 2)"
        wait_for(lambda: self.host.run(sys.executable, "-c", probe).returncode == 0, f"port {port}")


@dataclass
class Cluster:
    """Ray on a head without work and other hosts. A GPU is counted by Ray alone."""

    network: Network
    head: Host
    nodes: dict[str, tuple[Host, tuple[object, ...]]] = field(default_factory=dict)

    @property
    def dashboard(self) -> str:
        """Address of the head's dashboard."""
        return f"http://{self.head.address}:8265"

    def start_head(self) -> None:
        """Start the head."""
        options = ("--port=6379", "--num-cpus=0", "--dashboard-host=0.0.0.0", "--object-store-memory=100000000")
        self._ray_start(self.head, "--head", *options)

    def add(self, name: str, *options: object, **environment: str) -> Host:
        """Another node, started with these options of ``ray start``."""
        host = self.network.add(name, **{**self.head.environment, **environment})
        self.nodes[name] = (host, options)
        self.start_node(name)
        return host

    def start_node(self, name: str) -> None:
        """Start Ray on a node, for the first time or again."""
        host, options = self.nodes[name]
        self._ray_start(host, f"--address={self.head.address}:6379", "--object-store-memory=100000000", *options)

    def lose(self, host: Host) -> None:
        """Kill every process of a host at once."""
        for _ in range(3):
            host.signal(signal.SIGKILL)

    def _ray_start(self, host: Host, *options: object) -> None:
        common = (f"--node-ip-address={host.address}", "--disable-usage-stats")
        for _ in range(3):  # a busy machine makes Ray give up at times
            done = host.run("ray", "start", *common, *options)
            if done.returncode == 0:
                return
            self.lose(host)  # `ray stop` would end every Ray of this machine, as hosts share its processes
        raise AssertionError(f"{host.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")


def cluster(network: Network, **environment: str) -> Cluster:
    """A head; nodes are added to it."""
    ray = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "120",  # a busy machine
        "RAY_worker_niceness": "0",  # else other work holds trials up, and the sweep is no longer where it was seen
    }
    head = network.add("head", **ray, **environment)
    made = Cluster(network, head)
    made.start_head()
    return made
