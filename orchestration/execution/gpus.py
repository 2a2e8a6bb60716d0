"""Require that a trial which reserves a GPU trains on it: before the sweep starts, and where each trial starts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accounting.errors import InvalidInput, UnfitNode
from accounting.jobs.parallel import fitting
from orchestration.execution.nodes import alive_nodes, amounts_of
from orchestration.sweeps.fields import LEAST_QUANTITY
from orchestration.sweeps.planned import PlannedTrial
from orchestration.sweeps.resources import ResourceSettings
from orchestration.sweeps.schema import SweepSpec

_PATIENCE: Final = 60.0
"""Seconds in which a node answers; one whose GPUs other work holds does not, and is checked by each trial there."""
_ALLOWED: Final = "execution.allow_cpu: true lets such trials train on the CPU"


def check_gpus(sweep: SweepSpec) -> None:
    """Require that torch sees a GPU on every node that may train a trial with one.

    Raises: InvalidInput with a line for each node on which it does not.
    """
    sections = [each for each in sweep.resources if each.gpus]
    if not sections or sweep.execution.allow_cpu:
        return
    nodes = [node for node in alive_nodes() if any(fitting(amounts_of(node), each.amounts) for each in sections)]
    blind = _without_gpu(nodes)
    if blind:
        raise InvalidInput("\n".join(f"{line}; {_ALLOWED}" for line in blind))


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
    from workers.devices import missing_gpu  # late: it imports torch, which the driver does not need for this

    return missing_gpu()


def _without_gpu(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each node on which torch sees no GPU."""
    task = ray.remote(num_cpus=0, num_gpus=LEAST_QUANTITY, max_retries=0)(_missing_gpu)
    pending = {
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    }
    if pending:
        ray.wait([*pending.values()], num_returns=len(pending), timeout=_PATIENCE)
    found = {name: _answer(answer) for name, answer in pending.items()}
    return [f"trials reserve a GPU on node {name}, but {reason}" for name, reason in found.items() if reason]


def _answer(answer: Any) -> str | None:
    """What the node has answered; None while it has not, or where it was lost."""
    try:
        reason: str | None = ray.get(answer, timeout=0)
    except GetTimeoutError:
        ray.cancel(answer)
        return None
    except RayError:
        return None
    return reason
