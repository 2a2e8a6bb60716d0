"""Sweeps that share a cluster: who begins a trial next, and who keeps off nodes with GPUs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.nodes import off_gpu_nodes
from dpsweep.orchestration.execution.turns import Entry, Turns, waits_before
from dpsweep.orchestration.store.limits import FIRST_COME, Turn
from tests.orchestration.processes import script

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
BOARD = """
import json
import time
import ray
from dpsweep.orchestration.execution import turns
from dpsweep.orchestration.execution.turns import Turns
from dpsweep.orchestration.store.limits import Turn
from dpsweep.orchestration.sweeps.sections import ResourceSettings

turns._LOOK = 0.0
ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
trial, on_gpu, impossible = (ResourceSettings(**given) for given in ({"cpus": 2}, {"cpus": 2, "gpus": 1}, {"cpus": 99}))
cpu = trial.amounts
low, high = Turns("low", Turn("ann", 0, None, 1.0)), Turns("high", Turn("bob", 5, None, 2.0))
said = []


@ray.remote(num_cpus=2)
class Trains:
    def ping(self):
        return None


running = Trains.remote()
ray.get(running.ping.remote())
while ray.available_resources().get("CPU", 0.0):
    time.sleep(0.1)
low.trains(1, [trial])
said.append(("alone", low.may_begin(cpu, 1, False), low.fits(cpu)))
high.trains(0, [trial])
said.append(("behind", low.may_begin(cpu, 1, False), high.may_begin(cpu, 0, False)))
high.trains(0, [impossible])
said.append(("impossible", low.may_begin(cpu, 1, False)))
high.trains(0, [])
said.append(("begun", low.may_begin(cpu, 1, False)))
high.leave()
said.append(("gone", low.may_begin(cpu, 1, False)))
needs_gpu = Turns("gpu", Turn("cid", 0, None, 3.0))
needs_gpu.trains(0, [on_gpu])
said.append(("gpu first", low.may_begin(cpu, 1, False), low.may_begin(cpu, 1, True)))
needs_gpu.leave()
first, second = Turns("first", Turn("dan", 0, 2, 4.0)), Turns("second", Turn("dan", 0, 2, 5.0))
first.trains(1, [trial])
second.trains(0, [trial])
said.append(("limit of the owner", first.may_begin(cpu, 1, False), second.may_begin(cpu, 0, False)))
first.trains(2, [trial])
said.append(("limit reached", first.may_begin(cpu, 2, False), low.may_begin(cpu, 1, False)))
first.trains(1, [])
said.append(("the next", second.may_begin(cpu, 0, False)))
print(json.dumps({name: values for name, *values in said}), flush=True)
"""


@pytest.mark.long
def test_the_board_of_a_cluster(tmp_path: Path) -> None:
    with script(BOARD, errors=tmp_path / "stderr", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a1" * 32) as process:
        assert process.stdout is not None
        lines = [line for line in process.stdout if line.startswith("{")]
    assert lines, (tmp_path / "stderr").read_text()
    assert json.loads(lines[0]) == {
        "alone": [True, 0],
        "behind": [False, True],
        "impossible": [True],
        "begun": [True],
        "gone": [True],
        "gpu first": [False, True],
        "limit of the owner": [True, False],
        "limit reached": [False, True],
        "the next": [True],
    }


def test_a_driver_whose_clock_is_off_counts_once_it_is_seen_to_live() -> None:
    own, other = Turns("own", FIRST_COME), Entry("other", FIRST_COME, renewed=time.time() - 3600.0)
    assert not own._is_fresh(b"other", other)
    assert not own._is_fresh(b"other", other), "it was killed long ago"
    assert own._is_fresh(b"other", replace(other, renewed=other.renewed + 5.0))
    assert own._is_fresh(b"new", replace(other, renewed=time.time() - 50.0)), "by clocks that agree"


def test_equal_sweeps_share_as_ray_places_them() -> None:
    first, second = Entry("a", Turn("ann", 0, None, 1.0), (CPU,)), Entry("b", Turn("bob", 0, None, 2.0), (CPU,))
    assert not waits_before(first, second, CPU, {"CPU": 0.0}, False)
    assert not waits_before(second, first, CPU, {"CPU": 0.0}, False)


@pytest.mark.parametrize(("priority", "most"), [(5000, None), (0, 0), (-5000, 1)])
def test_impossible_turns_are_refused(priority: int, most: int | None) -> None:
    with pytest.raises(InvalidInput, match=r"--priority|--max-concurrent"):
        Turn("ann", priority, most)


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> dict[str, object]:
    return {"NodeID": name, "Resources": resources, "Labels": labels or {}}


def test_work_without_a_gpu_keeps_off_nodes_with_some_while_others_can_run_it() -> None:
    plain, with_gpu = node("a", CPU=2.0), node("b", CPU=8.0, GPU=1.0)
    labelled = node("c", {"dpsweep": "train"}, CPU=8.0, GPU=1.0)
    assert off_gpu_nodes(CPU, [plain, with_gpu]) == {"ray.io/node-id": "!in(b)", "dpsweep": "!train"}
    assert off_gpu_nodes(CPU, [plain, labelled]) == {"dpsweep": "!train"}
    assert off_gpu_nodes(CPU, [plain]) == off_gpu_nodes(GPU, [plain, with_gpu]) == {}
    assert off_gpu_nodes(CPU, [with_gpu, labelled]) == {}, "nowhere else"
    assert off_gpu_nodes({"CPU": 4.0}, [plain, with_gpu]) == {}, "no other node is large enough"
    assert off_gpu_nodes(CPU, [plain, with_gpu], times=2)
    assert off_gpu_nodes(CPU, [plain, with_gpu], times=3) == {}, "of three ranks on nodes, one is left over"
    needs, own = {"CPU": 1.0, "label dpsweep=account": 1.0}, node("a", {"dpsweep": "account"}, CPU=2.0)
    assert off_gpu_nodes(needs, [own, with_gpu]) == {"ray.io/node-id": "!in(b)"}, "and the label that was asked for"
