"""Results of trials, as stored in ``result.json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from dpsweep.accounting.attacks import AttackRisk
from dpsweep.accounting.errors import START_ANEW, DataCorruption
from dpsweep.accounting.individual import FILTERED
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, weakened
from dpsweep.accounting.records.sealed import read_private_sealed, read_sealed, write_private_sealed, write_sealed
from dpsweep.orchestration.store.attempts import StoredTrace
from dpsweep.orchestration.store.published import IndividualStatistics, PublishedEpoch
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.workers.evaluation.attack_results import AttackResults
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.machine.memory import DeviceUse
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.counters import Counters
from dpsweep.workers.training.history import TrainingResult


def _as_proven(statistics: IndividualStatistics) -> IndividualStatistics:
    """Correct the kind of statistics that claim a guarantee although no filter enforced them.

    Without a filter the epsilon_i depend on the run's output, so they are output-specific.
    """
    proven = statistics.kind != "guarantee" or statistics.method == FILTERED
    return statistics if proven else replace(statistics, kind="output_specific")


Instant = Annotated[float, Field(ge=0.0, lt=253_402_300_800.0)]
"""A time in seconds since 1970 UTC, before the year 10000, where calendars end."""
StoredStatistics = Annotated[IndividualStatistics, AfterValidator(_as_proven)]
"""Statistics inside a JSON file."""


@dataclass(frozen=True)
class TrialResult:
    """Everything about a finished trial that may be shown. A trial is complete once its result is on disk.

    `worst_case`: epsilon by the sweep's accountant, which also calibrated the trial.
    `others`: epsilon by further accountants.
    `groups`: epsilon for each group size of the sweep.
    `risks`: bounds on attacks, for one record and each group size.
    `epsilons`: an upper bound on epsilon after each epoch.
    `individuals`: statistics under the sweep's release mode; exact ones are in ``private/``.
    `attacks`: empty unless the mode shows exact results; results of all attacked trials are in ``private/``.
    """

    key: str
    spec: TrialSpec
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    epsilons: tuple[float, ...]
    training: TrainingResult
    individuals: StoredStatistics | None
    started: Instant
    ended: Instant
    """When training started and ended in the run that finished it, in seconds since 1970 UTC."""
    attacks: AttackResults = field(default_factory=AttackResults)
    risks: tuple[AttackRisk, ...] = ()
    counters: Counters = field(default_factory=Counters)
    """Exact counts and means over training examples; shown only where attacks are shown."""
    reasons: tuple[Reason, ...] = ()
    """Why every epsilon of the trial is an estimate, whatever its course (`sweeps.planned.reasons_of`)."""
    digests: dict[str, str] = field(default_factory=dict)
    """sha256 of the trial's other public files, by name; those of private files are in `TrialFiles.private_digests`."""
    device: DeviceUse | None = None

    def __post_init__(self) -> None:
        groups = [each.group for each in self.counters.departures] + [each.group for each in self.counters.courses]
        ends = [record.step for record in self.training.history]
        if (
            len(self.epsilons) != len(ends)
            or ends != sorted({*ends} - {0})
            or max(groups, default=-1) >= len(self.group_names)
        ):
            raise DataCorruption(
                f"the result of trial {self.key} counts epochs or groups that its training did not have; restore the "
                f"trial from a backup, or {START_ANEW}"
            )

    @property
    def steps(self) -> int:
        """Steps trained."""
        return self.training.steps

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups of training examples, by number."""
        return self.training.group_names

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the final model on test data."""
        return self.training.evaluation


@dataclass(frozen=True)
class StoppedTrial:
    """Cost and evaluation of a trial at the time the scheduler stopped it. A resume does not continue it.

    `trace`: the steps until the stop, plus every release that the finished trial would have made.
    `worst_case`, `others`, `groups`, `risks`: the cost of that trace, an estimate (`Trace.ended_by_results`) unless a
    filter enforced it.
    `epoch`: number of completed epochs, which `history` holds.
    `reasons`: as of a `TrialResult`; individuals, digests too, once its examples are accounted.
    """

    key: str
    spec: TrialSpec
    trace: StoredTrace
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    epoch: NonNegativeInt
    evaluation: Evaluation
    history: tuple[PublishedEpoch, ...]
    started: Instant
    ended: Instant
    risks: tuple[AttackRisk, ...] = ()
    individuals: StoredStatistics | None = None
    group_names: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)
    device: DeviceUse | None = None

    @property
    def steps(self) -> int:
        """Steps trained."""
        return self.trace.steps

    @property
    def is_accounted(self) -> bool:
        """Return whether its examples were accounted, so that its norms, trace and epsilons are stored."""
        return bool(self.digests)


