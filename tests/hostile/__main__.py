"""Feed every reader of files and command lines with hostile input, and say what was found.

    python -m tests.hostile --inputs 100000
    python -m tests.hostile --only traces --inputs 1000 --seed 7
    python -m tests.hostile --folders
    python -m tests.hostile --folders --second-user
    python -m tests.hostile --folders --full --jobs 8
    python -m tests.hostile --folders --commands run,delete --cells 500
    python -m tests.hostile --attacks
    python -m tests.hostile --endings
    python -m tests.hostile --races 20
    python -m tests.hostile --races 20 --second-user

TMPDIR=/dev/shm saves the disk.

With --folders, links, pipes, devices and more are planted in a sweep's folder, and commands run on it: every command
with every kind at one place of each role, which includes every kind at every place and every command with every place;
with --full, every command with every kind at every place. With --attacks, whole attacks are made, each with the command
that it is aimed at. With --races, parts of a sweep's folder change places with links while a command works; with
--second-user the folder's owner does that to somebody else. With --endings, each command that can take long is told to
end where it works or waits.

The exit status is 1 when an input was answered with a traceback, with nothing within a minute of CPU time, or with too
small an epsilon, when a command changed a file outside the folder, or ended late.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.attempts import Asked, Counts, tried
from tests.hostile.of_attacks import outcomes
from tests.hostile.of_endings import endings
from tests.hostile.of_folders import COMMANDS, KINDS
from tests.hostile.of_races import ONE, TWO, Users, races
from tests.hostile.table import TARGETS
from tests.hostile.target import Tally, fed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.folders:
        return _folders(options)
    if options.attacks:
        return _attacks()
    if options.races:
        return _races(options.races, TWO if options.second_user else ONE)
    if options.endings is not None:
        return _endings(options.endings)
    chosen = [target for target in TARGETS if options.only in target.name]
    share = -(-options.inputs // len(chosen))
    print(f"{'target':15} {'inputs':>8} {'accepted':>9} {'refused':>8} {'findings':>9} {'seconds':>8}")
    total = 0
    for target in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            tally = fed(target, share, options.seed, Path(folder))
        numbers = f"{tally.inputs:8} {tally.accepted:9} {tally.refused:8} {len(tally.findings):9}"
        print(f"{target.name:15} {numbers} {time.monotonic() - began:8.0f}")
        _print_findings(tally)
        sys.stdout.flush()
        total += len(tally.findings)
    return 1 if total else 0


def _folders(options: argparse.Namespace) -> int:
    """Print the table of commands by kinds: how many attempts were refused, and how many were harmless."""
    commands, kinds = options.commands.split(","), options.kinds.split(",")
    began = time.monotonic()
    asked = Asked(
        commands,
        kinds,
        options.full,
        options.cells,
        options.second_user,
        max(1, options.jobs),
        options.seed,
        options.first,
    )
    tally = tried(asked)
    print(f"{'refused/harmless':16} {' '.join(f'{kind:>16}' for kind in kinds)}")
    for command in commands:
        counts = [tally.counts.get((command, kind), Counts()) for kind in kinds]
        shown = [f"{each.refused}/{each.harmless}" for each in counts]
        print(f"{command:16} {' '.join(f'{each:>16}' for each in shown)}")
    wrong = [line for each in tally.counts.values() for line in each.wrong]
    told = Counter(line.partition(":")[0] for line in wrong)
    named = ", ".join(f"{told.pop(what, 0)} {what}" for what in WRONG)
    took = f"{time.monotonic() - began:.0f} s, {tally.cpu:.0f} s of CPU time"
    print(f"{tally.attempts} attempts in {took}: {named}, {told.total()} else wrong")
    print(f"{tally.pairs} of {tally.all_pairs} pairs of command, kind and place")
    for line in wrong:
        print(f"\n{line}")
    return 1 if wrong else 0


def _attacks() -> int:
    """Print a line for each attack and command."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for each in outcomes(Path(folder)):
            print(f"{each.verdict:9} {each.attack:40} {each.command:24.24} {each.line[:150]}", flush=True)
            wrong += each.verdict not in ("refused", "harmless")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _races(seconds: float, users: Users) -> int:
    """Print a line for each command: how often it was run, with which exit codes, and exchanges meanwhile."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for each in races(Path(folder), seconds, users):
            codes = ", ".join(f"{count} ended {code}" for code, count in sorted(each.codes.items(), key=str))
            print(f"{each.command:9} {codes}; {each.swaps} exchanges; {len(each.wrong)} wrong", flush=True)
            wrong += each.wrong
    print(f"{len(wrong)} wrong", *wrong, sep="\n\n")
    return 1 if wrong else 0


def _endings(only: str) -> int:
    """Print a line for each command that was told to end."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        for each in endings(Path(folder), only):
            verdict = "ended" if each.is_right else "WRONG"
            left = f"; left: {each.left}" if each.left else ""
            print(
                f"{verdict} {each.took:5.1f} s  {each.code}  {each.ending.where:25} {each.ending.command[:60]:60}{left}"
            )
            print(f"      {each.line[:160]}", flush=True)
            wrong += not each.is_right
    print(f"{wrong} wrong")
    return 1 if wrong else 0


WRONG = ("destroyed", "hung", "traceback", "repeated")
"""Verdicts that must not be. repeated: a forged epsilon was shown."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--only", default="", choices=["", *(target.name for target in TARGETS)])
    parser.add_argument("--attacks", action="store_true", help="make whole attacks, each with the command it aims at")
    parser.add_argument("--races", type=float, metavar="SECONDS", help="swap links in while a command works, for each")
    parser.add_argument(
        "--endings", nargs="?", const="", metavar="TEXT", help="end commands by SIGTERM; TEXT: some of them, A,B"
    )
    parser.add_argument("--folders", action="store_true", help="plant links, pipes and more in the folder of a sweep")
    parser.add_argument("--commands", default=",".join(COMMANDS), help="of --folders: some of the commands")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of --folders: some of what is planted")
    parser.add_argument("--full", action="store_true", help="of --folders: all that could be tried")
    parser.add_argument("--cells", type=int, help="of --folders: as many attempts, spread over all (default: all)")
    parser.add_argument("--first", type=int, default=0, help="of --folders: the number of the first attempt")
    parser.add_argument("--jobs", type=int, default=2, help="of --folders: attempts at a time")
    parser.add_argument(
        "--second-user", action="store_true", help="one user runs commands on another's folder (as root)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first inputs, or of the order of attempts")
    return parser


def _print_findings(tally: Tally) -> None:
    for place, shown in tally.findings.items():
        print(f"\nfinding: {place}\n{shown}\n")


if __name__ == "__main__":
    sys.exit(main())
