"""What is asked of nodes before a sweep starts: a slow node is waited for, and none passes because it is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestration.execution.three_nodes import CLOSED, three_nodes
from tests.orchestration.processes import PATIENCE, script

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found.address


PREFACE = """
import sys, time
from pathlib import Path
import ray
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution import nodes as asking
from dpsweep.orchestration.execution.cluster import check_versions, connected
from dpsweep.orchestration.execution.nodes import check_gpus
from dpsweep.orchestration.execution.nodes import alive_nodes
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

address, folder = sys.argv[1:]
on_gpu = parse_sweep(small(resources={"gpus": 0.5}))

def refused(check, *arguments):
    try:
        check(*arguments, lambda said: print("warning:", said))
    except InvalidInput as error:
        print("refused:", error)
    else:
        print("passed")

with connected(address, Path(folder) / "log"):
"""


def told(body: str, address: str, folder: Path) -> list[str]:
    """The lines that a script prints which is connected to the cluster."""
    said = folder / "stderr"
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    with script(PREFACE.lstrip() + indented, address, folder, errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said.read_text()
    return answer.splitlines()


SLOW = """
asking._QUIET = 0.5
def slow():
    time.sleep(3.0)
    return "late"
seen = asking.answers(asking.Question("what is slow", slow), alive_nodes(), lambda said: print("warning:", said))
print(*[answer for _, answer in seen])
refused(check_gpus, on_gpu)
asking._LONGEST_SILENCE = 1.0
refused(lambda warn: asking.answers(asking.Question("what is slow", slow), alive_nodes()[:1], warn))
"""


def test_a_slow_node_is_waited_for_with_a_word_and_refused_at_last(address: str, tmp_path: Path) -> None:
    """The check for GPUs used to pass after a minute without an answer, and every trial failed instead."""
    waiting, answered, *others = told(SLOW, address, tmp_path)
    assert waiting.startswith("warning: waiting to check what is slow on node ")
    assert waiting.endswith("; a busy node is slow to start a process")
    assert answered == "late late late"
    assert any(line.startswith("refused: trials reserve a GPU on node") for line in others)
    assert "started no process within 1 s to check what is slow; see `ray status`, or take such nodes out" in others[-1]


HELD = """
@ray.remote(num_cpus=0, num_gpus=1)
class Holder:
    def holds(self):
        return True

holder = Holder.remote()
ray.get(holder.holds.remote())
refused(check_gpus, on_gpu)
ray.kill(holder)
refused(check_gpus, on_gpu)
"""


def test_gpus_that_other_work_holds_are_told_from_slow_ones(address: str, tmp_path: Path) -> None:
    held, passed, refused = told(HELD, address, tmp_path)
    assert held.startswith("warning: all GPUs of node ")
    assert "are held by other work, so that whether torch sees the GPUs is checked only by each trial" in held
    assert passed == "passed"
    assert refused.startswith("refused: trials reserve a GPU on node "), "once they are free, the node answers"


BROKEN = """
def broken():
    raise OSError("no such library\\nmore")
refused(lambda warn: asking.answers(asking.Question("its versions", broken), alive_nodes()[:1], warn))
"""


def test_a_node_whose_process_fails_is_refused_in_one_line(address: str, tmp_path: Path) -> None:
    """The check of versions used to pass there."""
    (line,) = told(BROKEN, address, tmp_path)
    assert line.startswith("refused: checking its versions failed on node ")
    assert "(OSError: no such library more); mend that node and start Ray there anew, or take it out of" in line


CHECKS = """
import ray
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.cluster import check_resources
from dpsweep.orchestration.execution.nodes import check_gpus
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
some = [{"when": {"clipping": "flat"}, "gpus": 0.5}, {}]


def said_of(check, *arguments):
    try:
        check(*arguments)
    except InvalidInput as error:
        return str(error)
    return "passed"


print("told:", said_of(check_resources, {"a trial": {"CPU": 1.0, "GPU": 2.0}}))
print("told:", said_of(check_resources, {"a part": {"CPU": 1.0, "slots": 1.0}, "a trial": {"CPU": 1.0}}))
print("told:", said_of(check_gpus, parse_sweep(small(resources=some)), print))
print("told:", said_of(check_gpus, parse_sweep(small(resources=some, execution={"allow_cpu": True})), print))
"""


def test_what_no_node_has_and_gpus_that_torch_does_not_see_are_refused_in_words(tmp_path: Path) -> None:
    """Ray would wait for ever, or train on the CPU and keep others off the GPU that it counts."""
    with script(CHECKS, errors=tmp_path / "stderr", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a1" * 32) as process:
        assert process.stdout is not None
        told = [line.strip().removeprefix("told: ") for line in process.stdout if line.startswith("told: ")]
    assert len(told) == 4, (tmp_path / "stderr").read_text()
    two_gpus, slots, unseen, allowed = told
    assert "a trial reserves 1 CPU and 2 GPU, but no single node has that (at most 1 CPU and 1 GPU)" in two_gpus
    assert "a part reserves 1 CPU and 1 slots, but no single node has that (at most 1 CPU and 0 slots)" in slots
    for part in ("trials reserve a GPU on node ", "torch ", "driver", "allow_cpu: true"):
        assert part in unseen
    assert allowed == "passed"
