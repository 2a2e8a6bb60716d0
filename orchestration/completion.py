"""From a trained trial to its result: account, summarise, release, store."""

from __future__ import annotations

from dataclasses import dataclass

from accounting.accountants import account
from accounting.actors import AccountingJob, Scatter, account_in_process, account_trial
from accounting.estimates import PrivacyEstimate
from accounting.layout import TrialFiles
from accounting.mechanism import Trace
from accounting.release import ReleaseSpec, release_statistics
from accounting.shards import Epsilons
from accounting.traces import read_trace
from orchestration.plan import PlannedTrial, costs, release_spec
from orchestration.published import IndividualStatistics
from orchestration.results import (
    TrialResult,
    claimed,
    epsilon_after,
    exact_statistics,
    read_statistics,
    released_statistics,
    write_result,
    write_statistics,
)
from orchestration.sweep import SweepSpec
from workers.history import read_training_result


@dataclass(frozen=True)
class Times:
    """When the trial started and ended training, in seconds since 1970 UTC."""

    started: float
    ended: float


def complete_trial(
    planned: PlannedTrial, files: TrialFiles, sweep: SweepSpec, times: Times, scatter: Scatter = account_in_process
) -> TrialResult:
    """Account a trained trial and write its ``result.json``, last: from then on the trial is complete.

    Can be repeated after an interruption at any point: accounting is idempotent, and statistics that were released
    with noise once are reused, because releasing them again would cost privacy again.
    """
    trace, training = read_trace(files.trace), read_training_result(files.training)
    found = costs(trace, planned.spec.delta, sweep)
    result = TrialResult(
        key=planned.spec.key,
        labels=planned.labels,
        baseline=planned.baseline,
        target_epsilon=planned.target_epsilon,
        spec=planned.spec,
        worst_case=found.worst_case,
        others=found.others,
        groups=found.groups,
        epsilons=tuple(
            min(epsilon_after(trace, record.step, planned.spec.delta), found.worst_case.epsilon)
            for record in training.history
        ),
        training=training,
        individuals=_individuals(planned, files, sweep, found.worst_case, scatter) if planned.spec.is_private else None,
        started=times.started,
        ended=times.ended,
    )
    write_result(files.result, result)
    return result


def _individuals(
    planned: PlannedTrial, files: TrialFiles, sweep: SweepSpec, worst: PrivacyEstimate, scatter: Scatter
) -> IndividualStatistics | None:
    """Account every example, keep the exact statistics private, and return what the sweep discloses."""
    job = AccountingJob(files.root, planned.spec.delta, sweep.accounting.individual)
    epsilons = account_trial(job, scatter)
    names, release = planned.dataset.group_names, release_spec(sweep.release)
    exact = exact_statistics(epsilons, names, worst)
    write_statistics(files.private_summary, exact, private=True)
    if release is not None:
        return _released_once(files, epsilons, names, worst, release)
    return exact if sweep.release.name == "raw" else None


def _released_once(
    files: TrialFiles, epsilons: Epsilons, group_names: tuple[str, ...], worst: PrivacyEstimate, release: ReleaseSpec
) -> IndividualStatistics:
    """Statistics with noise from the operating system's entropy; drawn and stored once, then read back."""
    stored = read_statistics(files.released)
    if stored is not None:
        return stored
    drawn = release_statistics(epsilons.upper, epsilons.groups, len(group_names), worst.epsilon, release)
    cost = account(Trace(len(epsilons.upper), releases=release.releases()), worst.delta).epsilon
    statistics = released_statistics(drawn, group_names, claimed(epsilons, worst), cost)
    write_statistics(files.released, statistics, private=False)
    return statistics
