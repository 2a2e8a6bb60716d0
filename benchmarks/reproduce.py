"""Train a sweep of sweeps/papers, or continue it, and store the numbers that docs/reproduction.md shows.

    python -m benchmarks.reproduce NAME [--output DIR] [--address in-process] [--from DIR] [--collect]

`DIR`, by default runs/NAME, is the folder of the sweep: an interrupted run is continued there. Trials train one after
the other in this process; with --address local, on an embedded Ray. `--collect` trains nothing and stores the results
in DIR; `--from` reuses trials that another sweep has trained. The results go to benchmarks/reproduction/NAME.json, and
`python -m docs.reproduction` writes the page from them. The data are read from $DPSWEEP_DATA.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # so that `benchmarks` is found wherever it starts

from dpsweep.workers.machine.memory import ALLOCATOR

if __name__ == "__main__" and not ALLOCATOR.items() <= os.environ.items():  # glibc reads them when a process starts
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})

import importlib.metadata

import dpsweep
from benchmarks.curves import curves_of
from benchmarks.measures import measured
from benchmarks.reproduced import Number, StoredDifference, StoredSetting, StoredSweep, over_runs, write_stored
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import TrialResult

SWEEPS = ROOT / "sweeps" / "papers"
CPU_SECONDS = "cpu_seconds.txt"
"""File in the folder of a sweep with the CPU seconds of the command so far; a resumed run adds to it."""
OVERALL = (
    *("epsilon", "noise_multiplier", "mean_squared_error", "steps", "seconds"),
    *("accuracy", "accuracy_change", "loss", "balanced_accuracy", "worst_group_accuracy", "unequal_cost"),
    *("accuracy_gap", "demographic_parity_difference", "equalized_odds_difference", "equal_opportunity_difference"),
    *("loss_correlation", "mean_example_epsilon", "median_example_epsilon", "release_epsilon"),
)
"""Columns of `Sweep.results` that are stored."""
BY_GROUP = ("accuracy", "accuracy_change", "loss", "true_positive_rate", "gradient_norm", "clipping_bias")
"""Columns of each group that are stored."""


def collect(stored: dpsweep.StoredSweep, name: str, cpu_seconds: float, sources: Sequence[str] = ()) -> StoredSweep:
    """Return the numbers of the finished trials, by setting. Intervals come from the sweep's last report.

    Raises: InvalidInput where no trial has finished.
    """
    files = SweepFiles(stored.folder)
    rows = [
        {str(key): value for key, value in row.items()} for row in stored.results(all_columns=True).to_dict("records")
    ]
    asked = [row for row in rows if row["asked"]]
    finished = [row for row in asked if row["status"] == "finished"]
    by_setting: dict[str, list[tuple[dict[str, Any], dict[str, float]]]] = defaultdict(list)
    for row in finished:
        found = measured(name, stored.trials[row["key"]], files.trial(row["key"]))
        numbers = dict(_of_row(row)) | {key: float(value) for key, value in found.items() if _is_known(value)}
        by_setting[row["setting.name"]].append((row, numbers))

    def curves(key: str) -> dict[str, tuple[float, ...]]:
        return curves_of(name, stored.trials[key], files.trial(key))

    if not finished:
        raise dpsweep.InvalidInput(f"no trial of {stored.folder} has finished; train it without --collect")
    results = (trial.result for trial in stored.trials.values())
    training = next(result.training for result in results if isinstance(result, TrialResult))
    splits = {row.get("labels.split_seed") for row in finished}
    overlap = training.test_size / training.train_size if len(splits) > 1 else 0.0
    settings = tuple(_setting(setting, runs, overlap, curves) for setting, runs in by_setting.items())
    return StoredSweep(
        sweep=name,
        command=" ".join(
            [f"python -m benchmarks.reproduce {name}", *(f"--from runs/{Path(each).name}" for each in sources)]
        ),
        version=importlib.metadata.version("dpsweep"),
        commit=_commit(),
        hardware=_hardware(),
        asked=len(asked),
        finished=len(finished),
        train_size=training.train_size,
        test_size=training.test_size,
        overlap=overlap,
        cpu_seconds=round(cpu_seconds),
        settings=settings,
        differences=tuple(_differences(files, settings)),
    )


def _differences(files: SweepFiles, settings: Iterable[StoredSetting]) -> Iterable[StoredDifference]:
    """Yield what the sweep's last report says of pairs of settings that cost the same."""
    costs = {setting.name: setting.parameters.get("epsilon") for setting in settings}
    for found in json.loads(Path(files.comparison).read_text())["differences"]:
        one, other, interval = found["one"], found["other"], found["interval"]
        if interval is not None and one in costs and other in costs and costs[one] == costs[other]:
            value, low, high = (_rounded(interval[end]) for end in ("value", "low", "high"))
            yield StoredDifference(one, other, found["metric"], value, low, high, found["verdict"])


