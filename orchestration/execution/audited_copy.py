"""Train the copy of a trial that an audit examines, and delete it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import closed_to_strangers, delete_folder
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.workers.evaluation.attack_results import AuditResult, read_attacks
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.history import Progress

OnEpoch = Callable[[str, Progress], None]


@dataclass(frozen=True)
class AuditedCopy:
    """A copy of the finished trial ``key``, with canaries. `releases`: as of `run_trial`."""

    key: str
    spec: TrialSpec
    releases: tuple[Release, ...]


def audit_here(copy: AuditedCopy, files: SweepFiles, code: UserCode, on_epoch: OnEpoch) -> AuditResult:
    """Train the copy in this process, in a folder of its own that is deleted; return what its audit found."""
    from dpsweep.workers.trials.trial import run_trial  # late: it imports torch, which a driver does not need for this

    there = TrialFiles(files.audited_copy)
    with closed_to_strangers():
        delete_folder(there.root)  # what an interrupted audit left
        try:
            run_trial(
                copy.spec,
                there.root,
                code=code,
                releases=copy.releases,
                on_progress=lambda now: on_epoch(copy.key, now),
            )
            found = read_attacks(there.attacks).audit
        finally:
            delete_folder(there.root)
    assert found is not None, "the copy asks for an audit"
    return found
