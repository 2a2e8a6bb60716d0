"""Search for the noise of many trials on the nodes of a running Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import ray
from ray.exceptions import RayError

from accounting.planning import Calibration, solved
from orchestration.execution.cluster import check_resources, connected

_JOINING: Final = 10.0
"""Seconds that nodes with a CPU have to join."""
_RETRIES: Final = 8
"""How often a calibration is repeated after its node was lost."""


@final
@dataclass(frozen=True)
class OnCluster:
    """A `Solver` that connects to the cluster at ``address`` when it is called, with a task for each calibration.

    log: file for what Ray would print.
    """

    address: str
    log: Path

    @property
    def at_once(self) -> int:
        """More than the cores of one machine; how many the cluster has, or would start, is not known before."""
        return 64

    def __call__(self, asked: Sequence[Calibration]) -> list[float | None]:
        """What a lost node leaves in the end is solved in this process.

        Raises: InvalidInput where no cluster answers, or none of its nodes has a CPU.
        """
        with connected(self.address, self.log):
            check_resources({"a calibration": {"CPU": 1.0}}, _JOINING)
            task = ray.remote(solved).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)
            pending = [task.remote(each) for each in asked]
            return [_result(each, reference) for each, reference in zip(asked, pending, strict=True)]


def _result(asked: Calibration, reference: Any) -> float | None:
    try:
        found: float | None = ray.get(reference)
    except RayError:
        return solved(asked)
    return found
