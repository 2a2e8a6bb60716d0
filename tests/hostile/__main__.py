"""Feed every reader of files and command lines with hostile input, and say what was found.

    python -m tests.hostile --inputs 100000
    python -m tests.hostile --only traces --inputs 1000 --seed 7

The exit status is 1 when an input was answered with a traceback, with nothing within a minute of CPU time, or with too
small an epsilon.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.table import TARGETS
from tests.hostile.target import Tally, fed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--only", default="", choices=["", *(target.name for target in TARGETS)])
    parser.add_argument("--seed", type=int, default=0, help="of the first inputs; equal seeds give equal inputs")
    return parser


def _print_findings(tally: Tally) -> None:
    for place, shown in tally.findings.items():
        print(f"\nfinding: {place}\n{shown}\n")


if __name__ == "__main__":
    sys.exit(main())
