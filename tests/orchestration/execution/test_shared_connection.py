"""Ray starts beside other work, and several sweeps that run in turn have one connection."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsweep.orchestration.execution.backend import Connect
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.execution.shared_connection import opened_ahead, own_connection, ray_ahead, shared
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, UserModule
from tests.orchestration.processes import PATIENCE, environment

SWEEP = """
name: ahead
data: {name: digits}
model: logistic
sampling: {method: poisson, batch_size: 64}
epochs: 1
clipping: [flat]
noise: constant
seeds: [0]
privacy: {target_epsilon: 3, delta: 1e-4}
"""
SCRIPT = """
import os, sys
from pathlib import Path
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
from dpsweep.orchestration.execution.shared_connection import ray_ahead
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE

def workers():
    return len(set(Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*/logs/worker-*.out")))

class Trial:
    def answer(self):
        return "asked"

with ray_ahead(parse_sweep(sys.argv[2]), sys.argv[1], EMBEDDED, NO_CODE) as connect:
    from dpsweep.orchestration.execution.cluster import connected
    with connected(EMBEDDED, Path(sys.argv[1], "log"), NO_CODE, connect):
        import ray
        before = workers()
        print(before, ray.get(ray.remote(num_cpus=1)(Trial).remote().answer.remote()), workers())
"""


def connections(events: list[str]) -> Connect:
    """Makes connections whose code has their number as its name, and notes when each is opened and closed."""

    @contextlib.contextmanager
    def connect(address: str, code: UserCode) -> Iterator[UserCode]:
        number = sum(event.startswith("opened") for event in events)
        events.append(f"opened {number}")
        try:
            yield numbered(number)
        finally:
            events.append(f"closed {number}")

    return connect


def numbered(number: int) -> UserCode:
    return UserCode((UserModule(str(number)),))


def test_what_is_opened_first_is_kept_for_the_others_and_closed_at_the_end() -> None:
    events: list[str] = []
    with shared(connections(events)) as connect:
        assert events == [], "nothing is opened before it is needed"
        for _ in range(2):
            with connect(EMBEDDED, NO_CODE) as found:
                assert found == numbered(0)
        events.append("end of the block")
    assert events == ["opened 0", "end of the block", "closed 0"]


def test_blocks_that_share_nothing_have_connections_of_their_own() -> None:
    events: list[str] = []
    for number in (0, 1):
        with shared(connections(events)) as connect, connect(EMBEDDED, NO_CODE) as found:
            assert found == numbered(number)
    assert events == ["opened 0", "closed 0", "opened 1", "closed 1"]


def test_an_error_after_it_was_used_closes_it() -> None:
    events: list[str] = []

    def lost() -> None:
        with shared(connections(events)) as connect:
            with connect(EMBEDDED, NO_CODE):
                pass
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        lost()
    assert events == ["opened 0", "closed 0"]


def test_what_could_not_be_opened_is_opened_by_the_next() -> None:
    events: list[str] = []
    failures = [ValueError("no memory")]

    @contextlib.contextmanager
    def unable_at_first(address: str, code: UserCode) -> Iterator[UserCode]:
        if failures:
            raise failures.pop()
        with connections(events)(address, code) as found:
            yield found

    with shared(unable_at_first) as connect:
        with pytest.raises(ValueError, match="no memory"), connect(EMBEDDED, NO_CODE):
            pytest.fail("nothing was opened")
        with connect(EMBEDDED, NO_CODE) as found:
            assert found == numbered(0)
    assert events == ["opened 0", "closed 0"]


def test_a_block_within_another_keeps_what_that_one_keeps() -> None:
    events: list[str] = []
    with shared(connections(events)) as outer:
        with shared(outer) as connect, connect(EMBEDDED, NO_CODE):
            pass
        assert events == ["opened 0"], "the outer block is not over"
        with outer(EMBEDDED, NO_CODE) as found:
            assert found == numbered(0)
    assert events == ["opened 0", "closed 0"]


def test_what_is_opened_ahead_opens_beside_other_work_and_closes_with_the_block() -> None:
    events: list[str] = []
    other_work_done = threading.Event()

    @contextlib.contextmanager
    def slow(address: str, code: UserCode) -> Iterator[UserCode]:
        assert other_work_done.wait(10.0)
        with connections(events)(address, code) as found:
            yield found

    with opened_ahead(slow, EMBEDDED, NO_CODE) as connect:
        events.append("other work")
        other_work_done.set()
        for _ in range(2):
            with connect(EMBEDDED, NO_CODE) as found:
                assert found == numbered(0), "it is waited for, and nothing else is opened"
        events.append("end of the block")
    assert events == ["other work", "opened 0", "end of the block", "closed 0"]


def test_what_is_opened_ahead_closes_where_nobody_has_asked_for_it() -> None:
    events: list[str] = []

    def refused() -> None:
        with opened_ahead(connections(events), EMBEDDED, NO_CODE):
            raise ValueError("the plan is refused")

    with pytest.raises(ValueError, match="refused"):
        refused()
    assert events == ["opened 0", "closed 0"]


def test_an_error_of_opening_ahead_is_that_of_the_one_who_asks() -> None:
    @contextlib.contextmanager
    def unable(address: str, code: UserCode) -> Iterator[UserCode]:
        raise ValueError("no memory")
        yield code

    with (
        opened_ahead(unable, EMBEDDED, NO_CODE) as connect,
        pytest.raises(ValueError, match="no memory"),
        connect(EMBEDDED, NO_CODE),
    ):
        pytest.fail("nothing was opened")


def test_what_was_opened_ahead_is_closed_before_its_thread_ends() -> None:
    """Linux kills the processes of a Ray with the thread that started them."""
    lived = []

    @contextlib.contextmanager
    def opening(address: str, code: UserCode) -> Iterator[UserCode]:
        thread = threading.current_thread()
        yield code
        lived.append(thread.is_alive())

    with opened_ahead(opening, EMBEDDED, NO_CODE):
        pass
    assert lived == [True]


@pytest.mark.long
def test_an_embedded_ray_starts_a_worker_when_one_is_asked_for(tmp_path: Path) -> None:
    """Those that Ray would start before, one per core, have not the variables that Tune gives its trials."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), SWEEP],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout == "0 asked 1\n"


def test_nothing_starts_for_a_sweep_in_this_process(tmp_path: Path) -> None:
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path / "out"), IN_PROCESS, NO_CODE) as connect:
        assert connect is own_connection, "what is opened is what is asked for"


def test_nothing_starts_before_the_plan_of_a_sweep_that_may_be_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with ray_ahead(parse_sweep(SWEEP), str(tmp_path), EMBEDDED, NO_CODE) as connect:
        assert connect is own_connection
