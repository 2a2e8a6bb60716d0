"""The table of faults: a sweep for each, broken while it trains, accounts and records; and what is left of it."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.hosts.cluster import Cluster, Services, cluster
from tests.hosts.network import Host, Network
from tests.hosts.sweeps import DIGESTS, RECORDED, Submitted, Watcher, answer, submitted, text_of

TRIALS: Final = 20
"""So many that training is not over when the second stage is broken."""
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


_END_THE_DRIVER: Final = ("GCS", "driver")
"""Faults after which another driver goes on: that of the next job, or of the same one."""


def _is_training(status: dict[str, Any]) -> bool:
    return bool(status["counts"].get("training", 0))


def _is_accounting(status: dict[str, Any]) -> bool:
    """Whether a trial is accounted while others are yet to end."""
    return bool(status["counts"].get("accounting", 0))


def _is_almost_over(status: dict[str, Any]) -> bool:
    """Whether the last trials are about to end: MLflow is held from here on, so that recording is not over."""
    ended = status["counts"].get("finished", 0) + status["counts"].get("accounting", 0)
    return bool(ended >= status["trials"] - 1)


def _has_ended(status: dict[str, Any]) -> bool:
    ended = status["counts"].get("finished", 0) + status["counts"].get("failed", 0)
    return bool(ended == status["trials"])


def _break_while_running(place: Place, sweep: Submitted, name: str, holds: Callable[[dict[str, Any]], bool]) -> str:
    """Do the fault at the first status for which ``holds``, and wait for the driver that goes on; returns that
    status in words.
    """
    with Watcher(sweep) as watcher:
        found = watcher.wait(holds)
        FAULTS[name].do(place)
        if name == "GCS":  # the job was lost with the head
            _submitted(place, sweep.name)
        if name in _END_THE_DRIVER:
            watcher.wait(lambda status: bool(status["pid"] != found["pid"]))
    return _in_words(found)


def _break_while_recording(place: Place, sweep: Submitted, name: str) -> str:
    """Do the fault when all trials have ended and MLflow was held; it goes on while the fault lasts."""
    with Watcher(sweep) as watcher, _held(place, watcher) as (found, release):
        FAULTS[name].do(place, meanwhile=release)
    if name == "GCS":
        _submitted(place, sweep.name)
    return _in_words(found)


def _in_words(status: dict[str, Any]) -> str:
    return ", ".join(f"{count} {state}" for state, count in status["counts"].items() if count)


@contextlib.contextmanager
def _held(place: Place, watcher: Watcher) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Hold MLflow until all trials have ended, so that not all are recorded by then; yields the status, and a function
    that lets it go on.
    """
    watcher.wait(_is_almost_over)
    place.services.pause("MLflow")
    try:
        yield watcher.wait(_has_ended), lambda: place.services.resume("MLflow")
    finally:
        place.services.resume("MLflow")


def _row(place: Place, name: str, expected: Results) -> tuple[str, bool]:
    called, started = name.lower(), time.monotonic()
    sweep = _submitted(place, called)
    for stage, holds in (("training", _is_training), ("accounting", _is_accounting)):
        print(f"  {name} in {stage}: {_break_while_running(place, sweep, name, holds)}", flush=True)
    print(f"  {name} in recording: {_break_while_recording(place, sweep, name)}", flush=True)
    return _told(place, sweep, name, expected, started)


def _submitted(place: Place, name: str) -> Submitted:
    text = text_of(name, TRIALS)
    return submitted(place.client, place.cluster, place.services.environment, text, name, f"s3://bucket/{name}")


def _stopped(place: Place, expected: Results) -> tuple[str, bool]:
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
    line, is_good = _told(place, sweep, "stop", expected, started, "STOPPED")
    return line, is_good and took < _STOPPED_WITHIN


@dataclass(frozen=True)
class Results:
    """What a sweep has left: digests of its objects with norms and epsilons, and of the numbers of its trials."""

    objects: Mapping[str, str]
    trials: Mapping[str, str]


def _results(place: Place, name: str) -> Results:
    found = answer(place.client, DIGESTS, name, **place.services.environment)
    return Results(found["objects"], found["trials"])


def _told(
    place: Place, sweep: Submitted, fault: str, expected: Results, started: float, ends: str = "SUCCEEDED"
) -> tuple[str, bool]:
    """The line of a sweep once it has ended, and whether nothing is missing in it."""
    state = sweep.end()
    seconds = time.monotonic() - started
    recorded = answer(place.client, RECORDED, sweep.name, **place.services.environment)
    found = _results(place, sweep.name)
    with Watcher(sweep) as watcher:
        failed = watcher.wait(lambda status: True)["counts"].get("failed", 0)
    line = (
        f"{fault:<11} {state.lower():<10} {failed:>6} {recorded['finished']:>4} of {TRIALS:<4} "
        f"{','.join(recorded['parents']).lower():<10} {_same(found.objects, expected.objects):<16} "
        f"{_same(found.trials, expected.trials):<16} {seconds:5.0f} s"
    )
    is_whole = (failed, recorded["finished"], recorded["trials"], found) == (0, TRIALS, TRIALS, expected)
    return line, is_whole and state == ends and recorded["parents"] == ["FINISHED"]


def _same(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    same = sum(found.get(name) == digest for name, digest in expected.items())
    return f"{same} of {len(expected)}" + (f", {len(found) - same} others" if len(found) > same else "")


def run_table(network: Network, only: Sequence[str] | None) -> bool:
    """Run the faults with these names, or all; print a line for each. Returns whether all are as they should be."""
    services = Services(network.add("services"))
    services.begin()
    made = cluster(network)
    for name in ("n1", "n2"):
        made.add(name, "--num-cpus=1")
    place = Place(network, made, services, network.add("client", **made.head.environment))
    print("undisturbed", file=sys.stderr, flush=True)
    started, reference = time.monotonic(), _submitted(place, "undisturbed")
    assert reference.end() == "SUCCEEDED"
    expected = _results(place, "undisturbed")
    assert expected.objects, "norms and epsilons are stored"
    assert len(expected.trials) == TRIALS
    print("fault       job        failed recorded  parent     objects equal    results equal", flush=True)
    print(_told(place, reference, "none", expected, started)[0], flush=True)
    rows: dict[str, Callable[[], tuple[str, bool]]] = {
        fault: functools.partial(_row, place, fault, expected) for fault in FAULTS
    }
    rows["stop"] = functools.partial(_stopped, place, expected)
    good = True
    for name, row in rows.items():
        if only is None or name.lower() in map(str.lower, only):
            try:
                line, is_good = row()
            except AssertionError as error:
                line, is_good = f"{name}: {error}", False
                _repair(place)
            print(line, "" if is_good else "  <- WRONG", flush=True)
            good = good and is_good
    return good


def _repair(place: Place) -> None:
    """Let the next sweep begin with services that answer."""
    for name in ("MLflow", "S3"):
        place.services.resume(name)
