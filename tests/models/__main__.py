"""Plan and run models that people bring, and say which train, by the generic path or not, and which are refused.

    python -m tests.models
    python -m tests.models --only Swin

The exit status is 1 when plan and run disagree about a model, or when one of them says something else than the table.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence

from tests.models.running import tried
from tests.models.table import FAMILIES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="models with this in their family or name")
    only = parser.parse_args(arguments).only
    chosen = [
        (family, name, each)
        for family, members in FAMILIES.items()
        for name, each in members.items()
        if only in family or only in name
    ]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verdicts, agreed, wrong = Counter[str](), 0, 0
    for family, name, each in chosen:
        began = time.process_time()
        with tempfile.TemporaryDirectory(prefix="models-") as folder:
            found = tried(name, each, folder)
        verdicts[found.planned] += 1
        agreed += found.agree
        print(f"{family:12} {name:42} {found.planned:12} {time.process_time() - began:5.1f} s  {found.reason[:160]}")
        if says := found.wrong(each):
            wrong += 1
            print(f"    WRONG: {says}")
        sys.stdout.flush()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"plan and run agree on {agreed} of {len(chosen)} models: {counts}")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
