"""Draw random traces, account for each, and say how far every claim is from the exact epsilon on either side.

    python -m tests.fuzz --traces 2000 --jobs 2
    python -m tests.fuzz --first 900 --traces 1000
    python -m tests.fuzz --seed 7 --only extreme
    python -m tests.fuzz --case 1234

What is found is printed as it is found. The exit status is 1 when an epsilon is understated, a lower bound overstated,
or a claim crashes, warns, or takes more than 10 s or 1 GiB; a claim that is loose by more than 5 % is a remark.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import partial

from tests.fuzz.cases import case_of
from tests.fuzz.judging import Outcome, judged_number
from tests.fuzz.table import as_dict, histogram, rows_of, table


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    indices = range(options.first, options.traces) if options.case is None else [options.case]
    chosen = [index for index in indices if options.only in case_of(options.seed, index).row]
    if not chosen:
        print(
            f"no case from {options.first} up to {options.traces}: no case has {options.only!r} in its kind; see the "
            "table of a run without --only",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    outcomes = _outcomes(options.seed, chosen, max(1, options.jobs))
    rows = rows_of(outcomes)
    if options.json:
        print(json.dumps([as_dict(row) for row in rows], indent=2))
    else:
        print(table(rows))
        print(histogram(rows))
        print(f"{len(outcomes)} traces of seed {options.seed} in {time.monotonic() - began:.0f} s")
    return 1 if any(finding for outcome in outcomes for finding in outcome.findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=int, default=2000, metavar="N", help="how many random traces (default: 2000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out those before it, to run portions")
    parser.add_argument("--seed", type=int, default=0, help="of all traces; each is drawn from it and its own number")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases with this in their kind")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="this case alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def _outcomes(seed: int, chosen: Sequence[int], jobs: int) -> list[Outcome]:
    one = partial(judged_number, seed)
    if jobs == 1:
        return [_told(outcome) for outcome in map(one, chosen)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return [_told(outcome) for outcome in pool.imap(one, chosen, chunksize=4)]


def _told(outcome: Outcome) -> Outcome:
    """The outcome, whose findings and loose claims are said at once: a run takes an hour."""
    for line in (*outcome.findings, *outcome.remarks):
        print(f"case {outcome.case.index} ({outcome.case.row}): {line}", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
