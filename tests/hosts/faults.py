"""The table of faults: each in training, accounting and recording of a sweep, and what is left of it."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.hosts.cluster import Cluster, Services, cluster
from tests.hosts.network import Host, Network
from tests.hosts.sweeps import DIGESTS, RECORDED, Submitted, Watcher, answer, submitted, text_of

TRIALS: Final = 4
AWAY: Final = 25.0
"""Seconds that a service, a link or a node is away."""
_STOPPED_WITHIN: Final = 10.0
"""Seconds in which a driver that records ends when it is told to stop."""


@dataclass
class Place:
    """The hosts that faults are done to."""

    network: Network
    cluster: Cluster
    services: Services
    client: Host


@dataclass(frozen=True)
class Fault:
    """What is broken, and mended after `AWAY` seconds; without a mend it is over at once."""

    begin: Callable[[Place], None]
    mend: Callable[[Place], None] | None = None

    def do(self, place: Place, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Break, call ``meanwhile``, wait, and mend."""
        self.begin(place)
        meanwhile()
        if self.mend is not None:
            time.sleep(AWAY)
            self.mend(place)


def _cut(place: Place) -> None:
    place.network.cut(place.cluster.nodes["n1"][0])


def _join(place: Place) -> None:
    place.network.join(place.cluster.nodes["n1"][0])


def _gcs(place: Place) -> None:
    """Without Redis the cluster goes with it: it is started again, and the same command continues the sweep."""
    place.cluster.head.signal(signal.SIGKILL, "gcs_server")
    time.sleep(2.0)
    for host in (place.cluster.head, *(host for host, _ in place.cluster.nodes.values())):
        place.cluster.lose(host)
    place.cluster.start_head()
    for name in place.cluster.nodes:
        place.cluster.start_node(name)


def _driver(place: Place) -> None:
    assert place.cluster.head.signal(signal.SIGKILL, "main()", "drive"), "there is no driver"


def _lose_node(place: Place) -> None:
    place.cluster.lose(place.cluster.nodes["n1"][0])


FAULTS: Final[Mapping[str, Fault]] = {
    "MLflow": Fault(lambda place: place.services.kill("MLflow"), lambda place: place.services.start_mlflow()),
    "PostgreSQL": Fault(lambda place: place.services.kill("PostgreSQL"), lambda place: place.services.start_database()),
    "S3": Fault(lambda place: place.services.pause("S3"), lambda place: place.services.resume("S3")),
    "link": Fault(_cut, _join),
    "GCS": Fault(_gcs),
    "driver": Fault(_driver),
    "node": Fault(_lose_node, lambda place: place.cluster.start_node("n1")),
}


def _is_training(status: dict[str, Any]) -> bool:
    return bool(status["counts"].get("training", 0))


def _is_accounting(status: dict[str, Any]) -> bool:
    return bool(status["counts"].get("accounting", 0) + status["counts"].get("finished", 0))


def _is_almost_over(status: dict[str, Any]) -> bool:
    """Whether the last trials are about to end: MLflow is held from here on, so that recording is not over."""
    ended = status["counts"].get("finished", 0) + status["counts"].get("accounting", 0)
    return bool(ended >= status["trials"] - 1)


def _has_ended(status: dict[str, Any]) -> bool:
    return bool(status["counts"].get("finished", 0) == status["trials"])


STAGES: Final = ("training", "accounting", "recording")


def _break(place: Place, watcher: Watcher, fault: Fault, stage: str) -> None:
    """Do the fault when the sweep is in the stage."""
    if stage != "recording":
        watcher.wait({"training": _is_training, "accounting": _is_accounting}[stage])
        fault.do(place)
        return
    with _held(place, watcher) as release:
        fault.do(place, meanwhile=release)


@contextlib.contextmanager
def _held(place: Place, watcher: Watcher) -> Iterator[Callable[[], None]]:
    """Hold MLflow until all trials have ended, so that none is recorded by then; yields what lets it go on."""
    watcher.wait(_is_almost_over)
    place.services.pause("MLflow")
    try:
        watcher.wait(_has_ended)
        yield lambda: place.services.resume("MLflow")
    finally:
        place.services.resume("MLflow")


def _row(place: Place, name: str, stage: str, expected: Mapping[str, str]) -> tuple[str, bool]:
    called, started = f"{name.lower()}-{stage}", time.monotonic()
    sweep = _submitted(place, called)
    with Watcher(sweep) as watcher:
        _break(place, watcher, FAULTS[name], stage)
    if name == "GCS":  # the job was lost with the head
        sweep = _submitted(place, called)
    return _told(place, sweep, name, stage, expected, started)


