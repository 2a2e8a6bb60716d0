"""Ranks on two hosts: as one rank, and to the same bits after one of the hosts was lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch

from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from tests.hosts.cluster import Cluster, cluster, wait_for
from tests.hosts.network import Network
from tests.orchestration.sample_grids import small

_DPSWEEP: Final = "from dpsweep.orchestration.commands.main import main; main()"
_FOUR: Final = {"cpus": 4, "ranks": 4, "ranks_on": "nodes"}


def run_across(network: Network) -> bool:
    """Run a trial on two hosts with two ranks each, on one rank, and with a host lost; print how they agree."""
    made = cluster(network, MLFLOW_TRACKING_URI="none")
    hosts = [made.add(name, "--num-cpus=2") for name in ("n1", "n2")]
    whole = _ended(made, "four", _begun(made, "four", _FOUR))
    alone = _ended(made, "one", _begun(made, "one", {"cpus": 1}))
    running = _begun(made, "lost", _FOUR)
    wait_for(lambda: len(_checkpoints(network, "lost")) == 1, "a checkpoint")
    first = _checkpoints(network, "lost")[0].stat().st_mtime_ns
    wait_for(lambda: any(file.stat().st_mtime_ns != first for file in _checkpoints(network, "lost")), "another one")
    ranks = [len(host.processes("_Rank")) for host in hosts]
    network.cut(hosts[1])  # else the kernel would tell the other ranks that their connections are closed
    made.lose(hosts[1])
    wait_for(lambda: not hosts[0].processes("_Rank"), "the end of the other ranks")
    network.join(hosts[1])
    made.start_node("n2")
    again = _ended(made, "lost", running)
    furthest = max(float((whole["model"][name] - alone["model"][name]).abs().max()) for name in alone["model"])
    same = all(torch.equal(whole["model"][name], again["model"][name]) for name in whole["model"])
    as_one = (whole["trace"], whole["epsilon"]) == (alone["trace"], alone["epsilon"])
    print(f"four ranks on two hosts against one rank: {furthest:.1e} at most in any weight")
    print(f"epsilon {whole['epsilon']} and {alone['epsilon']}; the same trace: {as_one}")
    print(f"a host lost with {ranks[1]} of {sum(ranks)} ranks: the same bits: {same}; starts: {again['starts']}")
    many = _begun(made, "many", {**_FOUR, "cpus": 6, "ranks": 6})
    refused = many.wait() == 2 and "6 ranks on nodes that have room for 4 together" in _said(made, "many")
    print(f"six ranks on four CPUs are refused: {refused}", flush=True)
    return furthest <= 1e-5 and as_one and same and ranks == [2, 2] and refused


def _begun(made: Cluster, name: str, resources: dict[str, object]) -> subprocess.Popen[bytes]:
    text = small(
        clipping={"name": "flat", "bound": 1.0},
        noise="constant",
        seeds=[0],
        epochs=40,
        norms={"refreshes_per_epoch": "off"},
        resources=resources,
    )
    folder = made.network.folder
    (folder / f"{name}.yaml").write_text(text)
    where = ("--address", f"{made.head.address}:6379", "--output", folder / name, "--json")
    return made.head.start(sys.executable, "-P", "-c", _DPSWEEP, "run", folder / f"{name}.yaml", *where, log=name)


def _said(made: Cluster, name: str) -> str:
    return (made.head.folder / name).read_text()


def _ended(made: Cluster, name: str, running: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert running.wait() == 0, _said(made, name)[-2000:]
    (folder,) = (made.network.folder / name / "trials").iterdir()
    files = TrialFiles(str(folder))
    model = torch.load(files.model, weights_only=True)
    starts = len([*(made.network.folder / name / "attempts").rglob("*.json")])
    epsilon = json.loads(Path(files.result).read_text())["worst_case"]["epsilon"]
    return {"model": model, "trace": read_trace(files.trace), "epsilon": epsilon, "starts": starts}


def _checkpoints(network: Network, name: str) -> list[Path]:
    return [*(network.folder / name).glob("trials/*/private/*heckpoint*")]
