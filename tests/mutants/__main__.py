"""Plant each mutant in a copy of the checkout, and say which of them the tests notice.

    python -m tests.mutants --jobs 4
    python -m tests.mutants --only completion.py
    python -m tests.mutants --privacy
    python -m tests.mutants --list

The exit status is 1 when a mutant survives without a stated reason, cannot be planted, or is killed despite a reason.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.running import Outcome, copy_checkout, run_tests, try_mutant
from tests.mutants.table import MUTANTS
from tests.warm import FORKS, PRELOADED

OF_TESTS = ("dp_accounting.pld", "hypothesis", "mpmath", "torchvision")
"""Packages that many tests import."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    candidates = [mutant for mutant in MUTANTS if mutant.bug.privacy or not options.privacy]
    chosen = [mutant for mutant in candidates if options.only in f"{mutant.title} {mutant.bug.old}"]
    if not chosen:
        print(f"no mutant has {options.only!r} in its file, text or meaning; see --list", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(mutant.title for mutant in chosen))
        return 0
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # each job has one thread
    FORKS.set_forkserver_preload([*PRELOADED, *OF_TESTS])
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_checkout(Path(folder) / str(index)) for index in range(max(1, options.jobs))]
        unplanted = _shortest_first(copies[0], chosen)
        if unplanted is None:
            return 1
        outcomes = _tried(chosen, copies, unplanted)
    _print_summary(outcomes)
    print(f"{time.monotonic() - began:.0f} s with {len(copies)} jobs")
    return 0 if all(outcome.is_accepted for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="mutants with this in file, text or meaning")
    parser.add_argument("--privacy", action="store_true", help="only mutants that weaken or break privacy")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the checkout to work in at once")
    return parser


def _shortest_first(folder: Path, chosen: Sequence[Mutant]) -> dict[str, dict[str, float]] | None:
    """For each named test the seconds of its single tests, the shortest first: most mutants are then killed within a
    second.

    None if one fails without a mutant: its failure would prove nothing.
    """
    unplanted = {}
    for test in sorted({test for mutant in chosen for test in mutant.tests}):
        run = run_tests(folder, [test])
        print(f"{'passes' if run.status == 0 else 'fails':8} {sum(run.seconds.values()):4.0f} s  {test}", flush=True)
        if run.status != 0:
            print(run.output, f"{test} fails without a mutant; repair it first", sep="\n", file=sys.stderr)
            return None
        unplanted[test] = dict(sorted(run.seconds.items(), key=lambda each: each[1]))
    return unplanted


def _tried(
    chosen: Sequence[Mutant], copies: Sequence[Path], unplanted: Mapping[str, Mapping[str, float]]
) -> list[Outcome]:
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in copies:
        free.put(folder)

    def tried(mutant: Mutant) -> Outcome:
        folder = free.get()
        try:
            outcome = try_mutant(folder, mutant, unplanted)
        finally:
            free.put(folder)
        print(f"{outcome.verdict:8} {outcome.seconds:4.0f} s  {mutant.title}  [{outcome.said}]")
        sys.stdout.flush()
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(tried, chosen))


def _print_summary(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'package':15} {'mutants':>7} {'killed':>7} {'privacy':>8} {'killed':>7}")
    for package in [*sorted({outcome.mutant.package for outcome in outcomes}), "all"]:
        rows = [outcome for outcome in outcomes if package in (outcome.mutant.package, "all")]
        private = [outcome for outcome in rows if outcome.mutant.bug.privacy]
        print(f"{package:15} {len(rows):7} {_killed(rows):7} {len(private):8} {_killed(private):7}")
    for outcome in outcomes:
        if outcome.verdict != "killed":
            bug = outcome.mutant.bug
            print(f"\n{outcome.verdict}: {outcome.mutant.title}\n  - {bug.old}\n  + {bug.new}")
            print(f"  {bug.survives or outcome.said}")


def _killed(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.verdict == "killed" for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
