"""One connection for several sweeps that run in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from orchestration.execution.keeping import kept, kept_open


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
