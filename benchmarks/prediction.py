"""Compares the time that `dpsweep plan --probe` predicts for the steps of a sweep with that of its trials in a run.

    python benchmarks/prediction.py SWEEP.yaml... [--json]

Each sweep is probed, and then run in one process into a temporary folder, one trial after another. A run also takes
norms, evaluates and stores checkpoints, so trials take longer than their steps. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

COMMAND = (sys.executable, "-c", "from dpsweep.orchestration.commands.main import main; main()")


def answer(*arguments: str) -> dict[str, Any]:
    """Return the object that a command prints. Raises: CalledProcessError where it fails."""
    found: dict[str, Any] = json.loads(
        subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.PIPE).stdout
    )
    return found


def measured(sweep: str) -> dict[str, Any]:
    """Probe a sweep and run it; return seconds of all steps as predicted, and of all trials."""
    predicted = answer("plan", sweep, "--probe", "--json")["prediction"]["seconds"]
    with tempfile.TemporaryDirectory(prefix="dpsweep-prediction-") as folder:
        run = answer("run", sweep, "--output", f"{folder}/out", "--address", "in-process", "--json")
    return {"sweep": sweep, "steps": predicted, "trials": sum(trial["seconds"] for trial in run["trials"])}


def main() -> None:
    parser = argparse.ArgumentParser(description="what `dpsweep plan --probe` predicts beside what trials take")
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP.yaml")
    parser.add_argument("--json", action="store_true", help="one object per sweep")
    arguments = parser.parse_args()
    for sweep in arguments.sweeps:
        row = measured(sweep)
        line = f"{sweep}: predicted {row['steps']:.1f} s of steps, trials took {row['trials']:.1f} s"
        print(json.dumps(row) if arguments.json else line, flush=True)


if __name__ == "__main__":
    main()
