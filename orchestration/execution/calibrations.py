"""Calibrate the noise multipliers of many trials on the nodes of a running Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import ray
from ray.exceptions import RayError

from dpsweep.accounting.calibration.planned_runs import Calibration, solved
from dpsweep.orchestration.execution.cluster import check_resources, connected

_JOIN_TIMEOUT: Final = 10.0
"""Seconds to wait for a node with a CPU to join the cluster."""
_RETRIES: Final = 8
"""Most repetitions of a calibration whose node was lost."""


@final
@dataclass(frozen=True)
class OnCluster:
    """A `Solver` that connects to the cluster at ``address`` when called and runs one Ray task per calibration.

    log: file for Ray's log, which would otherwise go to the terminal.
    """

    address: str
    log: Path

    @property
    def at_once(self) -> int:
        """More than one machine has cores; the size of the cluster is unknown before connecting."""
        return 64

    def __call__(self, asked: Sequence[Calibration]) -> list[float | None]:
        """Solve on the cluster; calibrations whose nodes are lost too often are solved in this process.

        Raises: InvalidInput if no cluster answers, or none of its nodes has a CPU.
        """
        with connected(self.address, self.log):
            check_resources({"a calibration": {"CPU": 1.0}}, _JOIN_TIMEOUT)
            task = ray.remote(solved).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)
            pending = [task.remote(each) for each in asked]
            return [_result(each, reference) for each, reference in zip(asked, pending, strict=True)]


def _result(asked: Calibration, reference: Any) -> float | None:
    try:
        found: float | None = ray.get(reference)
    except RayError:
        return solved(asked)
    return found
