"""A sweep with a key on several nodes: each encrypts what it writes, and a node without the key gets no work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsweep.accounting.records.encryption import KEY_VARIABLE
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import dpsweep, script
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import small

NODES = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.readline()
del os.environ["DPSWEEP_KEY"]
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print("one more", flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A head without work and two workers with the key; after a line on stdin one more, without it."""
KEY = "c3" * 32
SWEEP = small(clipping=["flat", "individual"], noise="constant", seeds=0, epochs=2, accounting={"individual": "rdp"})
ENCRYPTED = b"dpsweep-encrypted-1\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with script(NODES, errors=tmp_path / "stderr", **CLOSED, DPSWEEP_KEY=KEY) as process:
        yield process


def says(nodes: subprocess.Popen[str], word: str) -> str:
    assert nodes.stdout is not None
    return next(line.strip() for line in nodes.stdout if word in line)


@pytest.mark.long
def test_every_node_encrypts_and_one_without_the_key_is_refused(
    nodes: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address = says(nodes, ":")
    (tmp_path / "sweep.yaml").write_text(SWEEP)

    def run(folder: str, **changes: str) -> subprocess.CompletedProcess[str]:
        output = tmp_path / folder
        arguments = ("run", tmp_path / "sweep.yaml", "--output", output, "--address", address, "--json")
        return dpsweep(*arguments, **CLOSED, **changes)

    done, files = run("out"), SweepFiles(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    again = dpsweep("account", files.root, "--delta", "1e-7", "--address", address, **CLOSED)
    assert again.returncode == 0, again.stderr
    paths = [path for path in Path(files.root).rglob("*") if path.is_file()]
    private = {path for path in paths if "private" in path.relative_to(files.root).parts}
    assert {path for path in paths if path.read_bytes().startswith(ENCRYPTED)} == private
    assert len(private) > 20
    assert not [path for path in paths if KEY.encode() in path.read_bytes()]

    undisturbed = run_undisturbed(parse_sweep(SWEEP), tmp_path / "undisturbed")
    for trial in json.loads(done.stdout)["trials"]:
        assert_same_trial(files.trial(trial["key"]), undisturbed.trial(trial["key"]), trial["private"])

    assert nodes.stdin is not None
    nodes.stdin.write("\n")
    nodes.stdin.flush()
    says(nodes, "one more")
    refused = run("refused")
    assert refused.returncode == 2, refused.stderr
    assert f"{KEY_VARIABLE} is set here, but not so on 1 of 4 nodes" in refused.stderr
    assert not list((tmp_path / "refused").rglob("private/*")), "nothing private was written"
    monkeypatch.delenv(KEY_VARIABLE)
    without = run("out")
    assert without.returncode == 2
    assert f"set {KEY_VARIABLE}" in without.stderr
