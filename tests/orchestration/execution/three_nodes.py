"""A cluster of three nodes on this machine, for tests of what runs on several."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.orchestration.processes import script

NODES = """
import sys
from ray.cluster_utils import Cluster
from tests.orchestration.processes import descendants, training_workers
cluster, made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}), {}

def join(**settings):
    made[cluster.add_node(**settings)] = settings

join(num_cpus=1, resources={"accounting": 2}, labels={"pool": "account"})
join(num_cpus=1, num_gpus=1, labels={"pool": "train", "ray.io/accelerator-type": "A100"})
cluster.wait_for_nodes()
print(cluster.address, flush=True)

def trains(node):
    return training_workers(descendants(node.all_processes["raylet"][0].process.pid))

for _ in sys.stdin:
    doomed = [node for node in cluster.worker_nodes if trains(node)][:1]
    for node in doomed:
        cluster.remove_node(node, allow_graceful=False)
        join(**made[node])
    print(len(doomed), flush=True)
cluster.shutdown()
"""
"""A head without work and two workers, each with a scheduler and object store of its own, until stdin closes. One of
them claims to have a GPU, which Ray counts, the other one has the custom resource of `deploy/`'s accounting nodes.

For every line, a node that trains is killed and another one like it joins; the answer is how many were killed.
"""
CLOSED = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a1" * 32,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on 127.0.0.1 only
    "RAY_prestart_worker_first_driver": "0",  # a driver brings an environment of its own, which such workers lack
}
"""A cluster that requires a token and is not to be reached from elsewhere, and starts workers when needed."""


@dataclass(frozen=True)
class Nodes:
    """The cluster that `NODES` started."""

    address: str
    process: subprocess.Popen[str]

    def lose_one_that_trains(self) -> bool:
        """Kill a node with a trial that trains, if there is one, and let another node like it join."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return next(int(line) for line in self.process.stdout if line.strip().isdigit()) == 1


@contextlib.contextmanager
def three_nodes(folder: Path) -> Iterator[Nodes]:
    """The cluster, until the block ends; what it says on stderr goes into the folder."""
    said = folder / "stderr"
    with script(NODES, errors=said, **CLOSED) as process:
        assert process.stdout is not None
        found = next((line.strip() for line in process.stdout if ":" in line), None)
        assert found is not None, said.read_text()
        yield Nodes(found, process)
