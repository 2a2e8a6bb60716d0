"""What another user of the machine can do to everything that a sweep creates, under every umask."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput, StorageError
from dpsweep.accounting.records.sealed import read_private
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.upkeep import delete_sweep
from dpsweep.orchestration.pipeline import run_sweep
from dpsweep.orchestration.store.later_results import write_account
from dpsweep.orchestration.store.layout import SweepFiles, require_safe
from tests.orchestration.sample_grids import in_process, small
from tests.orchestration.sample_results import stored_sample

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534
"""User and group of the other one."""
Access = dict[str, list[str]]
"""What succeeded, by path."""


def attempts(path: Path, is_folder: bool) -> dict[str, Callable[[], object]]:
    """What the other user tries with a file or folder."""
    if not is_folder:
        return {
            "read": lambda: path.open("rb").read(1),
            "write": lambda: os.close(os.open(path, os.O_WRONLY)),
            "chmod": lambda: path.chmod(0o666),
        }
    return {
        "list": lambda: os.listdir(path),
        "create": lambda: (path / "planted").mkdir(),
        "rename": lambda: [each.rename(path / "moved") for each in list(path.iterdir())[:1]],
        "chmod": lambda: path.chmod(0o777),
    }


def access_of_another(paths: list[Path]) -> Access:
    """What a process of `NOBODY` achieves on ``paths``, deepest first: nothing it did stands in its way."""
    kinds = {path: path.is_dir() for path in sorted(paths, reverse=True)}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found: Access = {}
            for path, is_folder in kinds.items():
                for name, attempt in attempts(path, is_folder).items():
                    try:
                        attempt()
                    except OSError:
                        continue
                    found.setdefault(str(path), []).append(name)
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        content = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(content))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others can enter, so that only what a sweep creates keeps them out."""
    folder = Path(tempfile.mkdtemp(prefix="second-user-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def created(folder: Path, umask: int, release: str) -> list[Path]:
    """Everything that a sweep creates under ``umask``; embedded MLflow and the temporary files of Python included."""
    text = small(
        model="logistic",
        clipping=["none", {"name": "flat", "bound": 1.0}],
        noise="constant",
        seeds=0,
        epochs=1,
        release=release,
        attacks={"loss_threshold": True},
    )
    before = os.umask(umask)
    try:
        run_sweep(in_process(text, folder / "out", None))
    finally:
        os.umask(before)
    return sorted(folder.rglob("*"))


@ROOT
def test_another_user_can_read_the_record_of_a_shared_sweep(open_folder: Path) -> None:
    """What `compare` and `export` need; accounts of single examples are left out."""
    created(open_folder, 0o022, "none")
    files = SweepFiles(str(open_folder / "out"))
    for key in os.listdir(files.trials):
        write_account(files.trial(key).accounted_again("delta=1e-06"), {"groups": []})
    with pytest.raises(DataCorruption, match="lacks values"):
        stored_record(files)
    assert as_another(lambda: len(stored_record(files).data().trials)) == 2
    with pytest.raises(StorageError, match="Permission denied; what lies below private/ is open to the user who ran"):
        as_another(lambda: len(read_private(files.private_report)))


@ROOT
def test_another_user_who_deletes_is_told_whose_it_is(open_folder: Path) -> None:
    files = stored_sample(open_folder / "out")
    for path in (Path(files.root), *Path(files.root).rglob("*")):
        path.chmod(0o755)
    Path(files.private).mkdir(mode=0o700, exist_ok=True)
    Path(files.private).chmod(0o700)
    with pytest.raises(StorageError, match=r"out: Permission denied; only the user who ran the sweep can"):
        as_another(lambda: len(delete_sweep(files)))
    (open_folder / "out").chmod(0o700)
    with pytest.raises(InvalidInput, match=r"^cannot look into .*out: Permission denied; another --output"):
        as_another(lambda: bool(require_safe(files)))  # type: ignore[func-returns-value]


def as_another(work: Callable[[], int]) -> int:
    """What ``work`` returns as `NOBODY`, with the rights of this process's threads left as they were."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        return work()
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.mark.thinned(4)
@ROOT
@pytest.mark.parametrize(
    ("umask", "release"),
    [(0o000, "private"), (0o022, "none"), (0o077, "none"), (0o000, "raw")],
    ids=lambda value: value if isinstance(value, str) else f"{value:03o}",
)
def test_another_user_reads_public_files_at_most(open_folder: Path, umask: int, release: str) -> None:
    paths = created(open_folder, umask, release)
    private = [path for path in paths if "private" in path.parts]
    baselines = [path for path in paths if path.name in ("model.pt", "inputs.pt") and "non-private" in path.parts[-2]]
    assert len(private) > 10
    assert len(baselines) == 2
    found = access_of_another([open_folder, *paths])
    assert found.pop(str(open_folder)) == ["list"], "the way in is open"
    assert {action for actions in found.values() for action in actions} <= {"read", "list"}
    assert not [path for path in (*private, *baselines) if str(path) in found]
    nothing = release == "raw" or umask == 0o077
    assert (found == {}) == nothing, "others read public files where the umask lets them, and nothing else"
    assert all(stat.S_IMODE(path.lstat().st_mode) & 0o002 == 0 for path in paths)
