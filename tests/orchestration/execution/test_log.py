"""What Ray's nodes and its compiled part tell the driver stands in logs, not on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray._private import worker

from dpsweep.orchestration.execution.cluster import logged_to, nodes_told_to_the_log
from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import script

DUMP = "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump] NodeManager.GcsCheckAlive"


def tell() -> None:
    """As Ray's listener does, which looks the function up with every message."""
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names
    worker.print_to_stdstream({"lines": [DUMP], "pid": "raylet", "is_err": False}, ignore_prefix=False)


def test_the_last_lines_of_a_dead_raylet_stand_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "ray.log"
    with nodes_told_to_the_log(), logged_to(log):
        tell()
    assert capfd.readouterr() == ("", "")
    assert f"(raylet) {DUMP}" in log.read_text()
    tell()
    assert "Raylet is terminated" in capfd.readouterr().out, "as it was before"


LOST = """
import sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from dpsweep.orchestration.execution.cluster import connected
from dpsweep.orchestration.execution.environment import prepare_environment

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
prepare_environment(cluster.address)
with connected(cluster.address, Path(sys.argv[1])):
    made = ray.remote(num_cpus=1, max_retries=3)(lambda: bytes(2**22)).remote()
    ray.wait([made], fetch_local=False)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    print("recovered", len(ray.get(made)), flush=True)
cluster.shutdown()
"""
"""A node is lost with an object of 4 MiB on it, which Ray makes again on another node."""


@pytest.mark.long
def test_a_lost_node_with_objects_leaves_no_line_of_ray_on_the_terminal(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with script(LOST, tmp_path / "ray.log", errors=said, **CLOSED) as process:
        assert process.stdout is not None
        assert f"recovered {2**22}" in process.stdout.read(), said.read_text()
    assert "core_worker" not in said.read_text()
