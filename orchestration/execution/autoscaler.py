"""The nodes that the autoscaler of a Ray cluster may start. Ray has no public functions for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.worker import global_worker
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]  # generated

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records import parsed_json
from dpsweep.orchestration.sweeps.resources import LABEL

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
