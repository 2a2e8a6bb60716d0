"""What is fed with hostile input, and what must never come of it."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dpsweep.accounting.errors import DpsweepError

LIMIT_S: Final = 60.0
"""An input that takes more CPU time hangs, as does one that waits for `_PATIENCE` times as long."""
_PATIENCE: Final = 10.0
_AT_ONCE: Final = 500
"""Inputs between two seeds: a finding ends its share only."""


class Hang(BaseException):
    """An input took longer than `LIMIT_S`; no handler of errors catches it."""


@dataclass(frozen=True)
class Target:
    """A reader of input that others may have written.

    inputs: what it is fed with. feed: reads one, given a folder for its files. It returns when the input was accepted
    and means what it says, raises `DpsweepError` when it was refused, and anything else is a finding. warm: called
    once before.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    feed: Callable[[Any, Path], None]
    warm: Callable[[], None] = lambda: None


@dataclass
class Tally:
    """What became of the inputs. findings: by their last line, with the smallest input that shows each."""

    accepted: int = 0
    refused: int = 0
    findings: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        return self.accepted + self.refused


def fed(target: Target, inputs: int, first_seed: int, folder: Path) -> Tally:
    """Feed ``target`` with ``inputs`` inputs, alike for equal seeds."""
    target.warm()
    tally = Tally()
    share = first_seed
    while tally.inputs < inputs:
        _feed_some(target, min(_AT_ONCE, inputs - tally.inputs), share, folder, tally)
        share += 1
    return tally


def _feed_some(target: Target, inputs: int, share: int, folder: Path, tally: Tally) -> None:
    @seed(share)
    @settings(
        max_examples=inputs,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(given_input=target.inputs)
    def feed(given_input: Any) -> None:
        try:
            with limited(LIMIT_S):
                target.feed(given_input, folder)
        except DpsweepError as error:
            tally.refused += 1
            if not str(error).strip():
                raise AssertionError("an error says nothing") from error
        except Hang as error:
            tally.refused += 1
            error.add_note(f"given_input={given_input!r}")  # hypothesis ends here, without shrinking
            raise
        except Exception:
            tally.refused += 1
            raise
        else:
            tally.accepted += 1

    try:
        feed()
    except (Exception, Hang) as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        tally.findings[_place(error)] = f"{notes}\n{''.join(traceback.format_exception(error))[-4000:]}"


def _place(error: BaseException) -> str:
    """What tells one finding from another: type, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/hypothesis/" not in frame.filename]
    last = (own or frames)[-1]
    return f"{type(error).__name__} in {last.name} ({Path(last.filename).name}:{last.lineno})"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Hang` in this block after ``seconds`` of CPU time, or `_PATIENCE` times as long.

    Timers of others, as pytest-timeout's, go on afterwards.
    """

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end after {seconds:g} s of CPU time, or {_PATIENCE * seconds:g} s")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, _PATIENCE * seconds))
    handlers = [signal.signal(number, hang) for _, number, _ in timers]
    left = [signal.setitimer(timer, limit)[0] for timer, _, limit in timers]
    try:
        yield
    finally:
        for (timer, number, _), handler, rest in zip(timers, handlers, left, strict=True):
            signal.setitimer(timer, rest)
            signal.signal(number, handler)