@dataclass(frozen=True)
class Costs:
    """Worst-case costs of a run: by the sweep's accountant, by the ``others``, and for each group size of the sweep.

    `risks`: bounds on every attack, for one record and for each group size; none for a run without noise or a
    selection.
    """

    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    risks: tuple[AttackRisk, ...] = ()


StoredResult = TrialResult | StoppedTrial
_Claiming = TypeVar("_Claiming", bound=Costs | StoredResult)


def all_weakened(found: _Claiming, reasons: Iterable[Reason]) -> _Claiming:
    """Return costs, or a result, with every epsilon and bound on attacks as an estimate for these reasons.

    Numbers stay as they are. Unchanged without any reason.
    """
    return replace(
        found,
        worst_case=weakened(found.worst_case, reasons),
        others=tuple(weakened(each, reasons) for each in found.others),
        groups=tuple(weakened(each, reasons) for each in found.groups),
        risks=tuple(weakened(each, reasons) for each in found.risks),
    )


_RESULT: TypeAdapter[StoredResult] = TypeAdapter(StoredResult, config=ConfigDict(ser_json_inf_nan="strings"))
_STATISTICS: TypeAdapter[IndividualStatistics] = TypeAdapter(StoredStatistics)


def write_result(uri: str, result: StoredResult) -> None:
    """Store the result with a checksum; this marks the trial as over. Raises: StorageError.

    A result with exact statistics or attacks of training examples is private data.
    """
    shown = result.individuals
    exact = shown is not None and release_mode(shown.disclosure).is_sensitive
    if isinstance(result, TrialResult):
        exact = exact or result.attacks != AttackResults() or result.counters != Counters()
    write_sealed(uri, _RESULT.dump_json(result), exact)


def read_result(uri: str) -> StoredResult | None:
    """Return the stored result; None if the trial is not over. Raises: DataCorruption if the file is damaged."""
    next_step = f"delete it and resume, which rebuilds it; for a stopped trial, {START_ANEW}"
    content = read_sealed(uri, next_step)
    try:
        return None if content is None else _RESULT.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} is no result of this version of dpsweep; {next_step}") from error


def read_result_of(key: str, uri: str) -> StoredResult | None:
    """Return `read_result` of the trial ``key``. Raises: DataCorruption also for the result of another trial."""
    found = read_result(uri)
    if found is not None and found.key != key:
        raise DataCorruption(f"{uri} is the result of another trial than {key}; restore it from a backup")
    return found


def write_statistics(uri: str, statistics: IndividualStatistics) -> None:
    """Store statistics of training examples that were released with noise."""
    write_sealed(uri, _STATISTICS.dump_json(statistics))


def write_exact_statistics(uri: str, statistics: IndividualStatistics) -> None:
    """Store exact statistics of training examples: private data."""
    write_private_sealed(uri, _STATISTICS.dump_json(statistics))


def read_statistics(uri: str, next_step: str) -> IndividualStatistics | None:
    """Return the released statistics, or None. Raises: DataCorruption, ending in ``next_step``, if the file is
    damaged.
    """
    return _statistics(read_sealed(uri, next_step), uri, next_step)


def read_exact_statistics(uri: str, next_step: str) -> IndividualStatistics | None:
    """Return the exact statistics, or None. Raises: DataCorruption, ending in ``next_step``, if the file is damaged."""
    return _statistics(read_private_sealed(uri, next_step), uri, next_step)


def _statistics(content: bytes | None, uri: str, next_step: str) -> IndividualStatistics | None:
    try:
        return None if content is None else _STATISTICS.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} holds no statistics of this version of dpsweep; {next_step}") from error
