"""One connection for several sweeps that run in turn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from dpsweep.orchestration.execution.shared_connection import kept, kept_open, opened_ahead


def connections(events: list[str]) -> Callable[[], AbstractContextManager[int]]:
    """Opens numbered connections, and notes when each is opened and closed."""

    @contextlib.contextmanager
    def opening() -> Iterator[int]:
        number = sum(event.startswith("opened") for event in events)
        events.append(f"opened {number}")
        try:
            yield number
        finally:
            events.append(f"closed {number}")

    return opening


def test_blocks_of_their_own_open_and_close_one_connection_each() -> None:
    events: list[str] = []
    for number in (0, 1):
        with kept(connections(events)) as found:
            assert found == number
    assert events == ["opened 0", "closed 0", "opened 1", "closed 1"]


def test_what_is_opened_first_is_kept_for_the_others_and_closed_at_the_end() -> None:
    events: list[str] = []
    with kept_open():
        assert events == [], "nothing is opened before it is needed"
        for _ in range(2):
            with kept(connections(events)) as found:
                assert found == 0
        events.append("end of the block")
    assert events == ["opened 0", "end of the block", "closed 0"]
    with kept(connections(events)) as found:
        assert found == 1, "a later run has a connection of its own"


def test_an_error_closes_it_and_nothing_is_kept() -> None:
    events: list[str] = []
    with pytest.raises(ValueError, match="lost"), kept_open(), kept(connections(events)):
        raise ValueError("lost")
    assert events == ["opened 0", "closed 0"]


def test_an_error_after_it_was_used_closes_it() -> None:
    events: list[str] = []

    def lost() -> None:
        with kept_open():
            with kept(connections(events)):
                pass
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        lost()
    assert events == ["opened 0", "closed 0"]


def test_a_block_within_another_keeps_what_that_one_keeps() -> None:
    events: list[str] = []
    with kept_open():
        with kept_open(), kept(connections(events)):
            pass
        assert events == ["opened 0"], "the outer block is not over"
        with kept(connections(events)) as found:
            assert found == 0
    assert events == ["opened 0", "closed 0"]


def test_what_is_opened_ahead_opens_beside_other_work_and_closes_with_the_block() -> None:
    events: list[str] = []
    other_work_done = threading.Event()

    @contextlib.contextmanager
    def slow() -> Iterator[int]:
        assert other_work_done.wait(10.0)
        with connections(events)() as number:
            yield number

    with opened_ahead(slow):
        events.append("other work")
        other_work_done.set()
        with kept(connections(events)) as found:
            assert found == 0, "it is waited for, and nothing else is opened"
        events.append("end of the block")
    assert events == ["other work", "opened 0", "end of the block", "closed 0"]


def test_what_is_opened_ahead_closes_where_nobody_has_asked_for_it() -> None:
    events: list[str] = []

    def refused() -> None:
        with opened_ahead(connections(events)):
            raise ValueError("the plan is refused")

    with pytest.raises(ValueError, match="refused"):
        refused()
    assert events == ["opened 0", "closed 0"]
    with kept(connections(events)) as found:
        assert found == 1, "a later run has a connection of its own"


def test_an_error_of_opening_ahead_is_that_of_the_one_who_asks() -> None:
    @contextlib.contextmanager
    def unable() -> Iterator[int]:
        raise ValueError("no memory")
        yield 0

    with opened_ahead(unable), pytest.raises(ValueError, match="no memory"), kept(unable):
        pytest.fail("nothing was opened")


def test_what_was_opened_ahead_is_closed_before_its_thread_ends() -> None:
    """Linux kills the processes of a Ray with the thread that started them."""
    lived = []

    @contextlib.contextmanager
    def opening() -> Iterator[None]:
        thread = threading.current_thread()
        yield
        lived.append(thread.is_alive())

    with opened_ahead(opening):
        pass
    assert lived == [True]
