"""A trial's private files, made from synthetic contributions."""

from __future__ import annotations

import numpy as np

from dpsweep.accounting.jobs.examples import AccountingJob, Scatter, account_in_process, store_epsilons
from dpsweep.accounting.jobs.summaries import Counting
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from dpsweep.accounting.records.epsilon_files import Epsilons, read_epsilons
from dpsweep.accounting.records.shards import NormShardWriter, NormSnapshot
from dpsweep.accounting.records.traces import write_trace
from dpsweep.accounting.records.trial_files import TrialFiles


def snapshot(step: int, examples: int, seed: int = 0) -> NormSnapshot:
    rng = np.random.default_rng([seed, step])
    norms = rng.lognormal(0.0, 1.0, examples)
    return NormSnapshot(
        step=step,
        example_ids=np.arange(examples) * 3 + 1,
        groups=rng.integers(0, 3, examples),
        norms=norms,
        contributions=np.minimum(norms, 1.0),
        losses=rng.exponential(1.0, examples),
    )


def write_trial(root: str, examples: int = 50, rows_per_part: int = 8, steps: tuple[int, ...] = (0, 40, 80)) -> Trace:
    """A trial of 120 steps with two noise levels and a side query in the second half."""
    sampling = PoissonSampling(0.05)
    trace = Trace(
        examples,
        (Segment(0, 60, sampling, 1.5), Segment(60, 60, sampling, 1.2, (SideQuery("counts", 8.0),))),
    )
    files = TrialFiles(root)
    write_trace(files.trace, trace)
    write_norms(files.norms, rows_per_part, *(snapshot(step, examples) for step in steps))
    return trace


def write_norms(directory: str, rows_per_part: int, *snapshots: NormSnapshot) -> None:
    """The norms of a run that ended."""
    with NormShardWriter(directory, rows_per_part) as writer:
        for each in snapshots:
            writer.write(each)
        writer.complete()


def job_of(root: str, delta: float, method: str = "rdp") -> AccountingJob:
    """Account the trial into its own folder; epsilons above 50 count as 50."""
    return AccountingJob(root, delta, method, counting=Counting(50.0), folder=TrialFiles(root).epsilons)


def account_trial(job: AccountingJob, scatter: Scatter = account_in_process) -> Epsilons:
    """Account a trial, store its epsilons, and return what was stored."""
    store_epsilons(job, scatter)
    return read_epsilons(TrialFiles(job.root).epsilons)
