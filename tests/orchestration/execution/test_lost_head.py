"""A driver whose node is lost: its user is told, and the same command continues."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayError

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution import cluster
from dpsweep.orchestration.store.background import every
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.execution.three_nodes import CLOSED
from tests.orchestration.processes import PATIENCE, dpsweep, kill, script, start, wait_until
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small

HEAD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(cluster.address, cluster.head_node.all_processes["raylet"][0].process.pid, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A head that trains, until stdin closes; it prints its address and the process that makes it a node."""
SWEEP = small(clipping="flat", noise="constant", seeds=0, epochs=200)


@pytest.mark.long
def test_the_user_of_a_driver_that_ray_ends_is_told_and_the_same_command_continues(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (key,) = keys_of(SWEEP).values()
    files = SweepFiles(str(tmp_path / "out"))
    command = ("run", tmp_path / "sweep.yaml", "--output", files.root)
    with script(HEAD, errors=tmp_path / "stderr", **CLOSED) as head:
        assert head.stdout is not None
        address, raylet = next(line.split() for line in head.stdout if ":" in line)
        driver = start(*command, "--address", address, log=tmp_path / "log", **CLOSED)
        wait_until(lambda: exists(files.trial(key).checkpoint) or driver.poll() is not None, "a trial in the middle")
        kill(int(raylet))
        assert driver.wait(PATIENCE) == 1
        told = "error: this process was killed by a signal, or by Ray because its node or the head of the cluster was"
        wait_until(lambda: told in (tmp_path / "log").read_text(), "the line")
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("the same command continues")
    again = dpsweep(*command, "--address", "in-process")
    assert again.returncode == 0, again.stderr
    undisturbed = run_undisturbed(parse_sweep(SWEEP), tmp_path / "alone")
    assert_same_trial(files.trial(key), undisturbed.trial(key), True)


@pytest.mark.usefixtures("sigterm_interrupts")
def test_a_driver_ends_when_its_embedded_cluster_has_lost_its_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[list[dict[str, bool]] | RayError] = iter([[{"Alive": True}], RayError("no answer"), []])

    def alive_nodes() -> list[dict[str, bool]]:
        found = next(answers)
        if isinstance(found, RayError):
            raise found
        return found

    monkeypatch.setattr(cluster, "alive_nodes", alive_nodes)
    with pytest.raises(KeyboardInterrupt), every(0.01, cluster._look_for_node):
        time.sleep(PATIENCE)
    assert "was killed or stopped for long" in capsys.readouterr().err
