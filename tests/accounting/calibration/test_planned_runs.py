"""Calibrations of planned runs: each as if alone, whether in this process or in several."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dpsweep.accounting.calibration import planned_runs
from dpsweep.accounting.calibration.parameter_search import calibrate_noise_multiplier
from dpsweep.accounting.calibration.planned_runs import Calibration, TrialMechanism, solve_all
from dpsweep.accounting.errors import Unreachable
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.schedules import make_schedule, planned_trace
from dpsweep.accounting.mechanism.trace import PureRelease

RUN = TrialMechanism(make_schedule("exponential", 1.0, decay=0.05), PoissonSampling(0.05), 2_000, (), (), "estimate")


def asked(count: int) -> list[Calibration]:
    return [Calibration(RUN, 4 + number, 2.0 + number, 1e-5, "rdp") for number in range(count)]


def impossible() -> Calibration:
    spent = replace(RUN, releases=(PureRelease("selection", 5.0),))
    return Calibration(spent, 4, 2.0, 1e-5, "rdp")


def alone(each: Calibration) -> float:
    """By the functions that a calibration is made of, put together once more."""

    def run(sigma: float) -> object:
        schedule = make_schedule("exponential", sigma, decay=0.05)
        return planned_trace(schedule, PoissonSampling(0.05), each.epochs, 20, 2_000)

    return calibrate_noise_multiplier(run, each.target_epsilon, each.delta, each.accountant)  # type: ignore[arg-type]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes at any price; yields how many calibrations each was given."""
    started: list[int] = []
    answered = planned_runs._answered

    def counted(worker: subprocess.Popen[bytes], share: Sequence[Calibration]) -> list[float | None] | None:
        started.append(len(share))
        return answered(worker, share)

    monkeypatch.setattr(planned_runs, "_WORTH", -1.0)
    monkeypatch.setattr(planned_runs, "_answered", counted)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    return started


@pytest.mark.long
def test_processes_find_what_this_one_finds(workers: list[int]) -> None:
    calibrations = [*asked(5), impossible(), *asked(8)[5:]]
    found = solve_all(calibrations)
    assert sorted(workers) == [3, 3], "three were searched before it was known that processes pay"
    assert found == [None if each == impossible() else alone(each) for each in calibrations]
    with pytest.raises(Unreachable, match="is unreachable"):
        impossible().solve()


def test_what_a_lost_process_leaves_is_searched_here(workers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_runs, "_CODE", "import os; os.abort()")
    assert solve_all(asked(5)) == [alone(each) for each in asked(5)]
    assert sorted(workers) == [1, 1]


def test_a_few_short_searches_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert solve_all([]) == []
    assert len(solve_all(asked(6))) == 6


def test_what_a_process_imports_is_accounting_alone() -> None:
    wanted = "{'torch', 'ray', 'mlflow', 'dpsweep.workers'} & sys.modules.keys()"
    code = f"import sys, dpsweep.accounting.calibration.planned_runs; print(*({wanted}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_stored_noise_multiplier_must_meet_its_target_and_not_by_far() -> None:
    each = asked(1)[0]
    sigma = each.solve()
    assert each.is_solved_by(sigma)
    for other in (0.9 * sigma, 1.1 * sigma, 0.0, -1.0, float("nan"), float("inf")):
        assert not each.is_solved_by(other)


def test_an_interrupt_ends_the_processes(workers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They would go on for a quarter of an hour. A shell lets what it starts in the background ignore interrupts."""
    monkeypatch.setattr(planned_runs, "_CODE", "import time; time.sleep(900)")
    made, start = list[subprocess.Popen[bytes]](), planned_runs._started

    def kept() -> subprocess.Popen[bytes]:
        made.append(start())
        return made[-1]

    monkeypatch.setattr(planned_runs, "_started", kept)

    def interrupt() -> None:
        while len(workers) < 2:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_all(asked(6))
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    assert [each.wait() for each in made] == [-signal.SIGKILL] * 2
