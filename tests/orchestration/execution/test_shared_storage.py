"""A process proves that it shares the sweep's storage before a trial starts in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs import account_part
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.shared_storage import OnSharedStorage, Probe
from dpsweep.orchestration.execution.tune import _attempt
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
    with pytest.raises(InvalidInput, match=r"cannot be read on node .*, which joined later; choose an --output"):
        account_part(OnSharedStorage(job, Probe(probe.uri, b"of another folder")), Number(1))


def test_no_trial_starts_on_a_node_that_does_not_share_the_storage(tmp_path: Path) -> None:
    sweep, files = parse_sweep(small(clipping="flat", noise="constant", seeds=0)), SweepFiles(str(tmp_path))
    (planned,) = plan_sweep(sweep).trials
    context = TrialContext(files, sweep.disclosure, NO_CODE, probe=Probe.written(files.probe))
    blind = replace(context, probe=Probe(files.probe, b"of another folder"))
    failure = _attempt(planned, blind, ResourceSettings())
    assert "storage-probe was written by the driver but cannot be read on node" in str(failure)
    assert not Path(files.trial(planned.key).checkpoint).exists()
