"""Account the single examples of a trial that a scheduler stopped.

Its cost and evaluation are stored first, so that no later run trains it further. The next acts can be repeated: a
process with the trial's resources stores the norms of its last steps and its trace, and parts are accounted as of any
trial. The checkpoint, with the noise key in it, is deleted as soon as the trace is stored: no step is left to train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dpsweep.accounting.jobs import Scatter
from dpsweep.accounting.records import TrialFiles, exists
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.completion import accounts_examples, individual_statistics
from dpsweep.orchestration.records.integrity import note_digests
from dpsweep.orchestration.records.results import StoppedTrial, write_result
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.machine.checkpoint import forget_checkpoint
from dpsweep.workers.own_code.imports import UserCode

Close = Callable[[PlannedTrial, int], Iterable[None]]
"""Stores the norms and the trace of a planned trial that was stopped after so many steps; see `close_trial`.

The iteration ends when they are stored, and yields now and then until then, so that it can be left.
"""


def close_here(planned: PlannedTrial, step: int, context: TrialContext, code: UserCode, ranks: int = 1) -> None:
    """Call `Close` in this process. code: as this process imports it. Raises: as `close_trial`."""
    from dpsweep.workers.trials.stopping import close_trial  # late: it imports torch, and drivers import this module

    root = context.files.trial(planned.key).root
    close_trial(planned.spec, root, step, code=code, releases=planned.releases, ranks=ranks)


def account_stopped(
    planned: PlannedTrial, files: TrialFiles, sweep: SweepSpec, stopped: StoppedTrial, scatter: Scatter, close: Close
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
    individuals = individual_statistics(planned, files, sweep, stopped.worst_case, scatter)
    names = planned.dataset.group_names
    stopped = replace(stopped, individuals=individuals, group_names=names, digests=note_digests(files))
    write_result(files.result, stopped)
    return stopped


def is_left_to_account(stopped: StoppedTrial, files: TrialFiles) -> bool:
    """Return whether an interrupted run has left the trial to be closed, or its examples to be accounted."""
    return exists(files.checkpoint) or (exists(files.trace) and not stopped.is_accounted)
