"""``python -m tests.hosts faults``, ``teams`` and ``ranks``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.hosts.across import run_across
from tests.hosts.faults import run_table
from tests.hosts.network import network
from tests.hosts.teams import run_teams

_RUNS: Final = {"teams": run_teams, "ranks": run_across}


def main() -> None:
    """Run the table of faults, two teams on one cluster, or the ranks of a trial on two hosts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("what", choices=["faults", "teams", "ranks"])
    parser.add_argument("--only", nargs="+", help="names of faults, such as mlflow driver stop (default: all)")
    parser.add_argument("--keep", type=Path, help="a folder for the hosts' files, which is kept")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background of a shell too, the hosts must end
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="dps-hosts-") as folder:
        kept = given.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        kept.chmod(0o755)
        with network(kept.resolve()) as made:
            good = run_table(made, given.only) if given.what == "faults" else _RUNS[given.what](made)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
