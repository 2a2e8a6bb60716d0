"""What a trial found, as stored in its ``result.json``."""

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
    """The trace that `dataclasses.asdict` made ``plain``; ValueError where it is none."""
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
    """The one of ``kinds`` whose fields are those of ``row``: no two kinds share theirs."""
    return next(kind(**row) for kind in kinds if {each.name for each in fields(kind)} == row.keys())


StoredTrace = Annotated[Trace, PlainSerializer(asdict), PlainValidator(_trace)]
"""A trace inside a JSON file."""


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
