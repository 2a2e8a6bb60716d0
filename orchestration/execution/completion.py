"""Turn a trained or stopped trial into its result: account, summarise, release statistics, store.

If a scheduler stopped the trial, its cost and evaluation are stored first, so that no later run trains it further. All
further steps can be repeated: a process with the trial's resources stores the norms of its last steps and its trace,
and parts are accounted as in any trial. The checkpoint, with the noise key in it, is deleted as soon as the trace is
stored, because no step is left to train.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import risk_of
from dpsweep.accounting.calibration.so_far import cost_of_steps, cost_so_far
from dpsweep.accounting.individual import individual_epsilons, individual_reasons
from dpsweep.accounting.jobs.examples import AccountingJob, Scatter, account_in_process, store_epsilons
from dpsweep.accounting.jobs.release import ReleaseSpec, release_counted
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.epsilon_files import Epsilons, StoredEpsilons
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.statistics import pearson
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.example_statistics import density, exact_statistics, released_statistics
from dpsweep.orchestration.store.integrity import note_digests
from dpsweep.orchestration.store.published import EstimateQuality, IndividualStatistics, PublishedEpoch
from dpsweep.orchestration.store.release_modes import release_mode
from dpsweep.orchestration.store.results import (
    Costs,
    StoppedTrial,
    TrialResult,
    all_weakened,
    read_statistics,
    write_exact_statistics,
    write_result,
    write_statistics,
)
from dpsweep.orchestration.sweeps.planned import PlannedTrial, accounts_examples, worst_cases
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.evaluation.attack_results import AttackResults, read_attacks
from dpsweep.workers.machine.checkpoint import forget_checkpoint
from dpsweep.workers.machine.memory import read_device_use
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.training.counters import Counters, read_counters
from dpsweep.workers.training.history import Progress, TrainingResult, read_training_result


def quality_of_estimates(
    files: TrialFiles, epsilons: Iterable[Epsilons], trace: Trace, worst_case: float
) -> EstimateQuality:
    """Compare estimated ``epsilons`` (parts) with epsilons from ``private/exact-norms``, recorded at every step.

    Both sides are accounted by the same method and capped at the worst case, so they differ only in how often norms
    were recorded (paper A, Section 5.1). The result is private data: it is computed from single training examples.
    Raises: DataCorruption for shards that are missing, truncated or altered.
    """
    shards = NormShards(files.exact_norms)
    tracked = [shards.read(part) for part in shards.parts]
    ids = np.concatenate([part.example_ids for part in tracked])
    own = Epsilons.concatenate([part.of(np.isin(part.example_ids, ids)) for part in epsilons])
    paid = [individual_epsilons(part.steps, part.contributions, trace, own.delta, own.method).upper for part in tracked]
    order = np.argsort(own.example_ids)
    rows = order[np.searchsorted(own.example_ids, ids, sorter=order)]
    actual = np.minimum(np.concatenate(paid), worst_case)
    estimated = np.minimum(own.upper[rows], worst_case)
    errors = np.abs(estimated - actual)
    return EstimateQuality(
        examples=len(actual),
        correlation=pearson(actual, estimated),
        mean_error=float(errors.mean()),
        largest_error=float(errors.max()),
        density=density(actual, estimated),
    )


@dataclass(frozen=True)
class Times:
    """When the trial started and ended training, in seconds since 1970 UTC."""

    started: float
    ended: float


def complete_trial(
    planned: PlannedTrial,
    files: TrialFiles,
    sweep: SweepSpec,
    times: Times,
    scatter: Scatter = account_in_process,
    releasing: Callable[[], None] = lambda: None,
) -> TrialResult:
    """Account a trained trial and write its ``result.json`` as the last step, which marks the trial as complete.

    Safe to repeat after an interruption at any point: accounting is idempotent, and statistics already released with
    noise are reused, because releasing them again would cost privacy again. `scatter`: accounts the parts of the trial.
    `releasing`: called right before statistics are drawn, so that an interruption before then counts no release.
    Raises: DataCorruption for damaged or missing files, StorageError if results cannot be written.
    """
    trace = read_trace(files.trace)
    found = _costs(trace, planned, sweep)
    individuals: IndividualStatistics | None = None
    if accounts_examples(trace, planned, sweep):
        individuals = individual_statistics(planned, files, sweep, found.worst_case, scatter, releasing)
    if trace.selection is not None:
        times = Times(0.0, 0.0)  # the time at which the best candidate was trained reveals how many were drawn
    bound = bounding_trace(trace, planned.trace) or trace
    shows_exact = release_mode(sweep.release.name).statistics == "exact"
    with _ONE_AT_A_TIME:
        training = read_training_result(files.training)
        result = TrialResult(
            key=planned.key,
            spec=planned.spec,
            worst_case=found.worst_case,
            others=found.others,
            groups=found.groups,
            risks=found.risks,
            reasons=planned.reasons,
            epsilons=_by_epoch(bound, training, found.worst_case),
            training=training,
            individuals=individuals,
            started=times.started,
            ended=times.ended,
            attacks=read_attacks(files.attacks) if shows_exact else AttackResults(),
            counters=read_counters(files.private_training) if shows_exact else Counters(),
            digests=note_digests(files),
            device=read_device_use(files.device),
        )
        write_result(files.result, result)
    return result


def individual_statistics(
    planned: PlannedTrial,
    files: TrialFiles,
    sweep: SweepSpec,
    worst: PrivacyEstimate,
    scatter: Scatter,
    releasing: Callable[[], None],
) -> IndividualStatistics | None:
    """Account all examples and store their epsilons; return the statistics that the release mode shows, or None.

    worst: the worst case, at which every epsilon is capped. Raises: as `complete_trial`.
    """
    release, names = planned.point.release, planned.dataset.group_names
    counting = Counting(worst.epsilon) if release is None else Counting(worst.epsilon, released_bins=release.bins)
    delta, method = planned.spec.delta, sweep.accounting.individual
    job = AccountingJob(files.root, delta, method, counting=counting, folder=files.epsilons)
    summary = store_epsilons(job, scatter)
    with _ONE_AT_A_TIME:
        counted, trace = CountedEpsilons(summary, StoredEpsilons(files.epsilons)), read_trace(files.trace)
        exact = exact_statistics(counted, names, worst, individual_reasons(trace))
        if planned.spec.norms.exact_examples > 0 and trace.filter is None:  # a filter enforces them, with no error
            quality = quality_of_estimates(files, counted.parts, trace, worst.epsilon)
            exact = replace(exact, estimates=quality)
        write_exact_statistics(files.private_summary, exact)
        if release is not None:
            return _released_once(files, counted, names, worst, release, exact, releasing)
        return exact if release_mode(sweep.release.name).statistics == "exact" else None


_ONE_AT_A_TIME = threading.Lock()
"""Held while stored epsilons are read back, so that the driver holds one part in memory at a time."""


def _by_epoch(bound: Trace, training: TrainingResult, worst: PrivacyEstimate) -> tuple[float, ...]:
    """Return the epsilon of all that was shown by the end of each epoch; a selected run is shown only after the
    selection.
    """
    if bound.selection is not None:
        return (worst.epsilon,) * len(training.history)
    ends = tuple(record.step for record in training.history)
    return tuple(cost_so_far(bound, ends, step, worst) for step in ends)


def complete_stopped(
    planned: PlannedTrial,
    files: TrialFiles,
    sweep: SweepSpec,
    times: Times,
    progress: Progress,
    history: tuple[PublishedEpoch, ...],
) -> StoppedTrial:
    """Write the result of a trial that the scheduler stopped, with the worst case of the steps that it had run.

    The worst case is an estimate, because results decided how many steps there are; the plan's is a guarantee.
    `account_stopped` accounts its examples afterwards. progress: the last report before the stop.
    """
    bound = bounding_trace(progress.trace, planned.trace) or progress.trace
    found = all_weakened(costs(replace(bound, ended_by_results=True), planned.spec.delta, sweep), planned.reasons)
    stopped = StoppedTrial(
        key=planned.key,
        spec=planned.spec,
        trace=replace(progress.trace, ended_by_results=True),
        worst_case=found.worst_case,
        others=found.others,
        groups=found.groups,
        risks=found.risks,
        reasons=planned.reasons,
        epoch=progress.epoch,
        evaluation=progress.evaluation,
        history=history,
        started=times.started,
        ended=times.ended,
        device=progress.device,
    )
    write_result(files.result, stopped)
    return stopped


def epsilon_so_far(planned: PlannedTrial, trace: Trace) -> float:
    """Return the upper bound on the epsilon of ``trace``, the run so far; only an estimate if `bounding_trace` returns
    None.

    By the accountant of the planned worst case. A selected run shows nothing before its end.
    """
    plan, worst = planned.trace, planned.worst_case
    if plan.selection is not None:
        return worst.epsilon
    if bounding_trace(trace, plan) is None:
        return cost_of_steps(trace, worst.delta, worst.accountant)
    return cost_so_far(plan, _ends(planned), trace.steps, worst)


def _ends(planned: PlannedTrial) -> tuple[int, ...]:
    """Last steps of the planned epochs."""
    per_epoch = planned.trace.segments[0].sampling.steps_per_epoch
    return tuple(range(per_epoch, planned.trace.steps + 1, per_epoch))


def costs(trace: Trace, delta: float, sweep: SweepSpec) -> Costs:
    """Return costs of any run. Raises: UnsupportedMechanism if an accountant of the sweep does not cover it."""
    return _with_groups(trace, delta, sweep, worst_cases(trace, delta, sweep))


def _with_groups(trace: Trace, delta: float, sweep: SweepSpec, single: tuple[PrivacyEstimate, ...]) -> Costs:
    """Add costs of groups and bounds on attacks to the estimates for a single record.

    Groups of more than one record are accounted by privacy loss distributions; no other accountant covers them under
    sampling. A selection has no privacy curve, and so no bounds on attacks.
    """
    sizes = sweep.accounting.group_sizes
    bounded = sorted({1, *sizes}) if trace.is_private and trace.selection is None else ()
    return Costs(
        worst_case=single[0],
        others=single[1:],
        groups=tuple(_of_group(trace, delta, size) if size > 1 else single[0] for size in sizes),
        risks=tuple(risk_of(trace, size) for size in bounded),
    )


# Trials that differ only in the seed have the same trace.
@functools.lru_cache(maxsize=256)
def _of_group(trace: Trace, delta: float, size: int) -> PrivacyEstimate:
    return account(trace, delta, "pld", size)


def _costs(trace: Trace, planned: PlannedTrial, sweep: SweepSpec) -> Costs:
    """Worst-case costs of a run, from the plan if the run went as planned, otherwise computed again.

    Costs without a bounding trace are estimates. The comparison with the plan ignores recorded contributions, because
    they do not enter worst cases.
    """
    bound, delta = bounding_trace(trace, planned.trace), planned.spec.delta
    if bound is not None and replace(bound, contributions=planned.trace.contributions) == planned.trace:
        single = (planned.worst_case, *planned.others)
        return all_weakened(_with_groups(planned.trace, delta, sweep, single), planned.reasons)
    if bound is not None:
        return all_weakened(costs(bound, delta, sweep), planned.reasons)
    return all_weakened(costs(trace, delta, sweep), (*planned.reasons, "noise_followed_results"))


def bounding_trace(trace: Trace, plan: Trace) -> Trace | None:
    """Return the trace whose cost is a guarantee for the run of ``trace``; None if none is known.

    A schedule that follows results chooses its noise adaptively from earlier releases, so the cost of the noise that
    was used is not an upper bound. The plan is made without results and has, at every step, the lowest noise that the
    schedule can reach. Every step of the plan therefore dominates the run's step, whatever was released before. A run
    that its budget allowed to continue past its plan has no such bound.
    """
    bound = replace(plan.until(trace.steps), contributions=trace.contributions)
    if bound == trace:
        return trace
    frame = replace(trace, segments=(), noise_follows_results=False)
    same = replace(bound, segments=()) == frame and bound.steps == trace.steps
    return bound if same and all(map(_is_no_dearer, _steps(trace), _steps(bound))) else None


def shown_trace(trace: Trace, plan: Trace) -> Trace:
    """Return the trace to compose with other runs: the bounding trace, or else ``trace`` itself, marked as an estimate.

    The kind of its recorded contributions is set to "estimate", because worst cases do not depend on it.
    """
    bound = bounding_trace(trace, plan) or replace(trace, noise_follows_results=True)
    return replace(bound, contributions="estimate")


def _steps(trace: Trace) -> Iterator[Segment]:
    return (segment for segment in trace.segments for _ in range(segment.steps))


def _is_no_dearer(step: Segment, other: Segment) -> bool:
    alike = step.sampling == other.sampling and step.side_queries == other.side_queries
    return alike and step.noise_multiplier >= other.noise_multiplier


def _released_once(
    files: TrialFiles,
    counted: CountedEpsilons,
    group_names: tuple[str, ...],
    worst: PrivacyEstimate,
    release: ReleaseSpec,
    exact: IndividualStatistics,
    releasing: Callable[[], None],
) -> IndividualStatistics:
    """Statistics released with noise drawn from the operating system's entropy; drawn once, stored and reused."""
    stored = read_statistics(files.released, "restore it from a backup: releasing again would cost privacy again")
    if stored is not None:
        return stored
    releasing()
    drawn = release_counted(counted, len(group_names), release)
    alone = Trace(counted.summary.examples, releases=release.releases(), adjacency=worst.adjacency)
    cost = account(alone, worst.delta).epsilon
    statistics = released_statistics(drawn, group_names, exact, cost)
    write_statistics(files.released, statistics)
    return statistics


