"""Work in the background: in order, bounded, and nothing after a failure."""

from __future__ import annotations

import threading
import time

import pytest

from dpsweep.accounting.records.shards import AT_MOST, Background


def fail() -> None:
    raise OSError("refused")


def test_work_is_done_in_order_while_the_caller_goes_on() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[int]()
    background = Background()

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        done.append(0)

    background.do(first)
    assert begun.wait(10)
    for number in range(1, AT_MOST):
        background.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [], "nobody waited"
    late = threading.Thread(target=lambda: background.do(lambda: done.append(AT_MOST)))
    late.start()
    late.join(0.2)
    assert late.is_alive(), "the queue is bounded"
    go_on.set()
    late.join(10)
    background.wait()
    assert done == list(range(AT_MOST + 1))
    background.close()


def test_a_failure_is_raised_by_every_later_call_and_nothing_follows_it() -> None:
    background, done = Background(), list[int]()
    background.do(fail)
    for _ in range(3):
        with pytest.raises(OSError, match="refused"):
            background.wait()
        with pytest.raises(OSError, match="refused"):
            background.do(lambda: done.append(1))
    background.close()
    assert done == []


def test_what_waits_behind_a_failure_is_not_begun() -> None:
    background, done, go_on = Background(), list[int](), threading.Event()

    def fail_late() -> None:
        assert go_on.wait(10)
        fail()

    background.do(fail_late)
    background.do(lambda: done.append(1))
    go_on.set()
    with pytest.raises(OSError, match="refused"):
        background.wait()
    background.close()
    assert done == []


def test_closing_finishes_what_has_begun_and_drops_the_rest() -> None:
    background, done, begun = Background(), list[int](), threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.2)
        done.append(0)

    background.do(slow)
    background.do(lambda: done.append(1))
    assert begun.wait(10)
    background.close()
    assert done == [0]
    background.close()
