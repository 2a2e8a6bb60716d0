"""Storage that is away or full, and memory that runs out, by real means: nothing is lost, and no bit changes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import delete_folder, exists, list_files
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.known import known
from tests.orchestration.processes import PATIENCE, Running, dpsweep, script, start, wait_until
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.servers import closed_port, has_s3, s3

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


PORT = """
import asyncio, sys

async def pass_on(reader, writer):
    with_store = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    async def copy(source, target):
        try:
            while piece := await source.read(65536):
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass
        target.close()
    await asyncio.gather(copy(reader, with_store[1]), copy(with_store[0], writer))

async def main():
    server = await asyncio.start_server(pass_on, "127.0.0.1", int(sys.argv[1]))
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
"""The only way to the store, until stdin closes."""


@contextlib.contextmanager
def reachable(port: int, store: int, folder: Path) -> Iterator[None]:
    """Let the store at port ``store`` be reached at ``port`` for the duration of a ``with`` block."""
    with script(PORT, port, store, errors=folder / "port") as process:
        assert known(process.stdout).readline() == "open\n", (folder / "port").read_text()
        yield
        process.kill()  # open connections break, as those of a server that is stopped


@pytest.mark.skipif(not has_s3(), reason="no moto for an S3 server")
def test_an_object_store_is_away_for_a_minute(
    undisturbed: SweepFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of training and in the middle of accounting: the store's port is closed, its data stay."""
    (tmp_path / "sweep.yaml").write_text(TEXT)
    log, port = tmp_path / "log", closed_port()
    with s3("outages") as store:
        for name, value in store.items():
            monkeypatch.setenv(name, value)  # how this test looks into the store, past the port
        behind, address = known(urlsplit(store["AWS_ENDPOINT_URL"]).port), f"http://127.0.0.1:{port}"
        files, tracked = SweepFiles("s3://outages/small"), f"sqlite:///{tmp_path}/mlflow.db"
        reached = {**store, "AWS_ENDPOINT_URL": address, "MLFLOW_S3_ENDPOINT_URL": address}
        command = ("run", tmp_path / "sweep.yaml", "--output", files.root, "--tracking-uri", tracked)
        with reachable(port, behind, tmp_path):
            driver = start(*command, log=log, **reached)
            when(trains, files, driver, log)
        time.sleep(60.0)
        with reachable(port, behind, tmp_path):
            when(accounts, files, driver, log)
        time.sleep(60.0)
        with reachable(port, behind, tmp_path):
            assert driver.wait(PATIENCE) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
        for key in KEYS:
            assert exists(files.trial(key).result)
            ours, theirs = (read_epsilons(each.trial(key).epsilons) for each in (files, undisturbed))
            np.testing.assert_array_equal(ours.upper, theirs.upper)
            np.testing.assert_array_equal(ours.lower, theirs.lower)


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


def one_error(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text
    return line


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


def test_a_full_disk_ends_accounting_again_in_words(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(TEXT)
    files, log = SweepFiles(str(disk / "out")), tmp_path / "log"
    done = dpsweep("run", tmp_path / "sweep.yaml", "--output", files.root, "--tracking-uri", "none")
    assert done.returncode == 0, done.stderr
    command = ("account", files.root, "--delta", "1e-7", "--tracking-uri", "none", "--json")
    driver = start(*command, log=log)
    wait_until(lambda: bool(list((disk / "out").glob("trials/*/private/accounts/*/epsilons/*.arrow"))), "a part")
    filler = fill(disk)
    assert driver.wait(PATIENCE) != 0
    assert "No space left" in one_error(log.read_text())
    filler.unlink()
    assert dpsweep("verify", files.root).returncode == 0
    again = dpsweep(*command)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)["accounts"]
    stored = [read_epsilons(f"{account['folder']}/epsilons").upper for account in found]
    for account in found:
        delete_folder(account["folder"])
    anew = dpsweep(*command)
    assert json.loads(anew.stdout)["accounts"] == found
    for account, before in zip(found, stored, strict=True):
        np.testing.assert_array_equal(read_epsilons(f"{account['folder']}/epsilons").upper, before)


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