def _submitted(place: Place, name: str) -> Submitted:
    text = text_of(name, TRIALS)
    return submitted(place.client, place.cluster, place.services.environment, text, name, f"s3://bucket/{name}")


def _stopped(place: Place, expected: Mapping[str, str]) -> tuple[str, bool]:
    """Stop a sweep while MLflow takes nothing, and record what is missing by the command that `stop` names."""
    sweep, started = _submitted(place, "stop-recording"), time.monotonic()
    with Watcher(sweep) as watcher, _held(place, watcher):
        began = time.monotonic()
        done = place.client.dpsweep("stop", sweep.output, "--address", place.cluster.dashboard, **sweep.environment)
        sweep.end()
        took = time.monotonic() - began
    print(f"stopped after {took:.0f} s: {' '.join(done.stdout.split())}", flush=True)
    command = done.stdout.partition("`dpsweep ")[2].partition("`")[0].split()
    assert command[:1] == ["record"], done.stdout + done.stderr
    recorded = place.client.dpsweep(*command, **sweep.environment)
    assert recorded.returncode == 0, recorded.stderr
    line, is_good = _told(place, sweep, "stop", "recording", expected, started, "STOPPED")
    return line, is_good and took < _STOPPED_WITHIN


def _told(
    place: Place,
    sweep: Submitted,
    fault: str,
    stage: str,
    expected: Mapping[str, str],
    started: float,
    ends: str = "SUCCEEDED",
) -> tuple[str, bool]:
    """The line of a sweep once it has ended, and whether nothing is missing in it."""
    state, environment = sweep.end(), place.services.environment
    seconds = time.monotonic() - started
    recorded = answer(place.client, RECORDED, sweep.name, **environment)
    found = answer(place.client, DIGESTS, sweep.name, **environment)
    same = sum(found.get(name) == digest for name, digest in expected.items())
    with Watcher(sweep) as watcher:
        failed = watcher.wait(lambda status: True)["counts"].get("failed", 0)
    equal = f"{same} of {len(expected)}" + (f", {len(found) - same} others" if len(found) > same else "")
    line = (
        f"{fault:<11} {stage:<11} {state.lower():<10} {failed:>6} {recorded['finished']:>4} of {TRIALS:<4} "
        f"{','.join(recorded['parents']).lower():<10} {equal:<16} {seconds:5.0f} s"
    )
    numbers = (failed, recorded["finished"], recorded["trials"], same, len(found))
    is_whole = numbers == (0, TRIALS, TRIALS, len(expected), len(expected))
    return line, is_whole and state == ends and recorded["parents"] == ["FINISHED"]


def run_table(network: Network, only: str) -> bool:
    """Run the cells whose names hold ``only``, and print a line for each; whether all are as they should be."""
    services = Services(network.add("services"))
    services.begin()
    made = cluster(network)
    for name in ("n1", "n2"):
        made.add(name, "--num-cpus=1")
    place = Place(network, made, services, network.add("client", **made.head.environment))
    print("undisturbed", file=sys.stderr, flush=True)
    reference = _submitted(place, "undisturbed")
    assert reference.end() == "SUCCEEDED"
    expected = answer(place.client, DIGESTS, "undisturbed", **services.environment)
    assert expected, "norms and epsilons are stored"
    print("fault       stage       job        failed recorded  parent     objects equal", flush=True)
    print(_told(place, reference, "none", "-", expected, time.monotonic())[0], flush=True)
    cells: dict[str, Callable[[], tuple[str, bool]]] = {
        f"{fault}-{stage}": functools.partial(_row, place, fault, stage, expected)
        for fault in FAULTS
        for stage in STAGES
    }
    cells["stop-recording"] = functools.partial(_stopped, place, expected)
    good = True
    for name, cell in cells.items():
        if only in name.lower():
            try:
                line, is_good = cell()
            except AssertionError as error:
                line, is_good = f"{name}: {error}", False
                _repair(place)
            print(line, "" if is_good else "  <- WRONG", flush=True)
            good = good and is_good
    return good


def _repair(place: Place) -> None:
    """Let the next cell begin with services that answer."""
    for name in ("MLflow", "S3"):
        place.services.resume(name)
