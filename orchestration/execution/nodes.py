"""The nodes of a Ray cluster, and the resources that trials of a sweep wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from orchestration.records.status_snapshot import ClusterSnapshot, NodeSnapshot
from orchestration.sweeps.resources import LABEL


def cluster_now(waiting: Sequence[Mapping[str, float]]) -> ClusterSnapshot | None:
    """A snapshot of the cluster that this process is connected to; None while it does not answer.

    waiting: resources that each trial reserves that has not started. The snapshot shows one of these trials, preferably
    one that no node can run.
    """
    try:
        alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    except (RayError, ConnectionError, RuntimeError):
        return None
    nodes = tuple(NodeSnapshot(node["NodeManagerAddress"], _amounts(node["Resources"])) for node in alive)
    there = [amounts_of(node) for node in alive]
    lacks = [(trial, missing_resources(there, trial)) for trial in waiting]
    trial, missing = next(((each, lack) for each, lack in lacks if lack), lacks[0] if lacks else ({}, {}))
    stuck = sum(bool(lack) for _, lack in lacks)
    return ClusterSnapshot(nodes, trial, _amounts(free), stuck or len(waiting), missing)


def amounts_of(node: Mapping[str, Any]) -> dict[str, float]:
    """The resources of a node of `ray.nodes`, with each of its labels as a resource of amount 1."""
    labels: Mapping[str, str] = node.get("Labels", {})
    return {**node["Resources"], **{f"{LABEL}{name}={value}": 1.0 for name, value in labels.items()}}


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
    """CPUs, GPUs and the user's own resources, without those that Ray adds, such as one for each node's address."""
    ours = {name: amount for name, amount in resources.items() if ":" not in name and "_group_" not in name}
    return {name: amount for name, amount in ours.items() if name not in ("memory", "object_store_memory")}
