"""Norms are stored beside the training: it does not wait for them, and nothing is said to be stored before it is."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.records.files import list_files, write_in_private_folder
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine.checkpoint import save_checkpoint
from dpsweep.workers.spec import NormSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials import trial_setup
from dpsweep.workers.trials.trial import run_trial
from tests.workers.resumption import assert_same_trial
from tests.workers.trial_specs import small_trial


def slowed(patch: pytest.MonkeyPatch, seconds: float) -> None:
    def slow(uri: str, *pieces: bytes) -> None:
        time.sleep(seconds)
        write_in_private_folder(uri, *pieces)

    patch.setattr("dpsweep.accounting.records.snapshots.write_in_private_folder", slow)


def committed(root: Path) -> int:
    return sum(name.endswith("/manifest.json") for name in list_files(TrialFiles(str(root)).norms))


def test_a_checkpoint_is_never_ahead_of_the_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snapshot but the open one is committed when the checkpoint is written, however slow the storage is."""
    slowed(monkeypatch, 0.05)
    seen: list[tuple[int, int]] = []

    def noted(uri: str, owner: str, state: dict[str, Any]) -> None:
        seen.append((state["trainer"]["step_count"], committed(tmp_path)))
        save_checkpoint(uri, owner, state)

    monkeypatch.setattr(trial_setup, "save_checkpoint", noted)
    run_trial(small_trial(norms=NormSpec("every_step")), str(tmp_path))
    assert seen == [(0, 0), (3, 2), (5, 4), (8, 7), (10, 9)]
    assert committed(tmp_path) == 10, "the last snapshot follows the last step"


@pytest.mark.long
def test_the_norms_of_a_slow_storage_are_those_of_a_fast_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_trial(norms=NormSpec("every_step", exact_examples=3))
    run_trial(spec, str(tmp_path / "fast"))
    with monkeypatch.context() as patched:
        slowed(patched, 0.01)
        run_trial(spec, str(tmp_path / "slow"))
    assert_same_trial(spec, tmp_path / "fast", tmp_path / "slow")


@pytest.mark.long
def test_storage_that_refuses_in_the_background_ends_the_trial_and_the_next_attempt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_trial(epochs=3)
    run_trial(spec, str(tmp_path / "undisturbed"))

    def refused(uri: str, *pieces: bytes) -> None:
        raise StorageError(f"cannot write {uri}")

    def from_now_on(progress: Progress) -> None:
        monkeypatch.setattr("dpsweep.accounting.records.snapshots.write_in_private_folder", refused)

    with monkeypatch.context(), pytest.raises(StorageError, match=r"cannot write .*step=.*object-00000"):
        run_trial(spec, str(tmp_path / "resumed"), on_progress=from_now_on)
    monkeypatch.undo()
    with pytest.raises(Exception, match="interrupted"):
        NormShards(TrialFiles(str(tmp_path / "resumed")).norms)
    run_trial(spec, str(tmp_path / "resumed"))
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


def test_nobody_writes_on_after_the_training_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write beside the next attempt in the same process. The error keeps the writers alive."""
    slowed(monkeypatch, 0.1)
    spec = small_trial(norms=NormSpec("every_step"))
    rarely = replace(spec, execution=replace(spec.execution, checkpoint_every_epochs=4.0))  # nothing waits before

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        run_trial(rarely, str(tmp_path), on_progress=stop)
    before = list_files(str(tmp_path))
    time.sleep(0.3)
    assert list_files(str(tmp_path)) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dpsweep-writer")]
    assert stopped.tb is not None
