"""Require that a trial which reserves a GPU trains on it: before the sweep starts, and where each trial starts."""

from __future__ import annotations

import socket
from typing import Final

import ray

from dpsweep.accounting.errors import InvalidInput, UnfitNode
from dpsweep.accounting.jobs.parallel import fitting
from dpsweep.orchestration.execution.asking import Question, answers, named
from dpsweep.orchestration.execution.backend import Warn
from dpsweep.orchestration.execution.nodes import alive_nodes, amounts_of
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.resources import ResourceSettings
from dpsweep.orchestration.sweeps.schema import SweepSpec

_ALLOWED: Final = "execution.allow_cpu: true lets such trials train on the CPU"


def check_gpus(sweep: SweepSpec, warn: Warn) -> None:
    """Require that torch sees a GPU on every node that may train a trial with one.

    A node whose GPUs other work holds is checked by each trial there, and named in a warning. Raises: InvalidInput with
    a line for each node on which torch sees none; as `answers`.
    """
    sections = [each for each in sweep.resources if each.gpus]
    if not sections or sweep.execution.allow_cpu:
        return
    nodes = [node for node in alive_nodes() if any(fitting(amounts_of(node), each.amounts) for each in sections)]
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
