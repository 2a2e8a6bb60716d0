"""Count the files that a reader enters, and returns to, who follows a run or a trial call by call.

    python -m benchmarks.walk [--steps 300] [--trail]

A small sweep runs in this process under `sys.setprofile`. A step is the first call of one function by another, both of
dpsweep, outside imports; comprehensions and lambdas belong to their function. A step enters a file if the step before
was in another one, and returns to it if it was entered before. ``--trail`` prints each entrance.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import dpsweep
from dpsweep.orchestration import pipeline
from dpsweep.workers.trials import trial

ROOT = Path(__file__).resolve().parents[1]

SWEEP = {
    "name": "walk",
    "data": "breast_cancer",
    "model": "logistic",
    "sampling": {"method": "poisson", "batch_size": 64},
    "epochs": 2,
    "clipping": ["none", "flat"],
    "privacy": {"target_epsilon": 3, "delta": 1e-5, "accountant": "rdp"},
}


class Walk:
    """The steps inside the first call of a function, each as its file and its function."""

    def __init__(self, walked: Callable[..., Any]) -> None:
        self.steps: dict[tuple[tuple[str, str], tuple[str, str]], None] = {}
        self.walked = walked
        self._open: list[tuple[str, str]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.steps:
            return self.walked(*arguments, **options)
        sys.setprofile(self._follow)
        try:
            return self.walked(*arguments, **options)
        finally:
            sys.setprofile(None)

    def _follow(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = _file(code.co_filename)
        if not name or (code.co_name.startswith("<") and code.co_name != "<module>"):
            return
        if event == "call":
            place = (name, code.co_name)
            if self._open and all(function != "<module>" for _, function in (*self._open, place)):
                self.steps.setdefault((self._open[-1], place))
            self._open.append(place)
        elif event == "return" and self._open:
            self._open.pop()


@functools.cache
def _file(name: str) -> str:
    """The path below the root of a file of dpsweep; "" of any other."""
    path = Path(name).resolve()
    inside = any(path.is_relative_to(ROOT / package) for package in ("accounting", "workers", "orchestration"))
    return str(path.relative_to(ROOT)) if inside else ""


def _print(title: str, walk: Walk, steps: int, trail: bool) -> None:
    places = [place for _, place in list(walk.steps)[:steps]]
    entered = [place for before, place in zip([("", ""), *places], places, strict=False) if before[0] != place[0]]
    counts = collections.Counter(name for name, _ in entered)
    most = ", ".join(f"{name} {count}" for name, count in counts.most_common(3))
    print(f"{title}: {len(places)} steps, {len(counts)} files, {len(entered) - len(counts)} returns; most: {most}")
    if trail:
        print(*(f"  {name} {function}" for name, function in entered), sep="\n")


def main() -> None:
    """Walk through a run, then through the first trial of another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--trail", action="store_true")
    options = parser.parse_args()
    for title, module, name in (("run", pipeline, "run_sweep"), ("trial", trial, "run_trial")):
        walk = Walk(getattr(module, name))
        setattr(module, name, walk)
        with tempfile.TemporaryDirectory() as folder:
            dpsweep.run(dict(SWEEP), output=folder + "/out", address="in-process", tracking_uri="none")
        _print(title, walk, options.steps, options.trail)
        setattr(module, name, walk.walked)


if __name__ == "__main__":
    main()
