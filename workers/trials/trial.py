"""Runs one trial in this process, from its spec to the stored model, norm shards and trace, without Ray or MLflow.

`close_trial` stores what the accounting of a trial needs that a scheduler stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.traces import read_trace, write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import load_dataset
from dpsweep.workers.gradients.modes import set_modes
from dpsweep.workers.machine.checkpoint import (
    fingerprint,
    forget_checkpoint,
    load_checkpoint,
    load_part,
    part_of_rank,
    save_checkpoint,
)
from dpsweep.workers.machine.devices import DeviceMeter
from dpsweep.workers.machine.memory import DeviceUse, write_device_use
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.noise.step_noise import EARLIER, NoiseShare, share_of_rank
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.sampling.users import population_of, with_rows_of_users
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.batch_gradients import LocalGradients, recipe_of
from dpsweep.workers.training.counters import write_counters
from dpsweep.workers.training.history import Progress, TrainingResult, read_training_result
from dpsweep.workers.training.norm_recorder import closed_afterwards, is_due
from dpsweep.workers.training.reproducible import explained, reproducible
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of
from dpsweep.workers.trials.data_parallel import (
    DividedGradients,
    DividedNoise,
    DividedUpdate,
    Follower,
    StoredShare,
    restore_random_state,
)
from dpsweep.workers.trials.exposure import with_secrets
from dpsweep.workers.trials.ranks import RankGroup
from dpsweep.workers.trials.trial_results import store_results
from dpsweep.workers.trials.trial_setup import as_begun, divided_recipe, of_the_shape, preprocessed, set_up

OnProgress = Callable[[Progress], None]


def run_trial(
    spec: TrialSpec,
    root: str,
    *,
    code: UserCode = NO_CODE,
    releases: tuple[Release, ...] = (),
    on_progress: OnProgress | None = None,
    group: RankGroup | None = None,
    data_digest: str | None = None,
) -> TrainingResult:
    """Train ``spec`` in the folder ``root``, or continue where an earlier call was interrupted.

    A finished trial is not run again; its stored result is returned.
    code: the user's modules that may be imported.
    releases: made from the same data outside training; they are added to the trace.
    on_progress: called after every epoch; an exception in it ends the call, and the trial can be resumed.
    group: the processes that share its gradients; this one is rank 0; the others call `follow_trial`.
    data_digest: `Dataset.digest` of the data that the trial is for; None takes any.

    Raises:
        InvalidInput: an impossible spec, other data, ``root`` holds another trial or one that began with another number
            of ranks, or torch has no deterministic algorithm for the model.
        RankLost: another process of the group has ended.
        LackOfMemory: the memory of the device does not suffice at ``execution.micro_batch_size``.
        DataCorruption: a stored file is damaged; training does not start again by itself.
    """
    files = TrialFiles(root)
    spec = as_begun(files, spec.checked(), code)
    if exists(files.training):
        _refuse_other_releases(files, releases)
        forget_checkpoint(files.checkpoint)
        if group is not None:
            group.meet()
        return read_training_result(files.training)
    with reproducible(spec.execution, spec.seed), explained(spec.execution):
        return _train(spec, files, code, releases, on_progress or (lambda progress: None), group, data_digest)


def follow_trial(
    spec: TrialSpec,
    root: str,
    group: RankGroup,
    *,
    code: UserCode = NO_CODE,
    releases: tuple[Release, ...] = (),
) -> None:
    """Compute this rank's share of the gradients of the trial that rank 0 runs; see `run_trial`, also for errors."""
    files, dataset = TrialFiles(root), load_dataset(spec.data, code)
    spec, divided = spec.checked(), None
    method = make_clipping(spec.clipping, code)
    if group.lending is not None and not exists(files.training):  # rank 0 borrows before it stores a checkpoint
        with reproducible(spec.execution, spec.seed), explained(spec.execution):
            divided = divided_recipe(recipe_of(spec, method, of_the_shape(spec, dataset), code), spec, group)
    group.meet()  # rank 0 has then stored the first checkpoint, from which all ranks begin
    if exists(files.training):
        return
    spec = as_begun(files, spec, code)
    with reproducible(spec.execution, spec.seed), explained(spec.execution):
        mechanism = mechanism_of(spec, method, population_of(spec, dataset), releases)
        owner = fingerprint(spec.to_json(), mechanism, dataset.digest())
        stored = load_checkpoint(files.checkpoint, owner)
        assert stored is not None, "rank 0 has stored it before the ranks meet"
        dataset, _ = with_rows_of_users(spec, dataset, stored.get("users"))
        dataset = preprocessed(spec, with_secrets(spec, dataset), stored["preprocessing"])
        recipe, optimizer = divided or (recipe_of(spec, method, dataset, code), None)
        local = LocalGradients(spec, dataset, recipe)
        local.values.restore(stored["trainer"]["model"])
        if optimizer is not None:
            optimizer.restore(stored["trainer"]["optimizer"])
        set_modes(local.model, stored["trainer"]["modes"])
        restore_random_state(local, stored["ranks"][group.rank - 1])
        noise = make_noise_source(spec.noise_source, spec.seed, local.data.device)
        share = share_of_rank(mechanism.strategy, noise, stored["trainer"], group.rank, group.size)
        own = None if share is None else _stored_share(share, files, owner, stored["trainer"], group.rank)
        del stored
        Follower(local, dataset, group, own, optimizer).follow()


