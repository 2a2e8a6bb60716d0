"""Nodes that join later and do not share the storage: they are named, and no trial fails if there are others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestration.execution.recorded_tasks import nodes_and_tasks
from tests.orchestration.execution.three_nodes import CLOSED, three_nodes
from tests.orchestration.processes import PATIENCE, script
from tests.orchestration.sample_grids import small

SWEEP = small(clipping="flat", noise="constant", seeds=0)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found.address


BLIND = """
import sys
from pathlib import Path
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.backend import Opening
from dpsweep.orchestration.execution.on_ray import on_cluster
from dpsweep.orchestration.execution.shared_connection import own_connection
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.accounting.stored_trial import job_of, write_trial
from dpsweep.workers.own_code.imports import NO_CODE

address, folder, text = sys.argv[1:]
files = SweepFiles(folder)
trial = TrialFiles(f"{folder}/trials/one")
write_trial(trial.root)
parts = [NormShards(trial.norms).files(part) for part in (0, 1)]
with on_cluster(Opening(address, parse_sweep(text), files, NO_CODE, print, own_connection)) as backend:
    assert len(list(backend.scatter(job_of(trial.root, 1e-5), parts))) == 2
    Path(trial.trace).unlink()
    Path(files.probe).write_bytes(b"of another folder")
    try:
        list(backend.scatter(job_of(trial.root, 1e-6), parts))
    except InvalidInput as error:
        print(error)
"""
"""Accounts parts, and again as nodes do that have another folder of the same name."""


@pytest.mark.long
def test_nodes_that_do_not_share_the_storage_are_named_where_a_part_fails(address: str, tmp_path: Path) -> None:
    """Nodes may join after the storage was proven to be shared, and then take every part."""
    said = tmp_path / "stderr"
    with script(BLIND, address, tmp_path / "out", SWEEP, errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    assert "storage-probe was written here but cannot be read on 3 of 3 nodes (" in answer, said.read_text()
    assert "): it has other content there; choose an --output" in answer


LATER = """
JOINS = '''
import subprocess, sys
from ray._private.node import Node
from ray._private.parameter import RayParams

address, folder = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
joining = RayParams(redis_address=address, gcs_address=address, num_cpus=2, num_gpus=0, object_store_memory=10**8)
joining.update_if_absent(min_worker_port=0, max_worker_port=0, dashboard_port=None)
Node(joining, head=False)
sys.stdin.read()
'''
import os, signal, subprocess, sys, time
import ray
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.backend import Opening
from dpsweep.orchestration.execution.on_ray import on_cluster
from dpsweep.orchestration.execution.shared_connection import own_connection
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.accounting.stored_trial import job_of, write_trial
from tests.orchestration.processes import descendants
from dpsweep.workers.own_code.imports import NO_CODE

address, folder, text = sys.argv[1:]
files, warnings = SweepFiles(folder), []
trial = TrialFiles(f"{folder}/trials/one")
write_trial(trial.root, rows_per_part=2)
shards = NormShards(trial.norms)
parts = [shards.files(part) for part in shards.parts]
with on_cluster(Opening(address, parse_sweep(text), files, NO_CODE, warnings.append, own_connection)) as backend:
    command = ["unshare", "--mount", sys.executable, "-c", JOINS, address, folder]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, stderr=sys.stderr)
    while len(ray.nodes()) < 4 and node.poll() is None:
        time.sleep(0.1)
    blind = next((node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU") == 2), "none")
    results = [each for delta in (1e-5, 1e-6) for each in backend.scatter(job_of(trial.root, delta), parts)]
    for pid in (node.pid, *descendants(node.pid)):
        os.kill(pid, signal.SIGKILL)
print(blind, len(results), *warnings, sep="|", flush=True)
"""
"""Accounts 25 parts twice; one node, with half of the CPUs, sees an empty folder in place of the sweep's."""


@pytest.mark.long
def test_a_node_that_joins_without_the_storage_fails_no_trial(address: str, tmp_path: Path) -> None:
    """Its own mount hides the output. What fails there is accounted elsewhere, and nothing further goes there."""
    if subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("no mounts of its own can be given to a process here")
    said, out = tmp_path / "stderr", tmp_path / "out"
    with script(LATER, address, out, SWEEP, errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    blind, results, *warnings = answer.strip().split("|")
    assert results == "50", said.read_text()
    (warning,) = warnings
    assert "storage-probe was written by the driver but cannot be read on node" in warning
    ran = {node["NodeID"]: tasks for node, tasks in nodes_and_tasks(address, "account_part", tmp_path)}
    assert 1 <= ran[blind] <= 8, "only what was submitted before the first failed: twice as many as there are CPUs"
