"""What a trial found, as stored in its ``result.json``, and how it is shown beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from accounting.accountants import account
from accounting.errors import DataCorruption
from accounting.estimates import Kind, PrivacyEstimate
from accounting.mechanism import Trace
from accounting.records.shards import Epsilons
from accounting.release import ReleasedStatistics
from orchestration.records.published import (
    GroupEpsilon,
    Histogram,
    IndividualStatistics,
    Label,
    ReportEpoch,
    ReportGroup,
    ReportPrivacy,
    ReportQuality,
    ReportTrial,
)
from orchestration.records.sealed import read_sealed, write_sealed
from workers.evaluation import Evaluation, cost_of_privacy
from workers.history import Progress, TrainingResult
from workers.spec import TrialSpec

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_BINS = 30


@dataclass(frozen=True)
class TrialResult:
    """Everything about a finished trial that may be shown. Its presence on disk says that the trial is complete.

    worst_case: by the accountant of the sweep, the one it was calibrated with. others: by further accountants.
    groups: for each group size of the sweep. epsilons: a bound on the cost after each epoch. individuals:
    as the sweep discloses them; exact statistics lie in ``private/``.
    """

    key: str
    labels: dict[str, Label]
    baseline: str | None
    target_epsilon: float | None
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
    labels: dict[str, Label]
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


def claimed(epsilons: Epsilons, worst_case: PrivacyEstimate) -> Kind:
    """What statistics of epsilons capped at the worst case may claim: no more than either of the two."""
    return epsilons.kind if worst_case.kind == "guarantee" else "estimate"


def exact_statistics(
    epsilons: Epsilons, group_names: tuple[str, ...], worst_case: PrivacyEstimate
) -> IndividualStatistics:
    """Exact statistics of the epsilon_i of all training examples: private data.

    The worst case holds for every example too, so where it is lower than an example's own bound it takes its place.
    """
    values = np.minimum(epsilons.upper, worst_case.epsilon)
    counts, edges = np.histogram(values, bins=_BINS, range=(0.0, worst_case.epsilon))
    return IndividualStatistics(
        disclosure="raw",
        kind=claimed(epsilons, worst_case),
        mean=float(values.mean()),
        median=float(np.median(values)),
        quantiles={q: float(np.quantile(values, q)) for q in _QUANTILES},
        groups=tuple(
            _group_epsilon(name, values[epsilons.groups == group])
            for group, name in enumerate(group_names)
            if np.any(epsilons.groups == group)
        ),
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.astype(float).tolist())),
    )


def released_statistics(
    released: ReleasedStatistics, group_names: tuple[str, ...], kind: Kind, cost: float
) -> IndividualStatistics:
    """Statistics released with differential privacy, of which ``cost`` is the epsilon of the release alone."""
    return IndividualStatistics(
        disclosure="private",
        kind=kind,
        mean=released.mean_epsilon,
        median=released.quantiles.get(0.5),
        quantiles=released.quantiles,
        groups=tuple(
            GroupEpsilon(group_names[group.group], group.mean_epsilon, group.mean_standard_error, group.examples)
            for group in released.groups
        ),
        histogram=Histogram(released.edges, released.histogram),
        release_epsilon=cost,
    )


def _group_epsilon(name: str, values: NDArray[np.float64]) -> GroupEpsilon:
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return GroupEpsilon(name, float(values.mean()), deviation / len(values) ** 0.5, float(len(values)))


def epsilon_after(trace: Trace, step: int, delta: float) -> float:
    """The worst case of the run up to ``step`` by RDP: an upper bound that is cheap enough to watch."""
    return account(trace.until(step), delta, "rdp").epsilon


def shown(result: TrialResult, baseline: TrialResult | None, individuals: IndividualStatistics | None) -> ReportTrial:
    """The trial as reports and MLflow show it, with statistics of its training examples as given."""
    return ReportTrial(
        key=result.key,
        labels=result.labels,
        status="finished",
        privacy=_privacy(result),
        quality=_quality(result.training.evaluation, baseline.training.evaluation if baseline else None),
        individuals=individuals,
        history=_history(result),
        wall_seconds=result.ended - result.started,
        notes=_notes(result),
    )


def shown_stopped(stopped: StoppedTrial) -> ReportTrial:
    """A trial that the scheduler stopped, without comparison: its model was not trained as long as the baseline's."""
    found = "accuracy and ε are those" if stopped.spec.is_private else "accuracy is that"
    return ReportTrial(
        key=stopped.key,
        labels=stopped.labels,
        status="stopped",
        error=f"by the scheduler after epoch {stopped.epoch} of {stopped.spec.epochs}; its {found} of that moment",
        privacy=_privacy(stopped),
        quality=_quality(stopped.evaluation, None),
        history=stopped.history,
        wall_seconds=stopped.ended - stopped.started,
    )


def _privacy(result: StoredResult) -> ReportPrivacy:
    worst = result.worst_case
    return ReportPrivacy(
        epsilon=worst.epsilon,
        delta=worst.delta,
        accountant=worst.accountant,
        kind=worst.kind,
        adjacency=worst.adjacency,
        group_epsilons={estimate.group_size: estimate.epsilon for estimate in result.groups},
    )


def _quality(evaluation: Evaluation, baseline: Evaluation | None) -> ReportQuality:
    changes: Mapping[str, float] = cost_of_privacy(evaluation, baseline) if baseline else {}
    return ReportQuality(
        accuracy=evaluation.accuracy,
        loss=evaluation.loss,
        accuracy_change=evaluation.accuracy - baseline.accuracy if baseline else None,
        groups=tuple(
            ReportGroup(group.name, group.examples, group.accuracy, group.loss, changes.get(group.name))
            for group in evaluation.groups
        ),
        fairness=evaluation.fairness,
    )


def _history(result: TrialResult) -> tuple[ReportEpoch, ...]:
    return tuple(
        ReportEpoch(
            epoch=record.epoch,
            step=record.step,
            noise_multiplier=record.noise_multiplier,
            clipping_bounds=record.bounds,
            metrics=_measured(record.test, record.public, epsilon),
        )
        for record, epsilon in zip(result.training.history, result.epsilons, strict=True)
    )


def shown_epoch(progress: Progress, epsilon: float) -> ReportEpoch:
    """The epoch that a running trial has just completed, at a bound on what it has cost by then."""
    return ReportEpoch(
        epoch=progress.epoch - 1,
        step=progress.step,
        noise_multiplier=progress.noise_multiplier,
        metrics=_measured(progress.evaluation, progress.public_evaluation, epsilon),
    )


def _measured(test: Evaluation, public: Evaluation | None, epsilon: float) -> dict[str, float]:
    return {
        "test_accuracy": test.accuracy,
        "test_loss": test.loss,
        **({"public_accuracy": public.accuracy} if public else {}),
        **({"epsilon": epsilon} if epsilon < float("inf") else {}),
    }


def _notes(result: TrialResult) -> tuple[str, ...]:
    research = "trained with noise from a known seed: for experiments, not for release"
    return (*result.training.notes, *((research,) if result.training.research_mode and result.spec.is_private else ()))
