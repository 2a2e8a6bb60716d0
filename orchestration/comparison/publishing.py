"""Converts points, statuses and results of trials to `PublishedTrial`, which may be shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.store.published import (
    PublishedAttack,
    PublishedAudit,
    PublishedCourse,
    PublishedDepartures,
    PublishedEpoch,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
    TrialState,
)
from dpsweep.orchestration.store.results import StoppedTrial, StoredResult, TrialResult
from dpsweep.orchestration.store.status import TrialStatus
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.evaluation.scores import Evaluation, cost_of_privacy
from dpsweep.workers.tasks import main_score, task_called
from dpsweep.workers.training.history import EpochRecord, Progress


def finished(point: GridPoint, result: TrialResult, baseline: TrialResult | None) -> PublishedTrial:
    """Return a finished trial, compared with its baseline if given.

    Shows ``result.individuals`` and ``result.attacks`` as they are, exact or not.
    """
    return PublishedTrial(
        key=point.key,
        labels=point.labels,
        state=TrialState.FINISHED,
        privacy=_privacy(result),
        quality=_quality(
            result.training.evaluation,
            baseline.training.evaluation if baseline else None,
            _courses(result),
            result.attacks.training_scores,
            result.group_names,
        ),
        individuals=result.individuals,
        attacks=tuple(
            PublishedAttack(group.name, group.examples, group.success_rate, group.standard_error)
            for group in result.attacks.loss_threshold
        ),
        memberships=result.attacks.rmia,
        exposure=result.attacks.exposure,
        departures=tuple(
            PublishedDepartures(result.training.group_names[group.group], group.examples, tuple(group.left))
            for group in result.counters.departures
        ),
        audit=published_audit(result.attacks.audit),
        history=tuple(
            replace(recorded_epoch(*each), clipping_bounds=each[0].bounds)
            for each in zip(result.training.history, result.epsilons, strict=True)
        ),
        notes=_notes(result),
        started=result.started or None,  # 0 for the trial of a private selection, whose times are not shown
        ended=result.ended or None,
        device=result.device,
        references=result.training.references,
    )


def stopped(point: GridPoint, result: StoppedTrial) -> PublishedTrial:
    """Return a stopped trial. It is not compared with its baseline, which was trained for longer.

    Shows ``result.individuals`` as they are, as `finished`.
    """
    measured = "accuracy" if result.evaluation.accuracy is not None else "loss"
    found = f"{measured} and ε are those" if result.spec.is_private else f"{measured} is that"
    return PublishedTrial(
        key=point.key,
        labels=point.labels,
        state=TrialState.STOPPED,
        error=f"by the scheduler after epoch {result.epoch} of {result.spec.epochs}; its {found} of that moment",
        privacy=_privacy(result),
        quality=_quality(result.evaluation, None, {}, None),
        individuals=result.individuals,
        history=result.history,
        notes=in_words(result.worst_case.reasons),
        started=result.started,
        ended=result.ended,
        device=result.device,
    )


def unfinished(point: GridPoint, status: TrialStatus) -> PublishedTrial:
    """Return a trial without a result: pending, running or failed."""
    return PublishedTrial(
        key=point.key,
        labels=point.labels,
        state=status.state,
        error=status.error,
        privacy=None if point.is_private else PublishedPrivacy(math.inf, point.spec.delta, "none", "none"),
        history=status.history,
        started=status.started,
        ended=status.ended,
        device=status.device,
    )


def _privacy(result: StoredResult) -> PublishedPrivacy:
    worst = result.worst_case
    return PublishedPrivacy(
        epsilon=worst.epsilon,
        delta=worst.delta,
        accountant=worst.accountant,
        kind=worst.kind if worst.is_private else "none",
        adjacency=worst.adjacency,
        noise_strategy=result.spec.noise.strategy,
        squared_errors=result.training.squared_errors if isinstance(result, TrialResult) else None,
        unit=result.spec.unit.name,
        group_epsilons={estimate.group_size: estimate.epsilon for estimate in result.groups},
        group_kinds={estimate.group_size: estimate.kind for estimate in result.groups},
        risks={risk.group_size: risk for risk in result.risks},
        reasons=worst.reasons,
    )


def published_audit(found: AuditResult | None) -> PublishedAudit | None:
    """Return the audit of a trial itself as shown; None without one."""
    if found is None:
        return None
    return PublishedAudit(
        name="",
        kind=found.kind,
        transcript=found.transcript,
        canaries=max((test.canaries for test in found.tests), default=found.everyone.canaries),
        confidence=found.confidence,
        of_canary=found.of_canary,
        lower_bound=found.everyone.epsilon,
        lower_bounds={test.name: test.lower_bound for test in found.tests},
        groups={group.name: group.epsilon for group in found.groups},
        guesses=found.everyone.guesses,
        correct=found.everyone.correct,
    )


def _courses(result: TrialResult) -> dict[str, PublishedCourse]:
    """Return the course of training of each group, by its name."""
    training = result.training
    batch_size = result.spec.sampling.expected_size(training.train_size)
    found = {}
    for course in result.counters.courses:
        history = training.history[len(training.history) - len(course.norms) :]
        expected = batch_size * course.examples / training.train_size
        noises = [record.noise_multiplier * (record.sensitivity or 0.0) for record in history]
        found[training.group_names[course.group]] = PublishedCourse(
            course.examples,
            tuple(course.losses),
            tuple(course.norms),
            tuple(course.biases),
            tuple(std * math.sqrt(training.parameters) / expected for std in noises),
        )
    return found


def _quality(
    evaluation: Evaluation,
    baseline: Evaluation | None,
    courses: Mapping[str, PublishedCourse],
    training: Evaluation | None,
    group_names: tuple[str, ...] = (),
) -> PublishedQuality:
    """Return the published evaluation on test data.

    training: the evaluation on training examples, if it may be shown. group_names: of all groups, shown or not.
    """
    shown = {group.name for group in evaluation.groups}
    on_training = {each.name: main_score(each.accuracy, each.scores) for each in training.groups} if training else {}
    changes: Mapping[str, float] = cost_of_privacy(evaluation, baseline) if baseline else {}
    change = _change(evaluation.main, baseline.main if baseline else None)
    return PublishedQuality(
        accuracy=evaluation.accuracy,
        loss=evaluation.loss,
        accuracy_change=_change(evaluation.accuracy, baseline.accuracy if baseline else None),
        groups=tuple(
            PublishedGroup(
                group.name,
                group.examples,
                group.accuracy,
                group.loss,
                None if group.accuracy is None else changes.get(group.name),
                group.counts,
                courses.get(group.name),
                _with_change(evaluation.task, group.scores, changes.get(group.name)),
                on_training.get(group.name),
                group.user_accuracy,
            )
            for group in evaluation.groups
        ),
        fairness=evaluation.fairness,
        counts=evaluation.counts,
        task=evaluation.task,
        scores=_with_change(evaluation.task, evaluation.scores, change),
        parts=evaluation.parts,
        on_training=main_score(training.accuracy, training.scores) if training else None,
        hidden=tuple(name for name in group_names if name not in shown),
        user_accuracy=evaluation.user_accuracy,
        constant=evaluation.constant,
    )


def _change(value: float | None, before: float | None) -> float | None:
    return None if value is None or before is None or math.isnan(value - before) else value - before


def _with_change(task: str, scores: Mapping[str, float], change: float | None) -> Mapping[str, float]:
    """Return the scores with the change of the main score against the baseline, if there are both."""
    return scores if change is None or not scores else {**scores, f"{task_called(task).main}_change": change}


def recorded_epoch(record: EpochRecord, epsilon: float) -> PublishedEpoch:
    """Return an epoch of a trial, without clipping bounds, as `epoch` does. epsilon: of the steps by its end."""
    measured = _measured(record.test, record.public, epsilon)
    return PublishedEpoch(record.epoch, record.step, record.noise_multiplier, metrics=measured)


def epoch(progress: Progress, epsilon: float) -> PublishedEpoch:
    """Return the epoch that a running trial has just completed. epsilon: upper bound on the cost of the steps so
    far.
    """
    return PublishedEpoch(
        epoch=progress.epoch - 1,
        step=progress.step,
        noise_multiplier=progress.noise_multiplier,
        metrics=_measured(progress.evaluation, progress.public_evaluation, epsilon),
    )


def _measured(test: Evaluation, public: Evaluation | None, epsilon: float) -> dict[str, float]:
    return {
        **({"test_accuracy": test.accuracy} if test.accuracy is not None else {}),
        "test_loss": test.loss,
        **{f"test_{name}": value for name, value in test.scores.items()},
        **({"public_accuracy": public.accuracy} if public and public.accuracy is not None else {}),
        **({f"public_{name}": value for name, value in public.scores.items()} if public else {}),
        **({"epsilon": epsilon} if epsilon < float("inf") else {}),
    }


def _notes(result: TrialResult) -> tuple[str, ...]:
    notes = result.training.notes
    if lost := result.counters.non_finite_gradients:
        notes += (f"gradients of examples that were not finite, and weighed nothing in their steps: {lost:,}",)
    if (told := result.counters.texts) and (told.cut or told.empty):
        some = f"{told.cut:,} of {told.texts:,} training texts were cut at {told.length:,} tokens"
        notes += (f"{some}; {told.empty:,} have no token",)
    if not result.spec.is_private:
        return (*notes, "trained without noise: nothing protects the training data; keep its model private")
    return (*notes, *in_words(result.worst_case.reasons))
