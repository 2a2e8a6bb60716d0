"""The nodes of a Ray cluster, those that its autoscaler may start, and the resources that trials wait for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.worker import global_worker
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]  # generated
from ray.exceptions import RayError

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.orchestration.records.status_snapshot import ClusterSnapshot, NodeSnapshot
from dpsweep.orchestration.sweeps.resources import LABEL


def cluster_now(waiting: Sequence[Mapping[str, float]], training: int) -> ClusterSnapshot | None:
    """Return a snapshot of the cluster that this process is connected to; None while it does not answer.

    `waiting`: resources that each trial reserves that has not started. `training`: trials that train, each in a
    placement group; of the others, as many are starting as there are further groups. The snapshot shows one of these
    trials, preferably one that no node can run.
    """
    try:
        alive = alive_nodes()
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        starting = max(0, _own_groups() - training)
    except (RayError, ConnectionError, RuntimeError):
        return None
    nodes = tuple(NodeSnapshot(node["NodeManagerAddress"], _amounts(node["Resources"])) for node in alive)
    there = [amounts_of(node) for node in alive]
    lacks = [(trial, missing_resources(there, trial)) for trial in waiting]
    trial, missing = next(((each, lack) for each, lack in lacks if lack), lacks[0] if lacks else ({}, {}))
    stuck = sum(bool(lack) for _, lack in lacks)
    starting = min(starting, len(waiting))
    return ClusterSnapshot(nodes, trial, _amounts(free), stuck or len(waiting) - starting, missing, starting)


def _own_groups() -> int:
    """Placement groups of this process that have their resources; their ids end with that of the job."""
    job = ray.get_runtime_context().get_job_id()
    groups: dict[str, dict[str, Any]] = ray.util.placement_group_table()
    return sum(name.endswith(job) and group["state"] == "CREATED" for name, group in groups.items())


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of `ray.nodes` that are alive."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def amounts_of(node: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources of a node of `ray.nodes`, with each of its labels as a resource of amount 1."""
    labels: Mapping[str, str] = node.get("Labels", {})
    return {**node["Resources"], **{f"{LABEL}{name}={value}": 1.0 for name, value in labels.items()}}


def missing_resources(nodes: Sequence[Mapping[str, float]], trial: Mapping[str, float]) -> dict[str, float]:
    """Return the part of ``trial`` that the nodes can never provide; empty if a node can run the trial once it is free.

    >>> missing_resources([{"CPU": 8}, {"CPU": 2, "GPU": 1}], {"CPU": 4, "GPU": 1})
    {'CPU': 4, 'GPU': 1}
    >>> missing_resources([{"CPU": 2}], {"CPU": 1, "GPU": 1})
    {'GPU': 1}
    """
    missing = {
        name: amount
        for name, amount in trial.items()
        if amount > max((node.get(name, 0.0) for node in nodes), default=0.0)
    }
    if missing or any(all(node.get(name, 0.0) >= amount for name, amount in trial.items()) for node in nodes):
        return missing
    return dict(trial)


def room(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how often the nodes have ``needs``, together, each time on one of them.

    >>> room([{"CPU": 4.0}, {"CPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], {"CPU": 1.5, "GPU": 0.0})
    7
    >>> room([{"CPU": 1.0}, {"CPU": 1.0, "label pool=train": 1.0}], {"CPU": 0.25, "label pool=train": 1.0})
    4
    """
    labels = [name for name in needs if name.startswith(LABEL)]
    asked = {name: amount for name, amount in needs.items() if amount > 0.0 and name not in labels}
    return sum(
        int(min(node.get(name, 0.0) / amount for name, amount in asked.items()) + 1e-9)
        for node in nodes
        if all(label in node for label in labels)
    )


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """CPUs, GPUs and the user's own resources, without those that Ray adds, such as one for each node's address."""
    ours = {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}
    return {name: amount for name, amount in ours.items() if name not in ("memory", "object_store_memory")}


_LONGEST: Final = 600.0
"""Seconds in which an autoscaler looks at what waits, which it does every five seconds when it is well."""


def has_autoscaler() -> bool:
    """Return whether an autoscaler may start further nodes for this process's cluster.

    Its monitor describes every cluster; only one that starts nodes knows the head by the name of a node type.
    """
    if _is_current():
        return any(node.ray_node_type_name for node in _status().cluster_resource_state.node_states)
    status = parsed_json(_client().internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None) or b"{}")
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return not set(types.values()) <= {f"node_{node['NodeID']}" for node in nodes}


def is_beyond_autoscaler(needs: Mapping[str, float]) -> bool:
    """Return whether the autoscaler says that none of its node types has the resources and labels of ``needs``.

    It is asked by an empty task that waits for them, until that runs or the autoscaler has seen it wait. False for
    an autoscaler of the first version, which does not say it. The task is not cancelled, since `ray.cancel` ends this
    process where the task ends at the same time; one that still waits ends with the connection to the cluster. Raises:
    InvalidInput for an autoscaler that does not look.
    """
    if not _is_current():
        return False
    waiting = ray.remote(max_retries=0, **_options(needs))(_nothing).remote()
    deadline, shown = time.monotonic() + _LONGEST, None
    while not ray.wait([waiting], timeout=0.5)[0]:
        status = _status()
        if any(_is(needs, request) for request in status.autoscaling_state.infeasible_resource_requests):
            return True
        state = status.cluster_resource_state
        if shown is None and any(_is(needs, each.request) for each in state.pending_resource_requests):
            shown = state.cluster_resource_state_version
        if shown is not None and status.autoscaling_state.last_seen_cluster_resource_state_version >= shown:
            return False
        if time.monotonic() > deadline:
            raise InvalidInput(
                f"the cluster's autoscaler has not looked at what waits within {_LONGEST:g} s; see `ray status` and "
                "the file monitor.log on the head"
            )
    return False


def _nothing() -> None:
    """The task that asks for resources."""


def _options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a task that reserves ``needs``, in which labels are resources of amount 1."""
    own = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU") and not name.startswith(LABEL)}
    return {
        "num_cpus": needs.get("CPU", 0.0),
        "num_gpus": needs.get("GPU", 0.0),
        "resources": own,
        "label_selector": _labels(needs),
    }


def _labels(needs: Mapping[str, float]) -> dict[str, str]:
    return dict(name.removeprefix(LABEL).split("=", 1) for name in needs if name.startswith(LABEL))


def _is(needs: Mapping[str, float], request: Any) -> bool:
    """Return whether the request of the autoscaler's state asks for ``needs``."""
    asked = {name: amount for name, amount in needs.items() if amount > 0.0 and not name.startswith(LABEL)}
    labels = {
        constraint.label_key: set(constraint.label_values)
        for selector in request.label_selectors
        for constraint in selector.label_constraints
    }
    return dict(request.resources_bundle) == asked and labels == {
        name: {value} for name, value in _labels(needs).items()
    }


def _is_current() -> bool:
    """Return whether the cluster has an autoscaler of the second version, or would have."""
    return bool(is_autoscaler_v2(fetch_from_server=True, gcs_client=_client()))


def _status() -> Any:
    return GetClusterStatusReply.FromString(_client().get_cluster_status())


def _client() -> Any:
    return global_worker.gcs_client  # type: ignore[attr-defined]  # a property of a compiled class