def _stored_share(
    share: NoiseShare, files: TrialFiles, owner: str, stored: Mapping[str, Any], rank: int
) -> StoredShare:
    """Return the share of another rank than 0 with the rows that this rank stored for a checkpoint."""
    if parts := stored[EARLIER]["others"]:
        share.take(load_part(part_of_rank(files.checkpoint, share.step, rank), owner, parts[rank - 1])["rows"])

    def store(step: int) -> bytes:
        return save_checkpoint(part_of_rank(files.checkpoint, step, rank), owner, {"rows": share.rows})

    return StoredShare(share, store)


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
        trainer = set_up(spec, files, code, releases, ranks).trainer
        if trainer.step_count != step and ranks > 1:
            raise InvalidInput(
                f"the checkpoint is at step {trainer.step_count}, but the trial was stopped at step {step}, and one "
                "process rounds sums otherwise than its ranks; set execution.checkpoint_every_epochs to 1"
            )
        with closed_afterwards(trainer.stores):
            while trainer.step_count < step:
                trainer.step()
                if trainer.at_epoch_end:
                    trainer.end_epoch()
            trainer.complete_norms()
        write_counters(files.private_training, trainer.counters)
        write_trace(files.trace, replace(trainer.trace(), ended_by_results=True))


def _refuse_other_releases(files: TrialFiles, releases: tuple[Release, ...]) -> None:
    """Refuse a finished trial whose stored trace does not end in ``releases``."""
    stored = read_trace(files.trace).releases
    if stored[len(stored) - len(releases) :] != releases:
        raise InvalidInput(
            f"{files.root} holds a finished trial with the releases {stored}, which do not end in {releases}; "
            f"use another folder, or {START_ANEW}"
        )


def _train(
    spec: TrialSpec,
    files: TrialFiles,
    code: UserCode,
    releases: tuple[Release, ...],
    report: OnProgress,
    group: RankGroup | None,
    data_digest: str | None,
) -> TrainingResult:
    setup = set_up(spec, files, code, releases, 1 if group is None else group.size, group, data_digest)
    trainer, meter = setup.trainer, DeviceMeter(setup.trainer.local.data.device)
    with closed_afterwards(trainer.stores):
        if group is not None:
            group.meet()
            in_turn = None if setup.optimizer is None else DividedUpdate(setup.optimizer, group)
            trainer.divide(DividedGradients(trainer.local, group, setup.random_states), DividedNoise(group), in_turn)
        _train_to_the_end(spec, trainer, setup.save, report, meter)
        trainer.complete_norms()
    write_device_use(files.device, meter.use())
    result = store_results(spec, files, setup, code)
    trainer.gradients.finish()
    forget_checkpoint(files.checkpoint)
    return result


def _train_to_the_end(
    spec: TrialSpec, trainer: Trainer, save: Callable[[], None], report: OnProgress, meter: DeviceMeter
) -> None:
    execution, steps_per_epoch, earlier = spec.execution, trainer.mechanism.steps_per_epoch, trainer.history
    while trainer.may_continue():
        trainer.step()
        meter.sample()
        progress = replace(_end_epoch(trainer, meter.use()), earlier=earlier) if trainer.at_epoch_end else None
        is_due_now = is_due(trainer.step_count, 1.0 / execution.checkpoint_every_epochs, steps_per_epoch)
        is_shown = progress is not None and execution.stores_before_showing
        if is_due_now or is_shown or not trainer.may_continue():
            save()
        if progress is not None:
            report(progress)
            earlier = ()


def _end_epoch(trainer: Trainer, device: DeviceUse) -> Progress:
    record = trainer.end_epoch()
    return Progress(
        epoch=trainer.epoch,
        step=trainer.step_count,
        total_steps=trainer.total_steps,
        noise_multiplier=record.noise_multiplier,
        trace=trainer.trace(),
        evaluation=record.test,
        public_evaluation=record.public,
        device=device,
    )
