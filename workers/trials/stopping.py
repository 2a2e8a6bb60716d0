"""Store what accounting needs of a trial that a scheduler stopped: the norms and the trace of the steps that it ran."""

from __future__ import annotations

from dataclasses import replace

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.traces import write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.counters import write_counters
from dpsweep.workers.training.norm_recorder import closed_afterwards
from dpsweep.workers.training.reproducible import explained, reproducible
from dpsweep.workers.trials.trial import as_begun, begin


def close_trial(
    spec: TrialSpec,
    root: str,
    step: int,
    *,
    code: UserCode = NO_CODE,
    releases: tuple[Release, ...] = (),
    ranks: int = 1,
) -> None:
    """Store norms and trace of the trial in ``root`` that was stopped after ``step`` steps, as if it had ended there.

    The trial goes on from its checkpoint, which is usually at that step, and shows nothing more. The trace, which says
    that results ended the run, is written last. Safe to repeat.
    code, releases: as for `run_trial`. ranks: how many processes shared its gradients.

    Raises: InvalidInput if several ranks would have to repeat steps, DataCorruption without the checkpoint, and as
    `run_trial`.
    """
    files = TrialFiles(root)
    if not exists(files.checkpoint):
        raise DataCorruption(f"{files.checkpoint} is missing; restore it from a backup, or {START_ANEW}")
    spec = as_begun(files, spec.checked(), code)
    with reproducible(spec.execution, spec.seed), explained(spec.execution):
        trainer = begin(spec, files, code, releases, ranks).trainer
        if trainer.step_count != step and ranks > 1:
            raise InvalidInput(
                f"the checkpoint is at step {trainer.step_count}, but the trial was stopped at step {step}, and one "
                "process rounds sums otherwise than its ranks; set execution.checkpoint_every_epochs to 1"
            )
        with closed_afterwards(trainer.recorders):
            while trainer.step_count < step:
                trainer.step()
                if trainer.at_epoch_end:
                    trainer.end_epoch()
            trainer.store_norms()
            for recorder in trainer.recorders:
                recorder.complete()
        write_counters(files.private_training, trainer.counters)
        write_trace(files.trace, replace(trainer.trace(), ended_by_results=True))
