"""A sweep's folder that somebody else made is refused before a run fills it, and before anything is deleted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.accounting.records.sealed import write_sealed
from dpsweep.orchestration.execution.upkeep import damaged_reports, delete_sweep, forget_keys, prune_norms
from dpsweep.orchestration.store.layout import SweepFiles, require_no_links, require_safe, require_safe_tracking
from tests.orchestration.sample_grids import contents
from tests.orchestration.sample_results import stored_sample

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    return stored_sample(tmp_path / "sweep")


@pytest.fixture
def other(tmp_path: Path) -> SweepFiles:
    return stored_sample(tmp_path / "other")


def test_a_new_folder_and_ones_own_are_safe(tmp_path: Path, files: SweepFiles) -> None:
    require_safe(SweepFiles(str(tmp_path / "new")))
    require_safe(files)


@pytest.mark.parametrize("name", ["trials", "tuning", "private", "attempts", "tune", "mlflow-artifacts", "pages"])
def test_a_folder_that_leads_to_another_sweep_is_refused_by_name(
    files: SweepFiles, other: SweepFiles, name: str
) -> None:
    place = Path(files.root) / name
    if place.exists():
        place.rename(Path(files.root) / "moved")
    place.symlink_to(Path(other.root) / name)
    before = contents(other.root)
    with pytest.raises(InvalidInput, match=rf"{place} is a symbolic link.*another --output is a new folder"):
        require_safe(files)
    for command in (delete_sweep, require_no_links, lambda files: prune_norms(files, 0.0)):
        with pytest.raises(UnsafeFile, match=f"{place} is a symbolic link"):
            command(files)
    with pytest.raises(UnsafeFile, match=f"{place} is a symbolic link"):
        forget_keys(files.root)
    assert contents(other.root) == before
    assert Path(files.manifest).exists()


@pytest.mark.parametrize("name", ["dpsweep.log", "mlflow.db", "mlflow.db-wal", "report.html", ".lock", "sweep.json"])
def test_a_file_that_leads_elsewhere_is_refused_and_what_it_leads_to_stays(
    files: SweepFiles, tmp_path: Path, name: str
) -> None:
    place, victim = Path(files.root) / name, tmp_path / "victim"
    victim.write_text("mine")
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    with pytest.raises(InvalidInput, match=f"{place} is a symbolic link"):
        require_safe(files)
    if name.startswith("mlflow"):
        with pytest.raises(InvalidInput, match=f"{place} is a symbolic link.*--tracking-uri"):
            require_safe_tracking(files)
    with pytest.raises(UnsafeFile, match="is a symbolic link"):
        forget_keys(files.root)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["", "trials", "attempts"])
def test_a_folder_that_others_can_change_is_refused_with_what_to_do(files: SweepFiles, name: str) -> None:
    place = Path(files.root) / name
    place.mkdir(exist_ok=True)
    place.chmod(0o777)
    with pytest.raises(InvalidInput, match=r"can be changed by other users \(mode 0777\).*chmod go-w.*--output"):
        require_safe(files)


@ROOT
def test_a_folder_of_another_user_is_refused(files: SweepFiles) -> None:
    os.chown(files.root, 65534, 65534)
    with pytest.raises(InvalidInput, match=r"belongs to another user \(uid 65534\).*folder of your own"):
        require_safe(files)


def test_a_lock_is_no_way_to_empty_a_file(files: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    Path(files.lock).hardlink_to(tmp_path / "victim")
    assert forget_keys(files.root) == ()
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_digest_of_a_file_elsewhere_is_not_compared(files: SweepFiles, tmp_path: Path) -> None:
    (tmp_path / "guessed").write_text("secret")
    write_sealed(files.report_digests, json.dumps({"../guessed": "0" * 64}).encode())
    with pytest.raises(UnsafeFile, match=r"guessed.*leads out of its folder"):
        list(damaged_reports(files))


@pytest.mark.parametrize("name", ["plain", r"a \134 backslash", "a\ttab"])
def test_nothing_is_deleted_through_a_mount(name: str, tmp_path: Path) -> None:
    """A trial's folder, bound to one elsewhere, in a namespace of a process of its own. The kernel escapes some names,
    and there may be others that are no text."""
    files, no_text = SweepFiles(str(tmp_path / name)), f"{tmp_path}/\udcff"
    elsewhere, check = tmp_path / "elsewhere of it", "from dpsweep.orchestration.store.layout import *; import sys"
    elsewhere.mkdir()
    Path(no_text).mkdir()
    Path(files.trials, "a trial").mkdir(parents=True)
    check += "; require_no_links(SweepFiles(sys.argv[1]))"
    words = (
        'mount --bind "$1" "$2" && mount --bind "$1" "$3" && exec "$4" -c "$5" "$6"',
        "sh",
        elsewhere,
        no_text,
        f"{files.trials}/a trial",
        sys.executable,
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", *map(str, words), check, files.root],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("namespaces of users are not allowed here")
    assert f"UnsafeFile: {files.trials}/a trial is a mount point, through which dpsweep deletes nothing" in done.stderr
    require_no_links(files)
