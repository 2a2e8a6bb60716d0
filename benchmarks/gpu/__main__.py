"""Everything that waits for a GPU, in phases, within eight minutes; the findings are in gpu.json after each phase.

    benchmarks/on_gpu.sh [--device cuda] [--wheels FOLDER] [--seconds 480] [--phase NAME ...]
    benchmarks/on_gpu.sh --device cpu            the same phases, tiny: shows that nothing but the GPU is missing
    benchmarks/on_gpu.sh --pack FOLDER [--also ray]   collects wheels, on a machine with a network

The machine with the GPU needs CPython 3.12, torch 2.11 and no network; `--wheels` names the folder that `--pack`
filled, for the packages that it lacks. They are unpacked for this run, nothing is installed. gpu.json is written below
$OUT, or in the working directory: device, versions, every figure, and every failure with its traceback. Phases run one
after the other in their own processes. One that hangs, crashes or takes too long is ended and noted, and the next
one begins. The exit status is 0 if no phase failed, 1 if one did, and 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import pack
from benchmarks.gpu.phases import PHASES, SIZES
from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks/on_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a dry run")
    parser.add_argument("--wheels", type=Path, help="the folder that --pack filled; by default wheels, if it is there")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which nothing further begins")
    parser.add_argument("--phase", action="append", choices=[each.name for each in PHASES], help="only this one")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect wheels there, and do nothing else")
    parser.add_argument("--also", action="append", choices=pack.EXTRAS, default=[], help="wheels that are large")
    options = parser.parse_args()
    if not options.seconds > 0.0:
        parser.error(f"--seconds is {options.seconds:g}, but no phase begins without time; give more than 0")
    return options


def main() -> int:
    options = arguments()
    if options.pack is not None:
        return pack.collect(options.pack, options.also)
    if options.wheels is not None and not options.wheels.is_dir():
        print(f"--wheels is {options.wheels}, which is no folder; fill one by --pack FOLDER")
        return 2
    out = Path(os.environ.get("OUT", ".")) / "gpu.json"
    with tempfile.TemporaryDirectory(prefix="dpsweep-gpu-") as folder:
        site = pack.unpacked(options.wheels or ROOT / "wheels", Path(folder) / "site")
        sys.path[1:1] = site
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *site])
        if missing := pack.missing():
            print(
                f"Python {platform.python_version()} cannot import {', '.join(missing)}; collect wheels by --pack "
                "FOLDER, for CPython 3.12, and name it by --wheels"
            )
            return 2
        from benchmarks.gpu.runner import run_phases  # imports packages that are unpacked by now

        phases = [phase for phase in PHASES if phase.name in (options.phase or [each.name for each in PHASES])]
        report = Report(out, options.device, phases, ROOT)
        if report.unsaved is not None:
            print(f"{out.absolute()} cannot be written: {report.unsaved}; name another folder by OUT")
            return 2
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, _interrupt)
        size = SIZES["small" if options.device.partition(":")[0] == "cpu" else "full"]
        return run_phases(phases, report, options.device, size, options.seconds, Path(folder))


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
