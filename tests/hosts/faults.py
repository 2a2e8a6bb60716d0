"""The table of faults: each in training, accounting and recording of a sweep, and what is left of it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.hosts.cluster import Cluster, Services, cluster, wait_for
from tests.hosts.network import Host, Network
from tests.hosts.sweeps import DIGESTS, RECORDED, Submitted, Watcher, answer, submitted, text_of

TRIALS: Final = 4
AWAY: Final = 25.0
"""Seconds that a service, a link or a node is away."""


@dataclass
class Place:
    """The hosts that faults are done to."""

    network: Network
    cluster: Cluster
    services: Services
    client: Host


def _mlflow(place: Place) -> None:
    place.services.kill("MLflow")
    time.sleep(AWAY)
    place.services.start_mlflow()


def _database(place: Place) -> None:
    place.services.kill("PostgreSQL")
    time.sleep(AWAY)
    place.services.start_database()


def _store(place: Place) -> None:
    place.services.pause("S3")
    time.sleep(AWAY)
    place.services.resume("S3")


def _link(place: Place) -> None:
    host, _ = place.cluster.nodes["n1"]
    place.network.cut(host)
    time.sleep(AWAY)
    place.network.join(host)


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


def _node(place: Place) -> None:
    host, _ = place.cluster.nodes["n1"]
    place.cluster.lose(host)
    time.sleep(AWAY)
    place.cluster.start_node("n1")


FAULTS: Final[Mapping[str, Callable[[Place], None]]] = {
    "MLflow": _mlflow,
    "PostgreSQL": _database,
    "S3": _store,
    "link": _link,
    "GCS": _gcs,
    "driver": _driver,
    "node": _node,
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


def _break(place: Place, watcher: Watcher, fault: str, stage: str) -> None:
    """Do the fault when the sweep is in the stage."""
    if stage == "training":
        watcher.wait(_is_training)
        FAULTS[fault](place)
    elif stage == "accounting":
        watcher.wait(_is_accounting)
        FAULTS[fault](place)
    else:
        watcher.wait(_is_almost_over)
        place.services.pause("MLflow")
        try:
            watcher.wait(_has_ended)
            if fault == "MLflow":
                place.services.resume("MLflow")
            FAULTS[fault](place)
        finally:
            if fault != "MLflow":
                place.services.resume("MLflow")


def _row(place: Place, fault: str, stage: str, expected: Mapping[str, str]) -> str:
    name = f"{fault.lower()}-{stage}"
    text, started = text_of(name, TRIALS), time.monotonic()

    def submit() -> Submitted:
        return submitted(place.client, place.cluster, place.services.environment, text, name, f"s3://bucket/{name}")

    sweep = submit()
    with Watcher(sweep) as watcher:
        _break(place, watcher, fault, stage)
    states = [ended(sweep)] if fault != "GCS" else []
    if fault == "GCS":  # the job was lost with the head
        sweep = submit()
        states = [ended(sweep)]
    return _told(place, sweep, fault, stage, states[-1], expected, time.monotonic() - started)


def ended(sweep: Submitted) -> str:
    """The state that the job ends in."""
    state = ""

    def is_over() -> bool:
        nonlocal state
        state = sweep.job_state()
        return state in ("SUCCEEDED", "FAILED", "STOPPED")

    wait_for(is_over, f"the job of {sweep.name} to end, which is {state}", 600.0)
    return state


def _told(
    place: Place,
    sweep: Submitted,
    fault: str,
    stage: str,
    state: str,
    expected: Mapping[str, str],
    seconds: float,
) -> str:
    environment = place.services.environment
    recorded = answer(place.client, RECORDED, sweep.name, **environment)
    found = answer(place.client, DIGESTS, sweep.name, **environment)
    same = sum(found.get(name) == digest for name, digest in expected.items())
    with Watcher(sweep) as watcher:
        failed = watcher.wait(lambda status: True)["counts"].get("failed", 0)
    equal = f"{same} of {len(expected)}" + (f", {len(found) - same} others" if len(found) > same else "")
    return (
        f"{fault:<11} {stage:<11} {state.lower():<10} {failed:>6} {recorded['finished']:>4} of {TRIALS:<4} "
        f"{','.join(recorded['parents']).lower():<10} {equal:<16} {seconds:5.0f} s"
    )


def run_table(network: Network, only: str) -> bool:
    """Run the cells whose names hold ``only``, and print a line for each; whether all are as they should be."""
    services = Services(network.add("services"))
    services.begin()
    made = cluster(network)
    for name in ("n1", "n2"):
        made.add(name, "--num-cpus=1")
    place = Place(network, made, services, network.add("client", **made.head.environment))
    print("undisturbed", file=sys.stderr, flush=True)
    undisturbed = (text_of("undisturbed", TRIALS), "undisturbed", "s3://bucket/undisturbed")
    reference = submitted(place.client, made, services.environment, *undisturbed)
    assert ended(reference) == "SUCCEEDED"
    expected = answer(place.client, DIGESTS, "undisturbed", **services.environment)
    assert expected, "norms and epsilons are stored"
    print("fault       stage       job        failed recorded  parent     norms equal", flush=True)
    print(_told(place, reference, "none", "-", "SUCCEEDED", expected, 0.0), flush=True)
    good = True
    for fault in FAULTS:
        for stage in STAGES:
            if only not in f"{fault}-{stage}".lower():
                continue
            try:
                line = _row(place, fault, stage, expected)
            except AssertionError as error:
                line, good = f"{fault:<11} {stage:<11} {error}", False
                _repair(place)
            print(line, flush=True)
            good = good and f"{TRIALS:>4} of {TRIALS}" in line and f"{len(expected)} of {len(expected)} " in f"{line} "
    return good


def _repair(place: Place) -> None:
    """Let the next cell begin with services that answer."""
    for name in ("MLflow", "S3"):
        if place.services.host.processes(*({"MLflow": ("mlflow",), "S3": ("moto.server",)}[name])):
            place.services.resume(name)
