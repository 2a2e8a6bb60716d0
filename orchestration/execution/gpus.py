"""Require that a trial which reserves a GPU trains on it: before the sweep starts, and where each trial starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray

from dpsweep.accounting.errors import InvalidInput, UnfitNode
from dpsweep.accounting.jobs.parallel import fitting
from dpsweep.orchestration.execution.asking import Question, answers, named
from dpsweep.orchestration.execution.backend import Warn
from dpsweep.orchestration.execution.nodes import alive_nodes, amounts_of, room
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.resources import ResourceSettings
from dpsweep.orchestration.sweeps.schema import SweepSpec

TRAINING_LABEL: Final = ("dpsweep", "train")
"""The label of GPU nodes in the cluster files of this project, by which nodes that join later are known too."""


def off_gpu_nodes(
    needs: Mapping[str, float], nodes: Sequence[Mapping[str, Any]] | None = None, times: int = 1
) -> dict[str, str]:
    """Return the label selector that keeps work off the nodes with GPUs; empty if it reserves one, or fits nowhere
    else.

    `needs`: amounts that the work reserves on one node, labels included, this many ``times``. `nodes`: as of
    `ray.nodes`; by default those that are alive.
    """
    there = alive_nodes() if nodes is None else nodes
    with_gpus = [node for node in there if node["Resources"].get("GPU", 0.0) > 0.0]
    name, value = TRAINING_LABEL
    others = [node for node in there if node not in with_gpus and node.get("Labels", {}).get(name) != value]
    if needs.get("GPU", 0.0) or not with_gpus or room([*map(amounts_of, others)], needs) < times:
        return {}
    unlabelled = [node["NodeID"] for node in with_gpus if node.get("Labels", {}).get(name) != value]
    asks_for_label = any(each.startswith(f"label {name}=") for each in needs)
    return {
        **({"ray.io/node-id": f"!in({','.join(sorted(unlabelled))})"} if unlabelled else {}),
        **({name: f"!{value}"} if not asks_for_label else {}),
    }


_ALLOWED: Final = "execution.allow_cpu: true lets such trials train on the CPU"


def check_gpus(sweep: SweepSpec, warn: Warn) -> None:
    """Require that torch sees a GPU on every node that may train a trial with one.

    A node whose GPUs other work holds is checked by each trial there, and named in a warning. Raises: InvalidInput with
    a line for each node on which torch sees none; as `answers`.
    """
    sections = [each for each in sweep.resources if each.gpus]
    if not sections or sweep.execution.allow_cpu:
        return
    nodes = [node for node in alive_nodes() if any(fitting(amounts_of(node), each.on_each_node) for each in sections)]
    question = Question("whether torch sees their GPUs", _missing_gpu, needs_gpu=True)
    blind = [
        f"trials reserve a GPU on {named(node)}, but {reason}; {_ALLOWED}"
        for node, reason in answers(question, nodes, warn)
        if reason
    ]
    if blind:
        raise InvalidInput("\n".join(blind))


def require_gpu(planned: PlannedTrial, reserved: ResourceSettings) -> None:
    """Raise `UnfitNode` if the trial has reserved a GPU, but torch sees none in this process."""
    if not reserved.gpus or planned.spec.execution.allow_cpu:
        return
    reason = _missing_gpu()
    if reason is not None:
        here = f"node {socket.gethostname()} ({ray.util.get_node_ip_address()})"  # type: ignore[no-untyped-call]
        raise UnfitNode(
            f"the trial reserves {reserved.gpus:g} GPU on {here}, but {reason}; {_ALLOWED}",
            ray.get_runtime_context().get_node_id(),
        )


def _missing_gpu() -> str | None:
    from dpsweep.workers.machine.devices import (
        missing_gpu,  # late: it imports torch, which the driver does not need for this
    )

    return missing_gpu()
