"""The files of an embedded Ray are for their owner only, and go with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.session import _LONGEST, _make_in_first, private_session
from tests.orchestration.processes import PATIENCE, descendants, environment, is_alive, kill, start, wait_until
from tests.orchestration.sample_grids import small
from tests.orchestration.tracking.recordings import client_of, runs_of

SCRIPT = """
import os, signal, sys
from pathlib import Path
os.umask(0)
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
import ray
from dpsweep.orchestration.execution.cluster import connected
def speak():
    print("row of a patient", flush=True)
signal.signal(signal.SIGTERM, lambda *told: print("told to end", file=sys.stderr))
try:
    with connected(EMBEDDED, Path(sys.argv[1])):
        ray.get(ray.remote(num_cpus=0)(speak).remote())
        print("ready", flush=True)
        if sys.stdin.read() == "fail":
            raise ZeroDivisionError
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""
"""A driver whose worker prints something, and that lives until its stdin closes. It is told to end after that."""
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextlib.contextmanager
def folder_for_all(name_bytes: int = 0) -> Iterator[Path]:
    """A folder for temporary files like /tmp, which everyone may write; ``name_bytes`` long, if that is longer."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp", suffix="x" * max(0, name_bytes - len("/tmp/t12345678"))))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def shared() -> Iterator[Path]:
    with folder_for_all() as folder:
        yield folder


def temporary(shared: Path, tmp_path: Path) -> dict[str, str]:
    """Variables that keep temporary files in ``shared``; torch keeps a cache for later runs, which stays elsewhere."""
    return {"TMPDIR": str(shared), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}


def said_by(log: Path) -> Path:
    """What the driver with this log wrote to stderr."""
    return log.with_suffix(".stderr")


@contextlib.contextmanager
def driver(shared: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """The script, once its worker has printed; it is ended with the block."""
    with (
        said_by(log).open("w") as said,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment(TMPDIR=str(shared)),
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", said_by(log).read_text()
        yield process
        process.communicate(timeout=PATIENCE)


def as_nobody(command: str, folder: Path) -> str:
    """What another user's shell prints who tries ``command`` with ``folder`` as $1."""
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        check=False,
    )
    return done.stdout


@dataclass(frozen=True)
class Running:
    """A driver that runs: the folder for temporary files, that of its session, and the target of planted links."""

    shared: Path
    session: Path
    victim: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """In a folder as long as can be, in which links to a victim were planted, and which another user's run used too.

    It ends with an exception, which leaves nothing but what was there.
    """
    folder = tmp_path_factory.mktemp("running")
    victim = folder / "victim"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    with folder_for_all(_LONGEST) as shared:
        assert len(os.fsencode(shared)) == _LONGEST
        before = [shared / "ray", shared / "dps-aaaaaaaa"]
        for link in before:
            link.symlink_to(victim)
        if os.geteuid() == 0:
            before.append(shared / "dps-bbbbbbbb")
            before[-1].mkdir()
            os.chown(before[-1], NOBODY, NOBODY)
        with driver(shared, folder / "log") as process:
            (session,) = set(shared.iterdir()) - set(before)
            yield Running(shared, session, victim)
            process.communicate("fail", timeout=PATIENCE)
        said = said_by(folder / "log").read_text()
        assert "told to end" in said, "the handler of a process outlives its connection to Ray"
        assert "ZeroDivisionError" in said
        assert sorted(shared.iterdir()) == sorted(before)
        assert [path.name for path in victim.iterdir()] == ["precious"]


def test_the_folder_is_private_and_holds_what_workers_print(running: Running) -> None:
    found = running.session.lstat()
    assert stat.S_ISDIR(found.st_mode)
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.geteuid())
    printed = [path.read_text() for path in running.session.rglob("logs/worker-*.out")]
    assert any("row of a patient" in text for text in printed), printed
    assert len([path for path in running.session.rglob("sockets/*") if path.is_socket()]) == 2


@needs_root
def test_another_user_reaches_nothing(running: Running) -> None:
    assert str(running.session) in as_nobody('echo "$1"/*', running.shared), "another user sees the folder"
    assert as_nobody('find "$1" -mindepth 1', running.session) == ""
    (sockets,) = running.session.rglob("sockets")
    as_nobody('mv "$1" "$1.moved"; mv "$1/raylet" "$1/moved"; ln -s / "$1/planted"; mv "$1/../../.." "$1/.."', sockets)
    as_nobody('rm -rf "$1"; mv "$1" "$1.moved"; chmod 777 "$1"', running.session)
    assert sorted(path.name for path in sockets.iterdir()) == ["plasma_store", "raylet"]


def test_links_planted_in_advance_are_not_followed(running: Running) -> None:
    assert [path.name for path in running.victim.iterdir()] == ["precious"]


