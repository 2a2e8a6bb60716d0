"""Storage that is away or full, and memory that runs out, by real means: nothing is lost, and no bit changes."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpsweep.accounting.records.files import exists, list_files
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.orchestration.processes import PATIENCE, Running, dpsweep, start, wait_until
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small

pytestmark = pytest.mark.long

TEXT = small(
    clipping="individual",
    noise={"name": "exponential", "decay": 0.02},
    seeds=[0, 1],
    epochs=28,
    norms={"refreshes_per_epoch": 0.5, "rows_per_part": 32},
    execution={"checkpoint_every_epochs": 0.3},
    accounting={"individual": "pld"},
)
"""Long enough for a fault in the middle of training, and again in the middle of accounting."""
KEYS = list(keys_of(TEXT).values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    return run_undisturbed(parse_sweep(TEXT), tmp_path_factory.mktemp("undisturbed"))


def trains(files: SweepFiles) -> bool:
    """Whether a trial is in the middle of its training."""
    return any(exists(files.trial(key).checkpoint) and not exists(files.trial(key).training) for key in KEYS)


def accounts(files: SweepFiles) -> bool:
    """Whether some parts of a trial are accounted, and it has no result."""
    return any(list_files(files.trial(key).epsilons) and not exists(files.trial(key).result) for key in KEYS)


def when(holds: Callable[[SweepFiles], bool], files: SweepFiles, driver: Running, log: Path) -> None:
    """Wait for a state of the sweep while its driver runs."""
    wait_until(lambda: holds(files) or driver.poll() is not None, holds.__name__, pause=0.2)
    assert driver.poll() is None, log.read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 192 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Take all that is free; the file that does."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("holds", [trains, accounts])
def test_a_full_disk_ends_a_sweep_in_words_and_a_resume_completes_it(
    holds: Callable[[SweepFiles], bool], undisturbed: SweepFiles, disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(TEXT)
    files, log = SweepFiles(str(disk / "out")), tmp_path / "log"
    command = ("run", tmp_path / "sweep.yaml", "--output", files.root, "--tracking-uri", "none")
    driver = start(*command, log=log)
    when(holds, files, driver, log)
    filler = fill(disk)
    assert driver.wait(PATIENCE) != 0
    assert "No space left" in log.read_text()
    assert "StorageError" not in log.read_text(), "the type of an error in place of its text"
    assert "Traceback" not in log.read_text()
    filler.unlink()
    again = dpsweep(*command)
    assert again.returncode == 0, again.stderr
    for key in KEYS:
        assert exists(files.trial(key).result)
        assert_same_trial(files.trial(key), undisturbed.trial(key), True)


HUNGRY = """
import math
import time
import numpy as np
import ray
from torch import nn

held = []


class Hungry(nn.Linear):
    def forward(self, x):
        if self.training and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            held[:] = held or [np.ones({bytes} // 8)]
            time.sleep(0.02)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Hungry(math.prod(feature_shape), num_classes))
"""
"""A model that takes memory where Ray trains it, once in each process; the driver tries it, too."""


def memory(name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_a_worker_that_ray_kills_for_lack_of_memory_trains_alone_afterwards(tmp_path: Path) -> None:
    """There is room for one trial and not for two; neither has a retry."""
    total, available, needed = memory("MemTotal"), memory("MemAvailable"), 4 * 2**30
    if available < 3 * needed:
        pytest.skip(f"{available / 2**30:.0f} GiB of memory are available")
    (tmp_path / "hungry.py").write_text(HUNGRY.replace("{bytes}", str(needed)))
    text = small(
        model="hungry:build",
        clipping="flat",
        noise="constant",
        seeds=[0, 1],
        epochs=4,
        resources={"max_failures": 0},
        accounting={"individual": "rdp"},
    )
    (tmp_path / "sweep.yaml").write_text(text)
    threshold = (total - available + 2 * needed) / total  # Ray and the driver themselves take about 2.5 GiB
    environment = {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    files = SweepFiles(str(tmp_path / "out"))
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", files.root, "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert {trial["status"] for trial in json.loads(done.stdout)["trials"]} == {"finished"}
    assert "starts anew" not in done.stderr, "each trains with its own micro-batch"
    sweep = parse_sweep(text)
    undisturbed = run_undisturbed(sweep, tmp_path / "undisturbed", permitted(sweep, tmp_path))
    for key in keys_of(text).values():
        assert_same_trial(files.trial(key), undisturbed.trial(key), True)
    killed = [path for path in (tmp_path / "out" / "tune").rglob("error.txt") if "low on memory" in path.read_text()]
    assert killed, "Ray killed a worker for lack of memory"
