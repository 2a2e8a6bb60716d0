"""A GPU that is reserved and not there, and what no node has, are refused before a sweep starts."""

from __future__ import annotations

from pathlib import Path

from tests.orchestration.processes import script

CHECKS = """
import ray
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.cluster import check_resources
from dpsweep.orchestration.execution.gpus import check_gpus
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
