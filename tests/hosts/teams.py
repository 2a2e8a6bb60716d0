"""Two teams on one cluster: a sweep on CPUs that fills it, and one of higher priority that needs a GPU."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from tests.hosts.cluster import cluster
from tests.hosts.network import Network
from tests.hosts.sweeps import Watcher, submitted, text_of

_FILLING: Final = 40
"""Trials of the first team: still many when the second one's driver has started."""
_PLACES = """
import json, os, sys
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import read_result
from dpsweep.accounting.records.files import list_files
found = []
root = sys.argv[1]
for key in sorted({name.split("/")[0] for name in list_files(root + "/trials")}):
    result = read_result(SweepFiles(root).trial(key).result)
    if result is not None:
        found.append([result.started, result.ended])
print(json.dumps(sorted(found)))
"""
"""Prints when each trial of a sweep started and ended."""


def run_teams(network: Network) -> bool:
    """Run both sweeps and print who trained when; whether the second began with the next free resources."""
    made = cluster(network)
    made.add("gpu", "--num-cpus=1", "--num-gpus=1")
    first, second = (network.add(name, **made.head.environment) for name in ("ann", "bob"))
    without = {"MLFLOW_TRACKING_URI": "none"}
    long = {"epochs": 60, "norms": {"refreshes_per_epoch": "off"}}
    on_gpu = {"resources": {"cpus": 1, "gpus": 0.5}, "execution": {"allow_cpu": True}}
    outputs = [str(network.folder / team / "exp1") for team in ("teamA", "teamB")]
    fills = submitted(first, made, without, text_of("exp1", _FILLING, **long), "exp1", outputs[0], "--owner", "ann")
    with Watcher(fills) as watcher:
        watcher.wait(lambda status: status["counts"].get("finished", 0) >= 1)
    asked, turn = time.time(), ("--owner", "bob", "--priority", "5")
    urgent = submitted(second, made, without, text_of("exp1", 2, **long, **on_gpu), "exp1", outputs[1], *turn)
    listed = second.dpsweep("list", "--address", made.dashboard)
    print(listed.stdout, flush=True)
    states = [urgent.end(), fills.end()]
    times = [_times(network, each.output) for each in (fills, urgent)]
    begins = [started for started, _ in times[1]]
    between = [started for started, _ in times[0] if begins and begins[0] < started < begins[-1]]
    ran = [ended for started, ended in times[0] if begins and started < begins[0] < ended]
    later = [started for started, _ in times[0] if begins and started > begins[-1]]
    for name, trials in zip(("exp1 of ann", "exp1 of bob"), times, strict=True):
        print(f"{name}: " + ", ".join(f"{start - asked:+.0f} to {end - asked:+.0f} s" for start, end in trials))
    print(f"jobs: {states}; trials of ann that began between bob's: {len(between)}; that ran on: {len(ran)}")
    print(f"trials of ann that began after bob's: {len(later)}; the test says something only if there are some")
    return states == ["SUCCEEDED", "SUCCEEDED"] and not between and bool(later) and len(times[0]) == _FILLING


def _times(network: Network, output: str) -> list[list[float]]:
    done = network.hosts["ann"].run(sys.executable, "-c", _PLACES, output)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Any = json.loads(done.stdout)
    return list(found)