def has_begun(shared: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # Ray removes a folder while it is being read
        return any(shared.rglob("logs/gcs_server.out"))
    return False


def test_an_interrupted_start_leaves_nothing(shared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "log")]
    with subprocess.Popen(command, env=environment(TMPDIR=str(shared)), stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: has_begun(shared) or process.poll() is not None, "Ray to start")
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) != 0
    assert not list(shared.iterdir())
    wait_until(lambda: not any(map(is_alive, below)), "Ray's processes to end")


@pytest.mark.long
def test_sigterm_leaves_nothing(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(small(epochs=100))
    command = ("run", tmp_path / "sweep.yaml", "--output", tmp_path / "out")
    process = start(*command, log=tmp_path / "log", **temporary(shared, tmp_path))
    trained = tmp_path / "out" / "trials"
    wait_until(lambda: trained.exists() or process.poll() is not None, "a trial to train")
    assert [path.name[:4] for path in shared.iterdir()] == ["dps-"]
    process.send_signal(signal.SIGTERM)
    said = (tmp_path / "log").read_text
    assert process.wait(PATIENCE) == 130, said()
    assert said().splitlines()[-1] == "interrupted; the same command continues where it stopped"
    assert "Traceback" not in said()
    assert not list(shared.iterdir())
    runs = runs_of(client_of(tmp_path / "out"))
    assert "RUNNING" not in {run.info.status for run in runs}
    assert {run.data.tags.get("dpsweep.outcome") for run in runs} >= {"interrupted"}


@pytest.mark.long
def test_what_a_killed_driver_left_goes_at_the_next_start(shared: Path, tmp_path: Path) -> None:
    with driver(shared, tmp_path / "running"):
        (running,) = shared.iterdir()
        with driver(shared, tmp_path / "killed") as killed:
            (left,) = set(shared.iterdir()) - {running}
            below = descendants(killed.pid)
            kill(killed.pid)
        agents = [pid for pid in below if is_alive(pid)]
        assert agents, "Ray's agents take a minute to notice"
        with driver(shared, tmp_path / "next"):
            assert left.exists() or not any(map(is_alive, agents)), "removed while processes still use it"
        for pid in filter(is_alive, agents):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        wait_until(lambda: not any(map(is_alive, agents)), "the agents to end")
        with driver(shared, tmp_path / "next"):
            assert not left.exists()
            assert running.exists()
            assert len(list(shared.iterdir())) == 2
        assert [running] == list(shared.iterdir())
    assert not list(shared.iterdir())


def test_the_first_place_that_serves_is_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder_for_all(_LONGEST + 1) as long:
        folder, lock = _make_in_first([str(long), "/absent", str(shared), "/tmp"])
        os.close(lock)
        assert folder.parent == shared
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        with private_session():
            made = Path(os.environ["RAY_TMPDIR"])
            assert made.parent == Path("/tmp")
            assert stat.S_IMODE(made.lstat().st_mode) == 0o700
        assert not made.exists()
        assert "RAY_TMPDIR" not in os.environ


def test_where_no_place_serves_each_is_named() -> None:
    with folder_for_all(_LONGEST + 1) as long, pytest.raises(InvalidInput) as refused:
        _make_in_first([str(long), "/absent"])
    assert f"in {long}: a path of {_LONGEST + 1} bytes, but Ray's sockets leave room for {_LONGEST}" in str(
        refused.value
    )
    assert ", in /absent: No such file" in str(refused.value)


def test_a_place_without_room_serves_nobody(shared: Path) -> None:
    with folder_for_all() as small:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
        try:
            folder, lock = _make_in_first([str(small), str(shared)])
            os.close(lock)
            assert folder.parent == shared
            with pytest.raises(InvalidInput, match=f"in {small}: 8 MiB are free, but Ray needs 64 MiB; set RAY_TMPDIR"):
                _make_in_first([str(small)])
        finally:
            subprocess.run(["umount", "--lazy", small], check=True)


def test_no_other_place_is_taken_where_ray_is_told_to_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/absent")
    refused = pytest.raises(InvalidInput, match=r"a folder for Ray in /absent: No such file.*set RAY_TMPDIR to a")
    with refused, private_session():
        pytest.fail("another place was taken")


@pytest.mark.long
def test_workers_share_a_folder_that_ends_with_the_run(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
import ray
from dpsweep.orchestration.execution.cluster import connected
def share():
    from dpsweep.workers.data.mapped import RowForm, once_on_node
    import numpy, torch, dpsweep.workers.machine.folders
    once_on_node(lambda: "key", [RowForm(torch.uint8, (2,))], 1, lambda: iter([[numpy.zeros((1, 2), numpy.uint8)]]))
    return str(dpsweep.workers.machine.folders.node_folder())
with connected(EMBEDDED, Path(sys.argv[1])):
    folder = Path(ray.get(ray.remote(num_cpus=0)(share).remote()))
    print(folder, oct(folder.stat().st_mode), *sorted(file.name for file in folder.iterdir()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "log"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder, mode, *names = done.stdout.split()
    assert (mode, names) == ("0o40700", ["key.0", "key.lock"])
    assert Path(folder).parent.name.startswith("dps-")
    assert not Path(folder).parent.exists()
