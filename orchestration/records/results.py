"""Results of trials, as stored in ``result.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from accounting.errors import DataCorruption, DpsweepError
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from accounting.records.sealed import read_sealed, write_sealed
from accounting.samplings import SAMPLINGS
from orchestration.records.published import IndividualStatistics, PublishedEpoch
from workers.attacks import AttackResults
from workers.evaluation import Evaluation
from workers.history import TrainingResult
from workers.spec import TrialSpec


def _trace(plain: Trace | Mapping[str, Any]) -> Trace:
    """Rebuild the trace from its `dataclasses.asdict` form. Raises ValueError where that fails."""
    if isinstance(plain, Trace):
        return plain
    try:
        segments = (
            Segment(
                **{
                    **row,
                    "sampling": _with_fields(SAMPLINGS.values(), row["sampling"]),
                    "side_queries": tuple(SideQuery(**query) for query in row["side_queries"]),
                }
            )
            for row in plain["segments"]
        )
        releases = (_with_fields((GaussianRelease, PureRelease), row) for row in plain["releases"])
        return Trace(**{**plain, "segments": tuple(segments), "releases": tuple(releases)})
    except (LookupError, TypeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


def _with_fields(kinds: Iterable[type[Any]], row: Mapping[str, Any]) -> Any:
    """Build the class among ``kinds`` whose field names equal the keys of ``row``; no two classes have equal fields."""
    return next(kind(**row) for kind in kinds if {each.name for each in fields(kind)} == row.keys())


StoredTrace = Annotated[Trace, PlainSerializer(asdict), PlainValidator(_trace)]
"""A trace inside a JSON file."""


@dataclass(frozen=True)
class TrialResult:
    """Everything about a finished trial that may be shown. A trial is complete once its result is on disk.

    worst_case: by the sweep's accountant, which also calibrated the trial. others: by further accountants. groups: for
    each group size of the sweep. epsilons: an upper bound on epsilon after each epoch. individuals: statistics under
    the sweep's release mode; exact ones are in ``private/``. attacks: empty unless the mode shows exact results;
    results of all attacked trials are in ``private/``.
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
        """Steps trained."""
        return self.training.steps

    @property
    def evaluation(self) -> Evaluation:
        """Of the final model, on test data."""
        return self.training.evaluation


@dataclass(frozen=True)
class StoppedTrial:
    """Cost and evaluation of a trial at the time the scheduler stopped it. A resume does not continue it.

    trace: what was run until the stop, plus every release that the finished trial would have made; worst_case, others
    and groups are its cost. epoch: number of completed epochs. history: the epochs completed in the run of the sweep
    that stopped the trial.
    """

    key: str
    spec: TrialSpec
    trace: StoredTrace
    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]
    epoch: int
    evaluation: Evaluation
    history: tuple[PublishedEpoch, ...]
    started: float
    ended: float

    @property
    def steps(self) -> int:
        """Steps trained."""
        return self.trace.steps


StoredResult = TrialResult | StoppedTrial
_RESULT: TypeAdapter[StoredResult] = TypeAdapter(StoredResult, config=ConfigDict(ser_json_inf_nan="strings"))
_STATISTICS = TypeAdapter(IndividualStatistics)


def write_result(uri: str, result: StoredResult) -> None:
    """Store the result with a checksum; this marks the trial as over. Raises: StorageError."""
    write_sealed(uri, _RESULT.dump_json(result))


def read_result(uri: str) -> StoredResult | None:
    """The stored result; None if the trial is not over. Raises `DataCorruption` when the file is damaged."""
    next_step = "delete it and resume, which rebuilds it; for a stopped trial, delete its whole folder"
    content = read_sealed(uri, next_step)
    try:
        return None if content is None else _RESULT.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} is no result of this version of dpsweep; {next_step}") from error


def write_statistics(uri: str, statistics: IndividualStatistics, private: bool) -> None:
    """Store statistics of training examples. ``private``: readable by the owner only, as exact statistics must be."""
    write_sealed(uri, _STATISTICS.dump_json(statistics), private)


def read_statistics(uri: str, next_step: str) -> IndividualStatistics | None:
    """The stored statistics, or None. Raises: DataCorruption, ending in ``next_step``, when the file is damaged."""
    content = read_sealed(uri, next_step)
    try:
        return None if content is None else _STATISTICS.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} holds no statistics of this version of dpsweep; {next_step}") from error
