"""What a trial found, as stored in its ``result.json``."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter, ValidationError

from accounting.errors import DataCorruption
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import Trace
from accounting.records.sealed import read_sealed, write_sealed
from orchestration.records.published import IndividualStatistics, ReportEpoch
from workers.attacks import AttackResults
from workers.evaluation import Evaluation
from workers.history import TrainingResult
from workers.spec import TrialSpec


@dataclass(frozen=True)
class TrialResult:
    """Everything about a finished trial that may be shown. Its presence on disk says that the trial is complete.

    worst_case: by the accountant of the sweep, the one it was calibrated with. others: by further accountants.
    groups: for each group size of the sweep. epsilons: a bound on the cost after each epoch. individuals:
    as the sweep discloses them; exact statistics lie in ``private/``. attacks: empty unless the sweep discloses exact
    results; those of every attacked trial lie in ``private/``.
    """

    key: str
    spec: TrialSpec
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    epsilons: tuple[float, ...]
    training: TrainingResult
    individuals: IndividualStatistics | None
    started: float
    ended: float
    """When training started and ended in the run that finished it, in seconds since 1970 UTC."""
    attacks: AttackResults = field(default_factory=AttackResults)
    digests: dict[str, str] = field(default_factory=dict)
    """sha256 of the trial's other public files, by name; those of private files are in `TrialFiles.private_digests`."""

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def evaluation(self) -> Evaluation:
        return self.training.evaluation


@dataclass(frozen=True)
class StoppedTrial:
    """What a trial that the scheduler stopped had cost and reached by then. It is over: no resume trains it on.

    trace: what was run until the stop, of which worst_case, others and groups are the cost, everything included that
    the trial would have released in the end. epoch: how many it completed. history: the epochs that were seen by the
    run of the sweep that stopped it.
    """

    key: str
    spec: TrialSpec
    trace: Trace
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    epoch: int
    evaluation: Evaluation
    history: tuple[ReportEpoch, ...]
    started: float
    ended: float

    @property
    def steps(self) -> int:
        return self.trace.steps


StoredResult = TrialResult | StoppedTrial
_RESULT: TypeAdapter[StoredResult] = TypeAdapter(StoredResult, config=ConfigDict(ser_json_inf_nan="strings"))
_STATISTICS = TypeAdapter(IndividualStatistics)


def write_result(uri: str, result: StoredResult) -> None:
    write_sealed(uri, _RESULT.dump_json(result))


def read_result(uri: str) -> StoredResult | None:
    """The stored result; None while the trial is not over. Raises `DataCorruption` when it is damaged."""
    next_step = "delete it and resume, which rebuilds it; of a trial that was stopped, delete the whole folder"
    content = read_sealed(uri, next_step)
    try:
        return None if content is None else _RESULT.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} is no result of this version of dpsweep; {next_step}") from error


def write_statistics(uri: str, statistics: IndividualStatistics, private: bool) -> None:
    """Store statistics of training examples; exact ones are ``private`` data."""
    write_sealed(uri, _STATISTICS.dump_json(statistics), private)


def read_statistics(uri: str, next_step: str) -> IndividualStatistics | None:
    """The stored statistics, if any. Raises `DataCorruption`, which ends in the next step, when they are damaged."""
    content = read_sealed(uri, next_step)
    try:
        return None if content is None else _STATISTICS.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} holds no statistics of this version of dpsweep; {next_step}") from error
