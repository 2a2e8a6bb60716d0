"""Compares the times that `dpsweep plan --probe` predicts for a sweep with the times of the run.

    python benchmarks/prediction.py SWEEP.yaml... [--json]

Each sweep is probed, and then run into a temporary folder with an embedded Ray. For the command and all processes that
it starts, the elapsed time, the CPU time and the time without other work are measured. The last is an estimate for
machines with other work. Each interval counts with its CPU time divided by the CPUs that the runnable threads could
have used, or in full if no thread is runnable. On an otherwise idle machine it is the elapsed time. Linux only: it
reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

COMMAND = (sys.executable, "-c", "from dpsweep.orchestration.commands.main import main; main()")
_GAP = 0.2
"""Seconds between samples."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """The processes of a command at one moment. at: seconds. used: CPU seconds so far. runnable: number of threads."""

    at: float
    used: float
    runnable: int


@dataclass(frozen=True)
class Row:
    """Seconds of one sweep as measured, and as predicted without other work and beside it. load: load average."""

    sweep: str
    predicted: float
    without_other_work: float
    predicted_beside: float
    elapsed: float
    predicted_cpu: float
    cpu: float
    load: float

    @property
    def difference(self) -> float:
        """Prediction minus time without other work, as a share of that time."""
        return self.predicted / self.without_other_work - 1.0


def without_other_work(samples: Iterable[Sample], cpus: int) -> float:
    """Return the seconds that the command would have taken if no other process had used a CPU.

    >>> alone = [Sample(0.0, 0.0, 1), Sample(1.0, 1.0, 1), Sample(1.0, 1.0, 0), Sample(3.0, 1.0, 0)]
    >>> without_other_work(alone, 2)
    3.0
    >>> halved = [Sample(0.0, 0.0, 4), Sample(1.0, 1.0, 4), Sample(2.0, 2.0, 4)]  # two CPUs, of which it got one
    >>> without_other_work(halved, 2)
    1.0
    """
    found, (before, *rest) = 0.0, samples
    for after in rest:
        lasted, used = after.at - before.at, after.used - before.used
        busy = used / min(max((before.runnable + after.runnable) / 2.0, 1.0), cpus)
        idle = lasted * ((before.runnable == 0) + (after.runnable == 0)) / 2.0
        found += min(max(busy, idle), lasted)
        before = after
    return found


def run(command: Iterable[str]) -> list[Sample]:
    """Run a command to its end. Raises: CalledProcessError where it fails."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(list(command), stdout=said, stderr=subprocess.STDOUT)
        samples, used = [Sample(time.perf_counter(), 0.0, 1)], dict[int, float]()
        while process.poll() is None:
            time.sleep(_GAP)
            runnable = 0
            for pid in _family(process.pid):
                used[pid], running = _of_process(pid, used.get(pid, 0.0))
                runnable += running
            samples.append(Sample(time.perf_counter(), sum(used.values()), runnable))
        said.seek(0)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, said.read())
    return samples


def _family(root: int) -> Iterator[int]:
    """Yield a process and all its descendants, with Ray's processes, which stay descendants of the process that started
    them.
    """
    parents = {
        pid: int(fields[1]) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (fields := _stat(pid))
    }
    level = [root]
    while level:
        yield from level
        level = [pid for pid, parent in parents.items() if parent in level]


def _of_process(pid: int, before: float) -> tuple[float, int]:
    """CPU seconds of a process and its number of runnable threads; (``before``, 0) if it has ended."""
    if not (fields := _stat(pid)):
        return before, 0
    try:
        threads = [_stat(f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        threads = []
    return (int(fields[11]) + int(fields[12])) / _TICKS, sum(thread[:1] == ["R"] for thread in threads)


def _stat(which: int | str) -> list[str]:
    """Return the fields of /proc/WHICH/stat after the name: state, parent, ...; empty if the process has ended."""
    try:
        return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def measured(sweep: str) -> Row:
    """Probe a sweep and run it. Raises: CalledProcessError where either fails."""
    probed = subprocess.run([*COMMAND, "plan", sweep, "--probe", "--json"], check=True, stdout=subprocess.PIPE)
    found = json.loads(probed.stdout)["prediction"]
    with tempfile.TemporaryDirectory(prefix="dpsweep-prediction-") as folder:
        samples = run([*COMMAND, "run", sweep, "--output", f"{folder}/out"])
    return Row(
        sweep=sweep,
        predicted=found["seconds"],
        without_other_work=without_other_work(samples, len(os.sched_getaffinity(0))),
        predicted_beside=found["beside_others"],
        elapsed=samples[-1].at - samples[0].at,
        predicted_cpu=3600.0 * found["cpu_hours"],
        cpu=samples[-1].used,
        load=os.getloadavg()[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="what `dpsweep plan --probe` predicts beside what happens")
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP.yaml")
    parser.add_argument("--json", action="store_true", help="one object per sweep")
    arguments = parser.parse_args()
    for sweep in arguments.sweeps:
        row = measured(sweep)
        if arguments.json:
            print(json.dumps({**asdict(row), "difference": row.difference}), flush=True)
            continue
        print(
            f"{row.sweep}: predicted {row.predicted:.0f} s, {row.without_other_work:.0f} s without other work "
            f"({row.difference:+.0%}); beside it predicted {row.predicted_beside:.0f} s, elapsed {row.elapsed:.0f} s; "
            f"CPU predicted {row.predicted_cpu:.0f} s, used {row.cpu:.0f} s; load {row.load:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
