"""An autoscaler starts the nodes that a sweep's work needs, and no others; node types are those of `cluster.yaml`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.execution.autoscaled import autoscaled_cluster
from tests.orchestration.execution.recorded_tasks import nodes_and_tasks
from tests.orchestration.execution.test_upkeep import trained_sweep
from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import PATIENCE, dpsweep, script
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small


def sweep(resources: dict[str, Any]) -> str:
    return small(
        clipping="individual",
        noise="constant",
        seeds=[0, 1],
        epochs=3,
        norms={"refreshes_per_epoch": 1, "rows_per_part": 64},
        accounting={"individual": "rdp", "resource": "accounting"},
        resources=resources,
        execution={"device": "cpu", "allow_cpu": True},
    )


TEXT = sweep({"gpus": 1, "labels": {"dpsweep": "train"}})
KEYS = list(keys_of(TEXT).values())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with autoscaled_cluster() as found:
        yield found


def kinds(address: str, folder: Path) -> Counter[str]:
    """How many nodes the autoscaler has started, by their label of `cluster.yaml`."""
    nodes = [node for node, _ in nodes_and_tasks(address, "account_part", folder)]
    return Counter(node["Labels"]["dpsweep"] for node in nodes if "dpsweep" in node["Labels"])


@pytest.mark.long
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("resources", "reserved"),
    [
        ({"gpus": 8, "labels": {"dpsweep": "train"}}, "1 CPU and 8 GPU and 1 label"),
        ({"gpus": 1, "labels": {"dpsweep": "account"}}, "1 CPU and 1 GPU and 1 label"),
    ],
    ids=["no type has as many", "no type has both"],
)
def test_what_the_autoscaler_cannot_start_is_refused(
    resources: dict[str, Any], reserved: str, address: str, tmp_path: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(sweep(resources))
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--address", address, **CLOSED)
    assert done.returncode == 2, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error:")]
    assert f"a trial reserves {reserved}" in line
    assert "and no autoscaler starts one that does" in line
    assert not kinds(address, tmp_path), "no node is started for a sweep that is refused"


@pytest.mark.long
def test_waiting_parts_start_cpu_nodes_and_no_gpu_node(address: str, tmp_path: Path) -> None:
    """No node but the head is there when a finished sweep is accounted again, to the same bits."""
    files = trained_sweep(tmp_path / "out", TEXT)
    done = dpsweep("account", files.root, "--address", address, "--json", **CLOSED)
    assert done.returncode == 0, done.stderr
    accounts = json.loads(done.stdout)["accounts"]
    assert [account["key"] for account in accounts] == KEYS
    for account in accounts:
        ours, theirs = (
            read_epsilons(each) for each in (f"{account['folder']}/epsilons", files.trial(account["key"]).epsilons)
        )
        np.testing.assert_array_equal(ours.upper, theirs.upper)
        np.testing.assert_array_equal(ours.lower, theirs.lower)
    started = kinds(address, tmp_path)
    assert (started["account"] >= 1, started["train"]) == (True, 0), started


ASKED = """
import sys
import ray
from dpsweep.orchestration.execution.nodes import is_beyond_autoscaler

ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
print(sum(is_beyond_autoscaler({"CPU": 1.0}) for _ in range(300)))
"""


@pytest.mark.long
def test_asking_for_what_there_is_leaves_the_process_alive(address: str, tmp_path: Path) -> None:
    """A task that is cancelled while it ends would end the process that asks, within some tens of calls."""
    said = tmp_path / "said"
    with script(ASKED, address, errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, answer) == (0, "0\n"), said.read_text()


@pytest.mark.long
def test_trials_with_a_gpu_start_gpu_nodes(address: str, tmp_path: Path) -> None:
    """They are not refused although no node has a GPU yet; their parts are accounted on CPU nodes."""
    (tmp_path / "sweep.yaml").write_text(TEXT)
    files = SweepFiles(str(tmp_path / "out"))
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", files.root, "--address", address, "--json", **CLOSED)
    assert done.returncode == 0, done.stderr
    undisturbed = run_undisturbed(parse_sweep(TEXT), tmp_path / "undisturbed")
    for key in KEYS:
        assert_same_trial(files.trial(key), undisturbed.trial(key), True)
    ran = Counter[str]()
    for node, tasks in nodes_and_tasks(address, "account_part", tmp_path):
        ran[node["Labels"].get("dpsweep", "head")] += tasks
    assert set(kinds(address, tmp_path)) == {"train", "account"}
    assert {kind for kind, tasks in ran.items() if tasks} == {"account"}, "parts run only where the resource is"
