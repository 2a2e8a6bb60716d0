"""The `Backend` protocol for training and accounting trials, and code that backends share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from dpsweep.accounting.errors import DpsweepError, StorageError
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.encryption import KeyCheck, new_key_check, require_key
from dpsweep.accounting.records.files import closed_to_strangers, delete_folder
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.storage_checks import Probe
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.limits import FIRST_COME, Turn
from dpsweep.orchestration.store.published import PublishedEpoch
from dpsweep.orchestration.store.release_modes import Disclosure, record_failure
from dpsweep.orchestration.store.status_snapshot import ClusterSnapshot, SweepSnapshot
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.evaluation.attack_results import AuditResult, read_attacks
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.training.less_memory import LackOfMemory, in_smaller_pieces


@dataclass(frozen=True)
class TrialContext:
    """The settings that all trials of a sweep share: files, release mode and the user's code.

    `disclosure`: the release mode, which limits what error texts show. `key_check`: identifies the key that encrypts
    private files, by default the key of this process; None without encryption. `probe`: proves that storage is shared;
    None where all processes run on one machine.
    """

    files: SweepFiles
    disclosure: Disclosure
    code: UserCode
    key_check: KeyCheck | None = field(default_factory=new_key_check)
    probe: Probe | None = None

    def require_node(self) -> None:
        """Raise `InvalidInput` unless this process has the sweep's encryption key, or neither has one, and its storage.

        Nodes that joined after the sweep began are checked only here, before a trial starts on them.
        """
        require_key(self.key_check, f"the sweep in {self.files.root}")
        if self.probe is not None:
            self.probe.require()

    def failure(self, key: str, error: BaseException) -> str:
        """Return the text that may be shown of a trial's error; the full text goes to the trial's private folder."""
        return record_failure(error, self.files.trial(key), self.disclosure)

    def shown(self, key: str, error: BaseException) -> DpsweepError:
        """Copy a trial's error with only the text that may be shown, as StorageError, LackOfMemory or DpsweepError."""
        kind = next((each for each in (StorageError, LackOfMemory) if isinstance(error, each)), DpsweepError)
        return kind(self.failure(key, error))


class TrainingObserver(Protocol):
    """Receives the events of trials in order, in the driver process. ``key`` names the trial."""

    @property
    def must_stop(self) -> str | None:
        """Reason to stop training before all trials have ended, else None. Another run continues from the files."""

    def started(self, key: str) -> None:
        """Note that the trial has started, or started again after its worker was lost."""

    def progressed(self, key: str, progress: Progress) -> None:
        """Note that the trial has completed an epoch."""

    def ended(self, key: str) -> None:
        """Note that the trial trained to its end, or the scheduler stopped it early."""

    def failed(self, key: str, error: str) -> None:
        """Note that the trial ended with an error; ``error`` is the part of its text that may be shown."""

    def seen(self) -> Iterable[tuple[PlannedTrial, Sequence[PublishedEpoch]]]:
        """Yield every trial of the sweep with its epochs, as far as this driver has seen them or results hold them."""

    def starts_anew(self, key: str, why: str) -> bool:
        """Delete the stored files of a trial, so that it can be trained again with other settings.

        why: completes the warning "trial KEY ...". Returns: False, with nothing deleted, for a private trial that has
        shown an epoch, because training it from nothing would cost privacy again.
        """


class Backend(Protocol):
    """Trains trials, and accounts the parts of each.

    trials_at_once: number of trials to account at the same time; each calls `scatter` in its own thread.
    """

    trials_at_once: int

    def train(self, trials: Sequence[PlannedTrial], observer: TrainingObserver, name: str) -> None:
        """Train every trial, sending events to ``observer`` as they happen; return when all have ended or it must stop.

        name: unique to the sweep, and the same when it is resumed.
        """

    def scatter(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        """Yield the results of some parts of one trial, in order; see `dpsweep.accounting.jobs.examples.Scatter`."""

    def close(self, planned: PlannedTrial, step: int) -> Iterable[None]:
        """Store norms and trace of a trial that was stopped after ``step`` steps, yielding until that is done.

        Raises: as `dpsweep.workers.trials.trial.close_trial`.
        """

    def audit(self, copy: AuditedCopy, on_epoch: OnEpoch) -> AuditResult:
        """Train the copy of a trial, delete it, and return what its audit found. Where it can, it calls ``on_epoch``.

        Raises: as `dpsweep.workers.trials.trial.run_trial`, or DpsweepError with the text that may be shown.
        """

    def give_up(self) -> None:
        """Raise `AccountingFailed` in every thread that waits in `scatter` for a part, now or later."""

    def show(self, snapshot: SweepSnapshot) -> None:
        """Publish the numbers of a snapshot as metrics of the cluster; without a cluster, do nothing."""

    def cluster(self, waiting: Sequence[str], training: int) -> ClusterSnapshot | None:
        """Return the cluster's nodes, and what the trials ``waiting`` (keys) lack to start; None without a cluster.

        training: number of trials that train.
        """


def lighter(planned: PlannedTrial, observer: TrainingObserver) -> PlannedTrial | None:
    """Return the trial in smaller micro-batches, after it lacked memory on its own; None if it cannot start again.

    It starts from nothing: smaller micro-batches round gradient sums differently, and noise is never reused on other
    sums.
    """
    smaller = in_smaller_pieces(planned.spec, planned.dataset.train_size)
    if smaller is None:
        return None
    size = smaller.execution.micro_batch_size
    if not observer.starts_anew(planned.key, f"lacked memory; it starts anew with execution.micro_batch_size: {size}"):
        return None
    return replace(planned, point=replace(planned.point, spec=smaller))


Warn = Callable[[str], None]
"""Called with one sentence that the user should read."""
Connect = Callable[[str, UserCode], AbstractContextManager[UserCode]]
"""Connects to Ray for the duration of a ``with`` block, from address and the user's code; the block receives that code
with its locations on the workers.
"""


@dataclass(frozen=True)
class Opening:
    """A sweep for which a backend is opened at ``address``.

    `code`: the user's own. `connect`: connects to the cluster. `turn`: of the sweep among those that share its cluster.
    """

    address: str
    sweep: SweepSpec
    files: SweepFiles
    code: UserCode
    warn: Warn
    connect: Connect
    turn: Turn = FIRST_COME


Open = Callable[[Opening], AbstractContextManager[Backend]]
"""Opens a backend for the duration of a ``with`` block.

Raises: InvalidInput, before any trial starts, if the backend cannot run the sweep.
"""

OnEpoch = Callable[[str, Progress], None]


@dataclass(frozen=True)
class AuditedCopy:
    """A copy of the finished trial ``key``, with canaries. `releases`, `data_digest`: as of `run_trial`."""

    key: str
    spec: TrialSpec
    releases: tuple[Release, ...]
    data_digest: str | None = field(repr=False)


def audit_here(copy: AuditedCopy, files: SweepFiles, code: UserCode, on_epoch: OnEpoch) -> AuditResult:
    """Train the copy in this process, in a new folder that is deleted; return what its audit found."""
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
                data_digest=copy.data_digest,
            )
            found = read_attacks(there.attacks).audit
        finally:
            delete_folder(there.root)
    assert found is not None, "the copy asks for an audit"
    return found
