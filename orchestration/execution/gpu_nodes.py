"""Keep work that reserves no GPU off the nodes that have some, as long as other nodes can run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dpsweep.accounting.jobs.parallel import fitting
from dpsweep.orchestration.execution.nodes import alive_nodes, amounts_of

TRAINING_LABEL: Final = ("dpsweep", "train")
"""The label of GPU nodes in the cluster files of this project, by which nodes that join later are known too."""


def off_gpu_nodes(needs: Mapping[str, float], nodes: Sequence[Mapping[str, Any]] | None = None) -> dict[str, str]:
    """Return the label selector that keeps work off the nodes with GPUs; empty if it reserves one, or fits nowhere
    else.

    `needs`: amounts that the work reserves, labels included. `nodes`: as of `ray.nodes`; by default those that are
    alive.
    """
    there = alive_nodes() if nodes is None else nodes
    with_gpus = [node for node in there if node["Resources"].get("GPU", 0.0) > 0.0]
    name, value = TRAINING_LABEL
    others = [node for node in there if node not in with_gpus and node.get("Labels", {}).get(name) != value]
    if needs.get("GPU", 0.0) or not with_gpus or not any(fitting(amounts_of(node), needs) for node in others):
        return {}
    unlabelled = [node["NodeID"] for node in with_gpus if node.get("Labels", {}).get(name) != value]
    asks_for_label = any(each.startswith(f"label {name}=") for each in needs)
    return {
        **({"ray.io/node-id": f"!in({','.join(sorted(unlabelled))})"} if unlabelled else {}),
        **({name: f"!{value}"} if not asks_for_label else {}),
    }
