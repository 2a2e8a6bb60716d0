"""The nodes of a Ray cluster, those that its autoscaler may start, and their resources, which trials wait for.

Nodes are asked before a sweep starts, such as whether torch sees their GPUs. No check passes by silence.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray._private.worker import global_worker
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]  # generated
from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpsweep.accounting.errors import InvalidInput, UnfitNode
from dpsweep.accounting.jobs.parallel import fitting
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.orchestration.comparison.formats import reason_of
from dpsweep.orchestration.execution.backend import Warn
from dpsweep.orchestration.store.status_snapshot import ClusterSnapshot, NodeSnapshot
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import LABEL, LEAST_QUANTITY, ResourceSettings


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


def own_address() -> str:
    """Return the address of this node, as Ray resolves it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


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
    labels, asked = [name for name in needs if name.startswith(LABEL)], quantities(needs)
    return sum(
        int(min(node.get(name, 0.0) / amount for name, amount in asked.items()) + 1e-9)
        for node in nodes
        if all(label in node for label in labels)
    )


def quantities(needs: Mapping[str, float]) -> dict[str, float]:
    """Return the amounts above 0 of resources that are counted; labels are not."""
    return {name: amount for name, amount in needs.items() if amount > 0.0 and not name.startswith(LABEL)}


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
    labels = {
        constraint.label_key: set(constraint.label_values)
        for selector in request.label_selectors
        for constraint in selector.label_constraints
    }
    return dict(request.resources_bundle) == quantities(needs) and labels == {
        name: {value} for name, value in _labels(needs).items()
    }


def _is_current() -> bool:
    """Return whether the cluster has an autoscaler of the second version, or would have."""
    return bool(is_autoscaler_v2(fetch_from_server=True, gcs_client=_client()))


def _status() -> Any:
    return GetClusterStatusReply.FromString(_client().get_cluster_status())


def _client() -> Any:
    return global_worker.gcs_client  # type: ignore[attr-defined]  # a property of a compiled class


