"""The nodes of a Ray cluster, and which resources the trials of a sweep wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from orchestration.records.snapshot import ClusterSnapshot, NodeSnapshot
from orchestration.sweeps.schema import ResourceSettings


def cluster_now(resources: ResourceSettings, waiting: int) -> ClusterSnapshot | None:
    """The cluster that this process is connected to; None while it does not answer. ``waiting``: trials not started."""
    try:
        alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    except (RayError, ConnectionError, RuntimeError):
        return None
    nodes = tuple(NodeSnapshot(node["NodeManagerAddress"], _amounts(node["Resources"])) for node in alive)
    trial = {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}
    missing = missing_resources([node.resources for node in nodes], trial)
    return ClusterSnapshot(nodes, trial, _amounts(free), waiting, missing)


def missing_resources(nodes: Sequence[Mapping[str, float]], trial: Mapping[str, float]) -> dict[str, float]:
    """The part of ``trial`` that the nodes can never provide; empty if a node can run the trial once it is free.

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
    """CPUs, GPUs and the user's own resources, without those that Ray adds, such as one per node's address."""
    ours = {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}
    return {name: amount for name, amount in ours.items() if name not in ("memory", "object_store_memory")}
