"""An object store that refuses while a trial trains: the trial waits, and goes on from its last checkpoint."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.records import files as storage
from dpsweep.accounting.records import local_files, read_bytes, read_epsilons
from dpsweep.orchestration.execution import storage_retries
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.storage_retries import train_patiently
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.trials.trial import Progress, TrainingResult, run_trial
from tests.accounting.stored_trial import account_trial, job_of
from tests.orchestration.reference import run_undisturbed
from tests.orchestration.sample_grids import small

TEXT = small(
    clipping="individual",
    noise="constant",
    seeds=0,
    epochs=4,
    norms={"refreshes_per_epoch": 1},
    execution={"checkpoint_every_epochs": 1},
    accounting={"individual": "rdp"},
)


@pytest.fixture
def planned() -> PlannedTrial:
    (planned,) = plan_sweep(parse_sweep(TEXT)).trials
    return planned


def refusing(monkeypatch: pytest.MonkeyPatch, after: int, times: int) -> Callable[[], int]:
    """Let the store refuse so many writes after so many; returns how often it refused so far."""
    write, counts = storage._put_object, {"writes": 0, "refused": 0}

    def put(filesystem: fs.FileSystem, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        counts["writes"] += 1
        if counts["writes"] > after and counts["refused"] < times:
            counts["refused"] += 1
            raise OSError("503 Slow Down")
        write(filesystem, path, pieces)

    monkeypatch.setattr(storage, "_put_object", put)
    return lambda: counts["refused"]


@pytest.mark.long
def test_a_store_that_refuses_for_a_while_changes_no_bit(
    planned: PlannedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retries, "PAUSES", (0.0,) * 5)
    refused, steps = refusing(monkeypatch, after=12, times=3), list[int]()
    context = TrialContext(SweepFiles(f"mock://{uuid.uuid4()}/sweep"), parse_sweep(TEXT).disclosure, NO_CODE)

    def report(progress: Progress) -> None:
        steps.append(progress.step)

    train_patiently(planned, context.files.trial(planned.key).root, NO_CODE, report)
    assert refused() == 3
    assert steps[0] < max(steps), "it went on from a checkpoint"
    assert len(set(steps)) == 4
    files = context.files.trial(planned.key)
    account_trial(job_of(files.root, planned.spec.delta, "rdp"))
    undisturbed = run_undisturbed(parse_sweep(TEXT), tmp_path).trial(planned.key)
    models = [torch.load(BytesIO(read_bytes(each.model)), weights_only=True) for each in (files, undisturbed)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    ours, theirs = (read_epsilons(each.epsilons).upper for each in (files, undisturbed))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("root", "attempts"), [("mock://{name}/sweep", 3), ("{folder}/{name}", 1)])
def test_what_refuses_for_good_fails_the_trial(
    root: str, attempts: int, planned: PlannedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local disk is full: nobody waits for it."""
    begun = 0

    def counted(*arguments: Any, **options: Any) -> TrainingResult:
        nonlocal begun
        begun += 1
        return run_trial(*arguments, **options)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(storage_retries, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr("dpsweep.workers.trials.trial.run_trial", counted)
    monkeypatch.setattr(storage, "_put_object", refuse)
    monkeypatch.setattr(local_files, "replace_file", refuse)
    context = TrialContext(
        SweepFiles(root.format(name=uuid.uuid4(), folder=tmp_path)), parse_sweep(TEXT).disclosure, NO_CODE
    )
    with pytest.raises(StorageError, match="No space left"):
        train_patiently(planned, context.files.trial(planned.key).root, NO_CODE, lambda progress: None)
    assert begun == attempts
