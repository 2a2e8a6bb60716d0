"""A cluster that grows: Ray's autoscaler, and the node types of `cluster.yaml`, whose nodes run on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import descendants, environment
from tests.orchestration.servers import closed_port, connect_to, wait_until

ROOT = Path(__file__).parents[3]
HEAD = "ray.head.default"
"""The name that the provider of nodes on this machine gives the head."""
OF_INSTANCES = {"gpu_worker": {"CPU": 1, "GPU": 1}, "cpu_worker": {"CPU": 1}}
"""What a node of each type has by its instance type, with fewer CPUs; nothing uses the GPU, which Ray counts."""
STARTED = {
    **CLOSED,
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_enable_autoscaler_v2": "1",  # what `ray up` sets, and the next two with the id and type of its head
    "RAY_CLOUD_INSTANCE_ID": "f" * 51 + "00000",
    "RAY_NODE_TYPE_NAME": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "f" * 51 + "00000",
}


def configuration(address: str) -> dict[str, Any]:
    """What `ray start` is given: limits, labels and custom resources are those of `cluster.yaml`, commands are none."""
    shipped = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    kinds = {
        name: {
            "resources": {**OF_INSTANCES[name], "object_store_memory": 10**8, **kind["resources"]},
            "labels": kind["labels"],
            "min_workers": kind["min_workers"],
            "max_workers": kind["max_workers"],
            "node_config": {},
        }
        for name, kind in shipped["available_node_types"].items()
        if name != shipped["head_node_type"]
    }
    head = {"resources": shipped["available_node_types"][shipped["head_node_type"]]["resources"], "node_config": {}}
    lists = ("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands")
    more = ("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        **{name: shipped[name] for name in ("cluster_name", "max_workers", "idle_timeout_minutes", "upscaling_speed")},
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": STARTED["RAY_CLOUD_INSTANCE_ID"],
        },
        "available_node_types": {**kinds, HEAD: {**head, "max_workers": 0}},
        "head_node_type": HEAD,
        "file_mounts": {},
        "auth": {},
        **{name: [] for name in (*lists, *more)},
    }


@contextlib.contextmanager
def autoscaled_cluster() -> Iterator[str]:
    """The address of a head without CPUs, whose autoscaler starts workers when work waits for them."""
    port = closed_port()
    folder = Path(tempfile.mkdtemp(prefix="dps-", dir="/tmp"))  # a short path, for Ray's sockets
    (folder / "cluster.json").write_text(json.dumps(configuration(f"127.0.0.1:{port}")))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += [f"--autoscaling-config={folder}/cluster.json", "--num-cpus=0", f"--object-store-memory={10**8}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--ray-client-server-port={closed_port()}"]
    with (folder / "said").open("w") as said:
        head = subprocess.Popen(command, stdout=said, stderr=said, env=environment(**STARTED, RAY_TMPDIR=str(folder)))
    try:
        wait_until(lambda: connect_to(head, port), ConnectionRefusedError)
        yield f"127.0.0.1:{port}"
    finally:
        for pid in (head.pid, *descendants(head.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