_LOOK: Final = 1.0
"""Seconds between two looks at what has answered."""
_QUIET: Final = 15.0
"""Seconds of waiting that are not worth a word: an idle node starts a process in less."""
_HELD: Final = 10.0
"""Seconds that all of a node's GPUs are in use before they count as held by other work."""
_LONGEST_SILENCE: Final = 900.0
"""Seconds after which a node that lives, is free and does not answer is refused."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Question(Generic[Answer]):
    """A question that each node answers. `about`: what is checked by it, for messages.

    `needs_gpu`: whether the process must see a GPU of its node; it reserves as little of it as Ray can count.
    """

    about: str
    ask: Callable[..., Answer]
    arguments: tuple[object, ...] = ()
    needs_gpu: bool = False

    def sent_to(self, node: Mapping[str, Any]) -> Any:
        """Return the reference of a task that answers on this node."""
        task = ray.remote(num_cpus=0, num_gpus=LEAST_QUANTITY if self.needs_gpu else 0, max_retries=2)(self.ask)
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return task.options(scheduling_strategy=there).remote(*self.arguments)


def answers(
    question: Question[Answer], nodes: Sequence[Mapping[str, Any]], warn: Warn
) -> list[tuple[Mapping[str, Any], Answer]]:
    """Return the nodes, as of `ray.nodes`, with their answers, however long a busy node takes to start a process.

    A node that was lost meanwhile is left out. So is one whose GPUs are all held by other work, with a warning, where
    the question needs one: it cannot answer before they are free. Raises: InvalidInput, naming nodes, where the process
    fails, and where a node is free and lives, but has not answered after a quarter of an hour.
    """
    asked = _Asked(question, nodes)
    began, told = time.monotonic(), False
    while asked.is_open():
        waited = time.monotonic() - began
        if waited > _LONGEST_SILENCE:
            raise InvalidInput(
                f"{asked.open_nodes()} started no process within {_LONGEST_SILENCE:g} s to check {question.about}; see "
                "`ray status`, or take such nodes out of the cluster"
            )
        if waited > _QUIET and not told:
            told = True
            warn(f"waiting to check {question.about} on {asked.open_nodes()}; a busy node is slow to start a process")
        asked.look()
    if asked.held:
        warn(
            f"all GPUs of {_named(asked.held)} are held by other work, so that {question.about} is checked only by "
            "each trial that starts there"
        )
    return asked.answered


class _Asked(Generic[Answer]):
    """Nodes that were asked or are still to be asked."""

    def __init__(self, question: Question[Answer], nodes: Sequence[Mapping[str, Any]]) -> None:
        self._question = question
        self._open = {str(node["NodeID"]): node for node in nodes}
        self._tasks: dict[str, Any] = {}
        self._full_since: dict[str, float] = {}
        self.held: list[Mapping[str, Any]] = []
        self.answered: list[tuple[Mapping[str, Any], Answer]] = []

    def is_open(self) -> bool:
        """Return whether an answer is still to come."""
        return bool(self._open)

    def open_nodes(self) -> str:
        """Return the nodes that have not answered, in words."""
        return _named(self._open.values())

    def look(self) -> None:
        """Ask who can be asked, and take the answers that have come; returns after about `_LOOK` seconds."""
        full = self._full() if self._question.needs_gpu else frozenset()
        for name, node in self._open.items():
            if name not in self._tasks and name not in full:  # a task that waits would make an autoscaler start nodes
                self._tasks[name] = self._question.sent_to(node)
        self._drop_held(full)
        waiting = {task: name for name, task in self._tasks.items() if name in self._open}
        if not waiting:
            time.sleep(_LOOK if self._open else 0.0)
            return
        ended, unended = ray.wait([*waiting], num_returns=len(waiting), timeout=_LOOK)
        for task in ended:
            self._take(waiting[task], task)
        if unended:
            there = {node["NodeID"] for node in alive_nodes()}
            self._open = {name: node for name, node in self._open.items() if name in there}

    def _take(self, name: str, task: Any) -> None:
        node = self._open.pop(name)
        try:
            self.answered.append((node, ray.get(task)))
        except (NodeDiedError, LocalRayletDiedError, TaskUnschedulableError):
            return
        except RayError as error:
            if any(each["NodeID"] == name for each in alive_nodes()):
                cause = error.cause if isinstance(error, RayTaskError) else error
                words = f"{type(cause).__name__}: {reason_of(cause)}"
                raise InvalidInput(
                    f"checking {self._question.about} failed on {node_in_words(node)} ({words}); mend that node and "
                    "start Ray there anew, or take it out of the cluster"
                ) from error

    def _full(self) -> frozenset[str]:
        """Return the open nodes that have no GPU left; nodes unknown to Ray in this respect are left out."""
        left: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return frozenset(name for name in self._open if name in left and left[name].get("GPU", 0.0) < LEAST_QUANTITY)

    def _drop_held(self, full: frozenset[str]) -> None:
        """Give up the nodes that have been full for long. Their tasks are not cancelled; see `is_beyond_autoscaler`."""
        now = time.monotonic()
        self._full_since = {name: self._full_since.get(name, now) for name in full}
        for name, since in self._full_since.items():
            if now - since >= _HELD:
                self.held.append(self._open.pop(name))


def node_in_words(node: Mapping[str, Any]) -> str:
    """Return a node of `ray.nodes`, in words."""
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _named(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return the nodes in words, the first three by name."""
    words = [node_in_words(node) for node in nodes]
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


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
    question = Question("whether torch sees the GPUs", _missing_gpu, needs_gpu=True)
    blind = [
        f"trials reserve a GPU on {node_in_words(node)}, but {reason}; {_ALLOWED}"
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
        here = f"node {socket.gethostname()} ({own_address()})"
        raise UnfitNode(
            f"the trial reserves {reserved.gpus:g} GPU on {here}, but {reason}; {_ALLOWED}",
            ray.get_runtime_context().get_node_id(),
        )


def _missing_gpu() -> str | None:
    from dpsweep.workers.machine.devices import (
        missing_gpu,  # late: it imports torch, which the driver does not need for this
    )

    return missing_gpu()
