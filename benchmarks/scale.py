"""Cost of accounting large trials part by part, compared with reading and hashing the same files.

    python benchmarks/scale.py [--quick] [--json] [--task NAME] [--folder DIR]

`--json` prints one object per row, else a markdown table follows. Trials are synthetic: norms of 1e6 examples at 50
snapshots and of 1e7 at 12 (--quick: 1e5 at 10 and 1e6 at 4). They take 0.6 and 1.4 GB in a temporary folder. Each row
is measured in its own process, on a Ray cluster of this machine whose nodes have one CPU each.

- `ours_cpu_s`: CPU seconds of the parts and the driver, with tables and exact quantiles.
- `read_hash_cpu_s`: CPU seconds of reading and hashing the same norm files, in the same run and on the same nodes, all
  of them at once. `ratio`: ours_cpu_s over read_hash_cpu_s.
- `driver_mb`, `worker_mb`: peak memory of the driver, and of the largest worker.
- `efficiency`: summed time of the parts over (nodes times elapsed time from the first part to the merged result).

With fewer cores than nodes, computing cannot show how the queue scales. Rows named "... asleep" therefore replace each
part's computation by a sleep as long as a part took on one node, at least 0.1 s; everything else is unchanged. Each
node has slept through one part before the clock starts.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = str(Path(__file__).resolve().parents[1])
sys.path[0] = ROOT  # so that `benchmarks` is found wherever it starts

from dpsweep.accounting.jobs import parallel
from dpsweep.accounting.jobs.examples import (
    AccountingJob,
    Part,
    PartResult,
    PartwiseJob,
    Scatter,
    account_part,
    store_epsilons,
)
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting, EpsilonSummary
from dpsweep.accounting.jobs.user_accounting import account_users
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.epsilon_files import StoredEpsilons
from dpsweep.accounting.records.files import list_files, read_bytes
from dpsweep.accounting.records.part_files import PartFiles
from dpsweep.accounting.records.shards import NormShards, NormShardWriter, NormSnapshot
from dpsweep.accounting.records.traces import write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import write_users
from dpsweep.workers.machine.memory import peak_bytes

DELTA, STEPS_EACH, BOUND = 1e-8, 20, 50.0
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
LEAST_SLEEP = 0.1
PART = 65_536


@dataclass(frozen=True)
class Row:
    """One measurement; None for values that were not measured."""

    task: str
    examples: int
    snapshots: int
    nodes: int
    ours_cpu_s: float | None = None
    read_hash_cpu_s: float | None = None
    ratio: float | None = None
    driver_mb: float | None = None
    worker_mb: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True)
class Spent:
    """Cost of one part in its worker: CPU seconds, elapsed seconds, and the worker's peak memory so far in MB."""

    cpu: float
    wall: float
    megabytes: float


@dataclass(frozen=True)
class Size:
    """The size of a synthetic trial."""

    examples: int
    snapshots: int


SIZES = (Size(10**6, 50), Size(10**7, 12))
QUICK_SIZES = (Size(10**5, 10), Size(10**6, 4))
MANY = 40
"""Number of trials, of one part each, in the task ``many``."""


def write_trial(root: str, size: Size, seed: int = 0) -> None:
    """Store a synthetic trial: each example has a typical contribution, which falls in training; a tenth is clipped."""
    files, generator = TrialFiles(root), np.random.default_rng(seed)
    steps = STEPS_EACH * size.snapshots
    write_trace(files.trace, Trace(size.examples, (Segment(0, steps, PoissonSampling(0.01), 1.2),)))
    typical = generator.beta(1.0, 1.5, size.examples).astype(np.float32)
    ids, groups = np.arange(size.examples), generator.integers(0, 4, size.examples)
    with NormShardWriter(files.norms) as writer:
        for number, drift in enumerate(np.linspace(1.2, 0.6, size.snapshots, dtype=np.float32)):
            norms = typical * drift * generator.uniform(0.7, 1.3, size.examples).astype(np.float32)
            losses = generator.random(size.examples, dtype=np.float32) + np.float32(0.01)
            writer.write(NormSnapshot(number * STEPS_EACH, ids, groups, norms, np.minimum(norms, 1.0), losses))
        writer.complete()


def peak_megabytes() -> float:
    """Peak memory of this process so far, in MB."""
    return peak_bytes() / 2**20