Close = Callable[[PlannedTrial, int], Iterable[None]]
"""Stores the norms and the trace of a planned trial that was stopped after so many steps; see `close_trial`.

The iteration ends when they are stored, and yields now and then until then, so that it can be left.
"""


def close_here(planned: PlannedTrial, step: int, context: TrialContext, code: UserCode, ranks: int = 1) -> None:
    """Call `Close` in this process. code: as this process imports it. Raises: as `close_trial`."""
    from dpsweep.workers.trials.trial import close_trial  # late: it imports torch, and drivers import this module

    root = context.files.trial(planned.key).root
    close_trial(planned.spec, root, step, code=code, releases=planned.releases, ranks=ranks)


def account_stopped(
    planned: PlannedTrial,
    files: TrialFiles,
    sweep: SweepSpec,
    stopped: StoppedTrial,
    scatter: Scatter,
    close: Close,
    releasing: Callable[[], None],
) -> StoppedTrial:
    """Delete the checkpoint, account every example up to the stop, and add the statistics to the stored result.

    A trial whose examples are not accounted, such as one without norms, keeps its result. Raises: as `close` and
    `individual_statistics`.
    """
    is_asked = accounts_examples(stopped.trace, planned, sweep)
    if is_asked and not exists(files.trace):
        for _ in close(planned, stopped.steps):
            pass
    forget_checkpoint(files.checkpoint)
    if not is_asked:
        return stopped
    individuals = individual_statistics(planned, files, sweep, stopped.worst_case, scatter, releasing)
    names = planned.dataset.group_names
    stopped = replace(stopped, individuals=individuals, group_names=names, digests=note_digests(files))
    write_result(files.result, stopped)
    return stopped


def is_left_to_account(stopped: StoppedTrial, files: TrialFiles) -> bool:
    """Return whether an interrupted run has left the trial to be closed, or its examples to be accounted."""
    return exists(files.checkpoint) or (exists(files.trace) and not stopped.is_accounted)
