"""Where Ray ran the tasks of a name, from the events that Ray itself keeps of every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import PATIENCE, script

EVENTS = """
import json, sys
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

address, name = sys.argv[1:]
ray.init(address, log_to_driver=False, configure_logging=False)
stub = gcs_service_pb2_grpc.TaskInfoGcsServiceStub(init_grpc_channel(address))
events = stub.GetTaskEvents(gcs_service_pb2.GetTaskEventsRequest(limit=100_000)).events_by_task
ran = [event.state_updates.node_id.hex() for event in events if event.task_info.name == name]
print(json.dumps([[node, ran.count(node["NodeID"])] for node in ray.nodes()]))
"""


def nodes_and_tasks(address: str, name: str, folder: Path) -> list[tuple[dict[str, Any], int]]:
    """Every node that has joined the cluster, as `ray.nodes` describes it, and how many tasks of the name it ran."""
    said = folder / "events"
    with script(EVENTS, address, name, errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    assert answer, said.read_text()
    return [(node, tasks) for node, tasks in json.loads(answer)]