def hashing_seconds(roots: Sequence[str], nodes: int) -> float:
    """CPU seconds to read and hash all norm files of these trials on all nodes, with the files in the page cache."""
    import ray

    files = [f"{norms}/{name}" for norms in (TrialFiles(root).norms for root in roots) for name in list_files(norms)]
    task = ray.remote(num_cpus=1)(_hashed)
    return sum(ray.get([task.remote(files[node::nodes]) for node in range(nodes)]))


def _hashed(paths: Sequence[str]) -> float:
    """CPU seconds to read and hash some files in this process."""
    begun = time.process_time()
    for path in paths:
        hashlib.sha256(read_bytes(path)).hexdigest()
    return time.process_time() - begun


@contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """A Ray cluster on this machine: a head without CPUs, and nodes of one CPU each."""
    os.environ.update(PYTHONPATH=ROOT, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")  # or else it listens on every interface
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    # workers do not import this file
    cloudpickle.register_pickle_by_value(sys.modules[Row.__module__])  # type: ignore[no-untyped-call]
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            started.add_node(num_cpus=1)
        started.wait_for_nodes()
        ray.init(started.address, log_to_driver=False, configure_logging=False)
        ray.get([ray.remote(num_cpus=1)(_warm).remote() for _ in range(nodes)])
        yield
    finally:
        ray.shutdown()
        started.shutdown()  # type: ignore[no-untyped-call]


def _warm() -> None:
    """Load what parts need (compiled code, and pandas, which pyarrow loads with its first table) in a worker.

    Takes long enough that every node starts a worker.
    """
    import pandas  # noqa: F401

    from dpsweep.accounting.individual import exact_composition  # noqa: F401

    time.sleep(2.0)


class Noted:
    """Accounts parts by ``work``, and stores the cost of each in ``folder``."""

    def __init__(self, work: Callable[..., Any], folder: str) -> None:
        self._work, self._folder = work, folder
        Path(folder).mkdir(parents=True, exist_ok=True)

    def __call__(self, job: PartwiseJob[Part, Any], part: Part) -> Any:
        begun, cpu = time.monotonic(), time.process_time()
        result = self._work(job, part)
        spent = Spent(time.process_time() - cpu, time.monotonic() - begun, peak_megabytes())
        name = f"{Path(job.root).name}-{type(job).__name__}-{part.part}.json"
        Path(self._folder, name).write_text(json.dumps(asdict(spent)))
        return result

    def spent(self) -> list[Spent]:
        """Return the cost of every part."""
        return [Spent(**json.loads(path.read_text())) for path in Path(self._folder).glob("*.json")]


@dataclass(frozen=True)
class Asleep:
    """Sleeps instead of computing a part, and returns ``result``, renumbered."""

    seconds: float
    result: PartResult

    def __call__(self, job: AccountingJob, part: PartFiles) -> PartResult:
        time.sleep(self.seconds)
        return replace(self.result, part=part.part, record=replace(self.result.record, part=part.part))


def job_of(root: str, method: str) -> AccountingJob:
    """Return a job that accounts the trial at ``root`` into a new folder."""
    folder = tempfile.mkdtemp(dir=root, prefix="epsilons-")
    return AccountingJob(root, DELTA, method, counting=Counting(BOUND), folder=folder)


@contextmanager
def queue_on(nodes: int, noted: Noted) -> Iterator[parallel.AccountingQueue]:
    """The queue of a new cluster, whose tasks call ``noted``."""
    with (
        cluster(nodes),
        mock.patch.object(parallel, "account_part", lambda job, part: noted(job, part)),  # Ray takes only functions
        parallel.AccountingQueue(1) as queue,
    ):
        yield queue


Whole = Callable[[AccountingJob, Scatter], EpsilonSummary]
"""Accounts everybody of a trial."""


def account(
    jobs: Sequence[AccountingJob], queue: parallel.AccountingQueue, whole: Whole = store_epsilons
) -> tuple[list[EpsilonSummary], float]:
    """Summaries of the jobs, all accounted at once, and the elapsed seconds of all together."""
    begun = time.monotonic()
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = [threads.submit(whole, job, queue.scatter) for job in jobs]
        return [each.result() for each in running], time.monotonic() - begun


def computed(
    roots: Sequence[str], size: Size, task: str, method: str, nodes: int, whole: Whole = store_epsilons
) -> Row:
    """Measure the accounting of the trials."""
    noted = Noted(account_part, tempfile.mkdtemp(dir=roots[0], prefix="spent-"))
    jobs = [job_of(root, method) for root in roots]
    with queue_on(nodes, noted) as queue:
        cpu = time.process_time()
        summaries, wall = account(jobs, queue, whole)
        for job, summary in zip(jobs, summaries, strict=True):
            CountedEpsilons(summary, StoredEpsilons(job.folder)).quantiles(QUANTILES)
        driver_cpu = time.process_time() - cpu
        hashing = hashing_seconds(roots, nodes)
    parts, driver = noted.spent(), peak_megabytes()
    ours = driver_cpu + sum(part.cpu for part in parts)
    return Row(
        task,
        size.examples,
        size.snapshots,
        nodes,
        ours,
        hashing,
        ours / hashing,
        driver,
        max(part.megabytes for part in parts),
        sum(part.wall for part in parts) / (nodes * wall),
    )


def asleep(roots: Sequence[str], size: Size, task: str, seconds: float, nodes: int) -> Row:
    """Measure the queue with parts that sleep. One part per node runs before, so that nodes have the function."""
    first = NormShards(TrialFiles(roots[0]).norms).files(0)
    result = account_part(job_of(roots[0], "rdp"), first)
    noted = Noted(Asleep(seconds, result), tempfile.mkdtemp(dir=roots[0], prefix="spent-"))
    with queue_on(nodes, noted) as queue:
        list(queue.scatter(job_of(roots[0], "rdp"), [first] * nodes))
        _, wall = account([job_of(root, "rdp") for root in roots], queue)
    ideal = seconds * len(noted.spent()) / nodes
    return Row(task, size.examples, size.snapshots, nodes, driver_mb=peak_megabytes(), efficiency=ideal / wall)


def apart(function: Callable[..., Row], *arguments: Any) -> Row:
    """Return the row that ``function`` measures in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def of_method(method: str, folder: Path, quick: bool) -> Iterator[Row]:
    """Yield the trials of both sizes: computed on 1 and 2 nodes, asleep on up to 8."""
    for size in QUICK_SIZES if quick else SIZES:
        root = [stored(folder, f"{size.examples}x{size.snapshots}", size)]
        for nodes in (1,) if quick else (1, 2):
            row = apart(computed, root, size, method, method, nodes)
            yield row
            if nodes == 1:
                parts = len(NormShards(TrialFiles(root[0]).norms).parts)
                each = max(LEAST_SLEEP, (row.ours_cpu_s or 0.0) / parts)
        for nodes in (2,) if quick else (1, 8):
            yield apart(asleep, root, size, f"{method} asleep", each, nodes)


def many_trials(folder: Path, quick: bool) -> Iterator[Row]:
    """40 trials of one part each: every node should be busy."""
    size = Size(4_000, 3)
    roots = [stored(folder, f"many-{number}", size, number) for number in range(MANY)]
    each = Size(size.examples * MANY, size.snapshots)
    if not quick:
        yield apart(computed, roots, each, f"{MANY} trials", "pld", 2)
    yield apart(asleep, roots, each, f"{MANY} trials asleep", 0.5, 2 if quick else 4)


def of_users(folder: Path, quick: bool) -> Iterator[Row]:
    """As many users as examples, each with one record somewhere: what sorting costs beside `pld`."""
    size = QUICK_SIZES[1] if quick else SIZES[0]
    root = stored(folder, f"{size.examples}x{size.snapshots}", size)
    users = np.random.default_rng(0).permutation(size.examples)
    write_users(TrialFiles(root).users, np.arange(size.examples), np.arange(size.examples), users, PART)
    for nodes in (1,) if quick else (1, 2):
        yield apart(computed, [root], size, "users", "pld", nodes, account_users)


def stored(folder: Path, name: str, size: Size, seed: int = 0) -> str:
    """Return the root of the trial ``name``, which is written unless it exists."""
    root = folder / name
    if not root.exists():
        write_trial(str(root), size, seed)
    return str(root)


TASKS: Mapping[str, Callable[[Path, bool], Iterator[Row]]] = {
    "rdp": lambda folder, quick: of_method("rdp", folder, quick),
    "pld": lambda folder, quick: of_method("pld", folder, quick),
    "many": many_trials,
    "users": of_users,
}


def markdown(row: Row) -> str:
    """Return a row of the table."""
    return "| " + " | ".join(_cell(value) for value in asdict(row).values()) + " |"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller trials, within two minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--task", choices=TASKS, action="append", help="only this task (repeatable)")
    parser.add_argument("--folder", type=Path, help="where trials are written, and found again; a temporary folder")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="dpsweep-scale-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not options.json:
        names = list(Row.__dataclass_fields__)
        print(f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}", sep="\n")
    try:
        for name in options.task or TASKS:
            for row in TASKS[name](folder, options.quick):
                print(json.dumps(asdict(row)) if options.json else markdown(row), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
