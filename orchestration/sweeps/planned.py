"""The plan of a sweep: the trials that can run, those that cannot, warnings, and what a sweep decides for a trial.

Loads no torch.

`dpsweep.orchestration.sweeps.plan` makes it, which needs torch. A driver on a running cluster has it made in another
process (`dpsweep.orchestration.execution.backends`), and so never loads torch itself.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.parameter_search import epsilon_text
from dpsweep.accounting.errors import InvalidInput, StorageError, count_of
from dpsweep.accounting.mechanism.correlated import squared_errors
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.trace import Release, Trace
from dpsweep.accounting.records.files import delete
from dpsweep.accounting.records.local_files import make_folders
from dpsweep.accounting.records.sealed import write_private
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.dataset_description import DatasetDescription
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.history import reasons_of_trial

_MOST_NAMED = 5
"""Largest number of trials that a reason of refusal names."""


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that can run. The spec of ``point`` has its calibrated noise multiplier.

    `trace`: steps and releases of the longest run that the trainer may make; the trainer may stop earlier.
    `worst_case`: epsilon of the trace by the sweep's accountant.
    `others`: its epsilon by the other accountants.
    `shard_bytes`: size of the norm shards before compression.
    `reasons`: why every epsilon of the trial is an estimate (`reasons_of`).
    `data_digest`: digest of the data as they are now; private, because it is a noiseless hash.
    """

    point: GridPoint
    trace: Trace
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    shard_bytes: int
    dataset: DatasetDescription
    data_digest: str = field(repr=False)
    reasons: tuple[Reason, ...] = ()
    parameters: int | None = None
    """Number of trainable parameters of the model; None if it is the user's own and was not run."""

    @property
    def key(self) -> str:
        """Key of the trial."""
        return self.point.key

    @property
    def spec(self) -> TrialSpec:
        """Return what the trainer runs, with its calibrated noise multiplier."""
        return self.point.spec

    @property
    def releases(self) -> tuple[Release, ...]:
        """Releases after training, which the trace includes."""
        return self.point.releases

    @property
    def squared_errors(self) -> tuple[float, float] | None:
        """Return `dpsweep.accounting.mechanism.correlated.squared_errors` of its trace."""
        return squared_errors(self.trace)


@dataclass(frozen=True)
class Refusal:
    """A trial that cannot run, and why.

    hidden: the withheld text and traceback, which may quote the data; stored in the private folder only.
    """

    key: str
    reason: str
    hidden: str | None = None


@dataclass(frozen=True)
class Plan:
    """The trials of a sweep that can run, the refused ones, and warnings about consequences that nobody asked for, one
    sentence each.

    `calibrations`: the noise multiplier that meets each distinct target, by a digest of its inputs, so that a later
    plan of the sweep does not search again. `former`: the trials that only earlier versions of the sweep file asked
    for. `notes`: what follows from what the user asked for, one sentence each.
    """

    trials: tuple[PlannedTrial, ...]
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    calibrations: Mapping[str, float] = field(default_factory=dict)
    former: tuple[GridPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        trials, warnings = count_of(len(self.trials), "trial"), count_of(len(self.warnings), "warning")
        return f"<Plan of {trials}, {len(self.refusals)} refused, {warnings}>"

    def _repr_html_(self) -> str:
        heads = ("trial", "epochs", "steps", "noise multiplier", "ε", "claim")
        rows = [
            (
                *(each.key, each.spec.epochs, each.trace.steps),
                *(f"{each.spec.noise.initial_noise_multiplier:.6g}", epsilon_text(each.worst_case.epsilon)),
                each.worst_case.kind,
            )
            for each in self.trials
        ]
        lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in ("".join(f"<th>{head}</th>" for head in heads), *lines))
        said = "".join(f"<p>{html.escape(text)}</p>" for text in (*self.notes, *self.reasons(), *self.warnings))
        return f"<p>{html.escape(repr(self))}</p><table>{table}</table>{said}"

    def reasons(self) -> list[str]:
        """Return one line per distinct reason of refusal, with the keys of the first refused trials."""
        keys: dict[str, list[str]] = {}
        for refusal in self.refusals:
            keys.setdefault(refusal.reason, []).append(refusal.key)
        return [f"{' '.join(reason.split())} (trials: {_enumerated(refused)})" for reason, refused in keys.items()]


def _enumerated(keys: Sequence[str]) -> str:
    """Return the keys in words; of more than `_MOST_NAMED` only the first, and how many others there are."""
    named, others = ", ".join(keys[:_MOST_NAMED]), len(keys) - _MOST_NAMED
    return f"{named} and {others:,} more" if others > 0 else named


def accept(plan: Plan, files: SweepFiles) -> Plan:
    """Return the plan if every trial can run. Its withheld error texts replace texts of an earlier plan in the private
    folder. Raises: InvalidInput with one line per reason of refusal.
    """
    hidden = [f"{refusal.key}\n{refusal.hidden}" for refusal in plan.refusals if refusal.hidden]
    if hidden:
        make_folders(str(files.local_folder), 0o755)
        write_private(files.error, "\n".join(hidden).encode())
    else:
        with contextlib.suppress(StorageError):
            delete(files.error)
    if plan.refusals:
        where = [f"the full texts of these errors, which may quote the data, are in {files.error}"] if hidden else []
        raise InvalidInput("\n".join([*plan.reasons(), *where]))
    return plan


def worst_cases(trace: Trace, delta: float, sweep: SweepSpec) -> tuple[PrivacyEstimate, ...]:
    """Return the epsilon of a run by the sweep's accountant, then by each of its other accountants."""
    return tuple(account(trace, delta, name) for name in (sweep.privacy.accountant, *sweep.accounting.also))


def accounts_examples(trace: Trace, planned: PlannedTrial, sweep: SweepSpec) -> bool:
    """Return whether the examples of a trial are accounted for: it is private, has norms, and is no candidate or
    selection.
    """
    is_single = trace.is_private and trace.selection is None  # no individual epsilon is known for a selection
    return is_single and not planned.spec.norms.are_off and not (sweep.adapted and sweep.adapted.is_tuning)


def reasons_of(sweep: SweepSpec, spec: TrialSpec, of_data: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return why every epsilon of the trial ``spec`` of ``sweep`` is an estimate; none for a trial without noise.

    `of_data`: what was read off the rows, from the description of the data or from the trial's result.
    """
    of_sweep: dict[Reason, bool] = {
        "not_confirmed": sweep.drafted,
        "unaccounted_tuning": sweep.tune is not None and sweep.tune.privacy == "unaccounted",
        "unaccounted_scheduler": sweep.selects_unaccounted,
    }
    chosen = (reason for reason, holds in of_sweep.items() if holds and spec.is_private)
    return union((reasons_of_trial(spec, of_data), chosen))