def _is_known(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _of_row(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for column, value in row.items():
        group, _, metric = column.removeprefix("by_group.").rpartition(".")
        is_group = column.startswith("by_group.") and group and metric in BY_GROUP
        if (column in OVERALL or is_group) and _is_known(value):
            yield column, float(value)


def _setting(
    name: str,
    runs: list[tuple[dict[str, Any], dict[str, float]]],
    overlap: float,
    curves: Callable[[str], dict[str, tuple[float, ...]]],
) -> StoredSetting:
    """Return a setting from its runs. runs: row of `Sweep.results` and numbers of each. curves: of the trial with
    that key.
    """
    places = tuple((int(row["labels.seed"]), int(row.get("labels.split_seed") or 0)) for row, _ in runs)
    order = sorted(range(len(runs)), key=places.__getitem__)
    first = runs[order[0]][0]
    common = [key for key in runs[0][1] if all(key in numbers for _, numbers in runs)]
    return StoredSetting(
        name=name,
        parameters={
            column.partition(".")[2]: value
            for column, value in first.items()
            if column.startswith(("labels.", "parameters.")) and not _is_run(column) and not _is_missing(value)
        },
        runs=tuple(places[place] for place in order),
        numbers={
            key: _number(key, [runs[place][1][key] for place in order], first, [s for _, s in sorted(places)], overlap)
            for key in common
        },
        curves=curves(str(first["key"])),
    )


def _is_run(column: str) -> bool:
    return column.endswith(("seed", "split_seed"))


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _number(key: str, values: list[float], row: Mapping[str, Any], splits: list[int], overlap: float) -> Number:
    place = key.replace("by_group.", "setting.groups.", 1) if "." in key else f"setting.intervals.{key}"
    low, high = row.get(f"{place}.low"), row.get(f"{place}.high")
    values = [_rounded(value) for value in values]
    if _is_known(low) and _is_known(high):
        return Number(tuple(values), _rounded(low), _rounded(high), str(row["setting.covers"]))
    found = over_runs(values, splits, overlap)
    return found if found.low is None else Number(found.values, _rounded(found.low), _rounded(found.high or 0.0))


def _rounded(value: float) -> float:
    """``value`` rounded to six digits."""
    return float(f"{value:.6g}")


def _commit() -> str:
    """Return the last commit that changed the code that trains and accounts."""
    packages = ("accounting", "workers", "orchestration", "dpsweep")
    found = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--abbrev=10", "--format=%h", "--", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


def _hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one thread of {models[0] if models else platform.processor() or platform.machine()}"


def _spent(folder: Path) -> float:
    file = folder / CPU_SECONDS
    return float(file.read_text()) if file.exists() else 0.0


def train(name: str, folder: Path, address: str, sources: list[str]) -> None:
    """Train the sweep or continue it, and add the CPU time of this process and its children to `CPU_SECONDS`.

    Raises: InvalidInput for a sweep that cannot run, and where trials failed.
    """
    before = _spent(folder)
    try:
        swept = dpsweep.run(SWEEPS / f"{name}.yaml", output=folder, address=address, sources=sources)
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CPU_SECONDS).write_text(f"{before + sum(os.times()[:4]):.0f}\n")
    if swept.failed:
        raise dpsweep.InvalidInput(f"{len(swept.failed)} trials failed: {swept.failed[0].error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in SWEEPS.glob("*.yaml"))
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, help="the folder of the sweep (default: runs/NAME)")
    parser.add_argument("--address", default="in-process", help="as for dpsweep run")
    parser.add_argument("--from", dest="sources", action="append", default=[], help="as for dpsweep run")
    parser.add_argument("--collect", action="store_true", help="train nothing, store what the folder holds")
    arguments = parser.parse_args()
    folder = arguments.output or Path("runs") / arguments.name
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a run that is ended can be continued
    try:
        if arguments.collect:
            dpsweep.open(folder).report()
        else:
            train(arguments.name, folder, arguments.address, arguments.sources)
        found = collect(dpsweep.open(folder), arguments.name, _spent(folder), arguments.sources)
    except dpsweep.DpsweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    path = write_stored(found)
    print(
        f"{path.name}: {found.finished} of {found.asked} trials, {found.cpu_seconds:.0f} CPU s in all, "
        f"{time.monotonic() - start:.0f} s now; next: python -m docs.reproduction"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
