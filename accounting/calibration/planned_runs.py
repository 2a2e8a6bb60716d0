"""Planned runs, and the search for the noise multiplier with which each meets its target, in several processes.

These processes import this package alone, so that one starts in the time of a few searches.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.selection import before_choice
from dpsweep.accounting.calibration.parameter_search import calibrate_noise_multiplier
from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.filters import IndividualFilter, StepPrices
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, NoiseStrategy
from dpsweep.accounting.mechanism.samplings import Adjacency, Sampling
from dpsweep.accounting.mechanism.schedules import NoiseSchedule, planned_trace, with_initial
from dpsweep.accounting.mechanism.trace import Release, Selection, SideQuery, Trace
from dpsweep.accounting.mechanism.units import EXAMPLE, Unit


@dataclass(frozen=True)
class TrialMechanism:
    """Everything that the privacy cost of a trial depends on, except its length; see `Trace` for the fields.

    Planner and trainer share it. Its ``repr`` identifies checkpoints and stored calibrations.
    """

    schedule: NoiseSchedule
    sampling: Sampling
    dataset_size: int
    side_queries: tuple[SideQuery, ...]
    releases: tuple[Release, ...]
    contributions: Claim
    filter: IndividualFilter | None = field(default=None, repr=False)
    """The filter that the clipping method enforces; it is determined by the trial and the other fields."""
    adjacency: Adjacency | None = None
    selection: Selection | None = None
    unit: Unit = EXAMPLE
    strategy: NoiseStrategy = INDEPENDENT
    """How the noise of the steps is correlated, made for all steps of the longest run."""

    @property
    def words(self) -> str:
        """Words for batches and correlated noise in messages."""
        correlated = "" if self.strategy == INDEPENDENT else f" and {self.strategy.words}"
        return f"{self.sampling.words}{correlated}"

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch."""
        return self.sampling.steps_per_epoch

    def trace(self, epochs: int, public_accuracies: Sequence[float] = ()) -> Trace:
        """Trace of the first ``epochs`` epochs, given the public accuracies after each completed epoch."""
        planned = planned_trace(
            self.schedule,
            self.sampling,
            epochs,
            self.steps_per_epoch,
            self.dataset_size,
            self.side_queries,
            self.releases,
            public_accuracies,
            self.adjacency,
            self.unit,
        )
        contributions = "estimate" if planned.noise_follows_results else self.contributions
        return replace(
            planned,
            contributions=contributions,
            filter=self.filter,
            selection=self.selection,
            strategy=self.strategy,
        )

    def prices(self, noise_multiplier: float) -> StepPrices | None:
        """Return the cost of a step with that noise for an example; None without a filter."""
        return self.filter.prices(self.sampling.sample_rate, noise_multiplier) if self.filter else None


@dataclass(frozen=True)
class Calibration:
    """The search for the initial noise multiplier with which a run of ``epochs`` epochs meets a target."""

    run: TrialMechanism
    epochs: int
    target_epsilon: float
    delta: float
    accountant: str

    def trace(self, noise_multiplier: float) -> Trace:
        """Return the run with that noise, without an `ExponentialChoice`, whose cost does not depend on the noise."""
        run = replace(self.run, schedule=with_initial(self.run.schedule, noise_multiplier))
        return before_choice(run.trace(self.epochs))

    def solve(self) -> float:
        """Return the noise multiplier by `calibrate_noise_multiplier`. Raises: Unreachable when none meets the
        target.
        """
        return calibrate_noise_multiplier(self.trace, self.target_epsilon, self.delta, self.accountant)

    def is_solved_by(self, noise_multiplier: float) -> bool:
        """Return whether a noise multiplier read from a file meets the target and is not needlessly large."""
        if not 0.0 < noise_multiplier < math.inf:
            return False
        found = account(self.trace(noise_multiplier), self.delta, self.accountant).epsilon
        return _CLOSE * self.target_epsilon <= found <= self.target_epsilon


_CLOSE: Final = 0.99
"""Least share of the target that a stored calibration must reach. With less, the noise is larger than needed, and it is
searched again."""
_TRIED: Final = 3
"""Searches made before the time of the others is estimated, without the first, which also builds tables."""
_WORTH: Final = 6.0
"""Least number of seconds saved for which other processes are started: each takes 1 to 3 to start, on each core."""
_MOST_PROCESSES: Final = 16
_CODE: Final = "from dpsweep.accounting.calibration.planned_runs import _serve; _serve()"


class Solver(Protocol):
    """Solves calibrations elsewhere than in this process."""

    @property
    def at_once(self) -> int:
        """Largest number of calibrations that it solves at the same time."""

    def __call__(self, asked: Sequence[Calibration]) -> list[float | None]:
        """Return the result of `solved` for each calibration, in order."""


def solved(asked: Calibration) -> float | None:
    """Return the noise multiplier of a calibration; None if there is none, and `Calibration.solve` raises the
    reason.
    """
    try:
        return asked.solve()
    except DpsweepError:
        return None


@final
class Processes:
    """A `Solver` with one process per core of this machine."""

    @property
    def at_once(self) -> int:
        return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)

    def __call__(self, asked: Sequence[Calibration]) -> list[float | None]:
        """Solve the calibrations in processes; the share of a process that fails is solved in this one."""
        found, processes = list[float | None]([None] * len(asked)), min(self.at_once, len(asked))
        shares = [asked[first::processes] for first in range(processes)]
        workers = [_started() for _ in shares]
        with ThreadPoolExecutor(processes) as threads:
            try:
                answers = list(threads.map(_answered, workers, shares))
            except BaseException:  # an interrupt: nobody waits for what they find
                for worker in workers:
                    worker.kill()
                raise
        for first, (answer, share) in enumerate(zip(answers, shares, strict=True)):
            found[first::processes] = [solved(each) for each in share] if answer is None else answer
        return found


PROCESSES: Final = Processes()


def solve_all(asked: Sequence[Calibration], solver: Solver = PROCESSES) -> list[float | None]:
    """Return the result of `solved` for each calibration, in order.

    Solved one after the other in this process, or by ``solver`` if that would take much longer than to start others.
    """
    found, took = list[float | None](), list[float]()
    while len(found) < len(asked):
        begun = time.perf_counter()
        found.append(solved(asked[len(found)]))
        took.append(time.perf_counter() - begun)
        left = asked[len(found) :]
        at_once = min(solver.at_once, len(left))
        mean = sum(took[1:_TRIED]) / (_TRIED - 1)
        if len(found) == _TRIED and at_once > 1 and mean * len(left) * (1.0 - 1.0 / at_once) > _WORTH:
            return [*found, *solver(left)]
    return found


def _started() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **one_thread, "PYTHONPATH": path},
    )


def _answered(worker: subprocess.Popen[bytes], asked: Sequence[Calibration]) -> list[float | None] | None:
    """Return what a process has found; None if it failed."""
    answer, _ = worker.communicate(pickle.dumps(list(asked)))
    if worker.returncode:
        return None
    found: list[float | None] = pickle.loads(answer)
    return found


def _serve() -> None:
    """Solve the calibrations given on standard input and write the results to standard output."""
    asked: list[Calibration] = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps([solved(each) for each in asked]))
