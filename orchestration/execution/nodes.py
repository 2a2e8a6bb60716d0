"""The nodes of a Ray cluster, and the resources that trials of a sweep wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

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


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """CPUs, GPUs and the user's own resources, without those that Ray adds, such as one for each node's address."""
    ours = {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}
    return {name: amount for name, amount in ours.items() if name not in ("memory", "object_store_memory")}
