"""A process proves that it shares the sweep's storage before a trial starts in it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pyarrow import fs

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs import account_part
from dpsweep.accounting.records import files as storage
from dpsweep.orchestration.execution import storage_retries
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.ray_tune import _attempt
from dpsweep.orchestration.execution.shared_storage import OnSharedStorage, Probe
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.resources import ResourceSettings
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE
from tests.orchestration.sample_grids import small


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    probe = Probe.written(str(tmp_path / "probe"))
    assert probe.is_read()
    probe.require()
    other = Probe.written(probe.uri)
    assert (probe.is_read(), other.is_read()) == (False, True), "a folder of the same name with another probe"
    Path(probe.uri).unlink()
    with pytest.raises(InvalidInput, match=r"was written by the driver but cannot be read on node .*such as s3://"):
        other.require()


def test_a_link_that_is_down_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is cut off when its trial starts shares the storage all the same."""
    probe, refused = Probe.written(f"mock://{uuid.uuid4()}/probe"), list[str]()
    open_filesystem = storage.open_filesystem

    def cut_off(uri: str) -> tuple[fs.FileSystem, str]:
        if len(refused) < 2:
            refused.append(uri)
            raise OSError("network is unreachable")
        return open_filesystem(uri)

    monkeypatch.setattr(storage_retries, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(storage, "open_filesystem", cut_off)
    probe.require()
    assert refused == [probe.uri] * 2
    monkeypatch.setattr(storage_retries, "PAUSES", ())
    refused.clear()
    with pytest.raises(InvalidInput, match=r"cannot be read on node .*network is unreachable.*; choose an --output"):
        probe.require()


@dataclass(frozen=True)
class Number:
    """A part, and a result."""

    part: int


@dataclass(frozen=True)
class Doubled:
    """A job on numbers."""

    root: str

    def account(self, part: Number) -> Number:
        return Number(2 * part.part)


def test_no_part_is_accounted_on_a_node_that_does_not_share_the_storage(tmp_path: Path) -> None:
    """A process proves it once, at its first part."""
    probe, job = Probe.written(str(tmp_path / "probe")), Doubled("trial")
    proven = OnSharedStorage(job, probe)
    assert (proven.root, account_part(proven, Number(21))) == ("trial", Number(42))
    Path(probe.uri).unlink()
    assert account_part(proven, Number(1)) == Number(2)
    with pytest.raises(InvalidInput, match=r"cannot be read on node .*, which joined later: .*; choose an --output"):
        account_part(OnSharedStorage(job, Probe(probe.uri, b"of another folder")), Number(1))


def test_no_trial_starts_on_a_node_that_does_not_share_the_storage(tmp_path: Path) -> None:
    sweep, files = parse_sweep(small(clipping="flat", noise="constant", seeds=0)), SweepFiles(str(tmp_path))
    (planned,) = plan_sweep(sweep).trials
    context = TrialContext(files, sweep.disclosure, NO_CODE, probe=Probe.written(files.probe))
    blind = replace(context, probe=Probe(files.probe, b"of another folder"))
    failure = _attempt(planned, blind, ResourceSettings())
    assert "storage-probe was written by the driver but cannot be read on node" in str(failure)
    assert not Path(files.trial(planned.key).checkpoint).exists()
