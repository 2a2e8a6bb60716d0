"""Runs one trial in this process, from its spec to the stored model, norm shards and trace, without Ray or MLflow.

`close_trial` stores what the accounting of a trial needs that a scheduler stopped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsweep.accounting.errors import START_ANEW, DataCorruption, InvalidInput, count_of
from dpsweep.accounting.mechanism.correlated import squared_errors
from dpsweep.accounting.mechanism.trace import Release
from dpsweep.accounting.records.files import delete, exists, read_bytes, write_bytes_atomically
from dpsweep.accounting.records.sealed import write_private_sealed
from dpsweep.accounting.records.traces import read_trace, write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.accounting.records.user_files import write_users
from dpsweep.workers.clipping import claims, make_clipping
from dpsweep.workers.data import Dataset, Split, columns_of_rows, load_dataset, ownership
from dpsweep.workers.evaluation.attack_results import AttackResults, write_attacks
from dpsweep.workers.evaluation.outcomes import outcomes_of, write_outcomes, write_wrong
from dpsweep.workers.evaluation.predictions import Predictions, evaluate, with_counts
from dpsweep.workers.evaluation.references import reference_scores
from dpsweep.workers.gradients.checks import trained_parameters
from dpsweep.workers.gradients.divided import whole_values
from dpsweep.workers.gradients.modes import set_modes
from dpsweep.workers.machine.checkpoint import (
    fingerprint,
    forget_checkpoint,
    load_checkpoint,
    load_part,
    part_of_rank,
    save_checkpoint,
)
from dpsweep.workers.machine.devices import DeviceMeter, choose_device, rounding_of
from dpsweep.workers.machine.memory import DeviceUse, write_device_use
from dpsweep.workers.machine.stored_tensors import note_written
from dpsweep.workers.models import build_model
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.noise.step_noise import EARLIER, NoiseShare, share_of_rank
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.own_code.own_record import require_same_code, store_code
from dpsweep.workers.sampling.users import population_of, with_rows_of_users
from dpsweep.workers.spec import AttackSpec, TrialSpec, at_speed_of, divides_trained
from dpsweep.workers.tasks import task_called
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.batch_gradients import ClippedParts, LocalGradients, parts_of
from dpsweep.workers.training.counters import TextCounts, write_counters
from dpsweep.workers.training.history import Progress, TrainingResult, read_training_result, reasons_of_trial
from dpsweep.workers.training.norm_recorder import closed_afterwards, is_due, stored_norms
from dpsweep.workers.training.one_run_audit import audit
from dpsweep.workers.training.preprocessing import make_preprocessing
from dpsweep.workers.training.reproducible import explained, reproducible
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of
from dpsweep.workers.trials.data_parallel import (
    DividedGradients,
    DividedNoise,
    DividedUpdate,
    Follower,
    StoredShare,
    first_random_states,
    restore_random_state,
)
from dpsweep.workers.trials.divided_model import DividedOptimizer, divide
from dpsweep.workers.trials.divisible import require_divisible
from dpsweep.workers.trials.exposure import exposure, with_secrets
from dpsweep.workers.trials.feasibility import excerpt
from dpsweep.workers.trials.membership import attack, likelihood_ratio_attack
from dpsweep.workers.trials.predicted_table import example_of
from dpsweep.workers.trials.ranks import RankGroup
from dpsweep.workers.trials.trained_model import describe_inputs

OnProgress = Callable[[Progress], None]


def run_trial(
    spec: TrialSpec,
    root: str,
    *,
    code: UserCode = NO_CODE,
    releases: tuple[Release, ...] = (),
    on_progress: OnProgress | None = None,
    group: RankGroup | None = None,
) -> TrainingResult:
    """Train ``spec`` in the folder ``root``, or continue where an earlier call was interrupted.

    A finished trial is not run again; its stored result is returned.
    code: the user's modules that may be imported.
    releases: made from the same data outside training; they are added to the trace.
    on_progress: called after every epoch; an exception in it ends the call, and the trial can be resumed.
    group: the processes that share its gradients; this one is rank 0; the others call `follow_trial`.

    Raises:
        InvalidInput: an impossible spec, ``root`` holds another trial or one that began with another number of ranks,
            or torch has no deterministic algorithm for the model.
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
        return _train(spec, files, code, releases, on_progress or (lambda progress: None), group)


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
            divided = _divided(parts_of(spec, method, _of_the_shape(spec, dataset), code), spec, group)
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
        dataset = _preprocessed(spec, with_secrets(spec, dataset), stored["preprocessing"])
        parts, optimizer = divided or (parts_of(spec, method, dataset, code), None)
        local = LocalGradients(spec, dataset, parts)
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
        trainer = begin(spec, files, code, releases, ranks).trainer
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


def as_begun(files: TrialFiles, spec: TrialSpec, code: UserCode) -> TrialSpec:
    """Return ``spec`` with the speed settings (`SPEED`) that the trial began with.

    Other settings would round the steps since the checkpoint differently, and as a resumed run repeats its noise, the
    noise would not hide such a difference. Raises: InvalidInput if the folder holds another trial, or one that began
    with other ``code``; DataCorruption if the stored spec is damaged.
    """
    if not exists(files.spec):
        return spec
    try:
        stored = TrialSpec.from_json(read_bytes(files.spec))
    except ValueError as error:
        raise DataCorruption(f"{files.spec} is damaged; {START_ANEW}") from error
    spec = at_speed_of(spec, stored.execution)
    ours, theirs = asdict(spec), asdict(stored)
    different = [name for name in ours if ours[name] != theirs[name]]
    if different:
        raise InvalidInput(
            f"{files.root} holds a trial that differs in {', '.join(different)}; use another folder, or {START_ANEW}"
        )
    require_same_code(files, spec, code)
    return spec


def _refuse_other_releases(files: TrialFiles, releases: tuple[Release, ...]) -> None:
    """Refuse a finished trial whose stored trace does not end in ``releases``."""
    stored = read_trace(files.trace).releases
    if stored[len(stored) - len(releases) :] != releases:
        raise InvalidInput(
            f"{files.root} holds a finished trial with the releases {stored}, which do not end in {releases}; "
            f"use another folder, or {START_ANEW}"
        )


@dataclass(frozen=True)
class Begun:
    """A trial before its first step, or at its checkpoint.

    source: data set before preprocessing.
    fitted: state of the preprocessing.
    random_states: of the other ranks.
    save: writes the checkpoint.
    `optimizer`: of rank 0's parts, where ranks divide all parameters.
    """

    trainer: Trainer
    source: Dataset
    dataset: Dataset
    fitted: dict[str, Tensor]
    random_states: tuple[Tensor, ...]
    save: Callable[[], None]
    optimizer: DividedOptimizer | None


def begin(
    spec: TrialSpec,
    files: TrialFiles,
    code: UserCode,
    releases: tuple[Release, ...],
    ranks: int = 1,
    group: RankGroup | None = None,
) -> Begun:
    """Load the data, build the model, and continue from the checkpoint in ``files``, or write the first one.

    Call it within `reproducible`. ranks: how many processes will share the gradients. group: these processes, where
    they divide the model. Raises: as `run_trial`.
    """
    dataset = source = load_dataset(spec.data, code)
    digest = dataset.digest()
    method = make_clipping(spec.clipping, code)
    mechanism = mechanism_of(spec, method, population_of(spec, dataset), releases)
    owner = fingerprint(spec.to_json(), mechanism, digest)
    stored = load_checkpoint(files.checkpoint, owner)
    device = choose_device(spec.execution.device)
    noise = make_noise_source(spec.noise_source, spec.seed, device)
    dataset, drawn = with_rows_of_users(spec, dataset, stored.get("users") if stored else None)
    texts = _counted_texts(dataset.train)
    dataset = with_secrets(spec, dataset)
    fitted = stored["preprocessing"] if stored else {}
    if spec.preprocessing is not None and stored is None:
        fitted = make_preprocessing(spec.preprocessing).fit(dataset, noise)
    dataset = _preprocessed(spec, dataset, fitted)
    parts_before = [_parts(files, stored["trainer"]) if stored else set[str]()]
    random_states = _of_as_many(stored, ranks) if stored else first_random_states(spec, ranks, device)
    rounding = rounding_of(device)
    if stored:
        _require_rounding(spec, stored["rounding"], rounding)
    parts, optimizer = _divided(parts_of(spec, method, dataset, code), spec, group)
    trainer = Trainer(spec, mechanism, dataset, noise, stored_norms(files, spec.norms), parts)

    def save() -> None:
        for store in trainer.stores:
            store.wait()
        others = trainer.gradients.random_states() or random_states
        more = {**({"ranks": others} if others else {}), **({"users": drawn} if drawn else {})}
        state = {"preprocessing": fitted, "trainer": trainer.state(), "rounding": rounding, **more}
        save_checkpoint(files.checkpoint, owner, state)
        parts_before.append(_parts(files, state["trainer"]))
        for part in parts_before.pop(0) - parts_before[0]:
            delete(part)

    if stored is None:
        trainer.begin()
        _store_beginning(spec, files, code, dataset, digest)
        save()
    else:
        trainer.restore(stored["trainer"])
    trainer.counters.texts = texts
    return Begun(trainer, source, dataset, fitted, random_states, save, optimizer)


def _store_beginning(spec: TrialSpec, files: TrialFiles, code: UserCode, dataset: Dataset, digest: str) -> None:
    """Store code, specification and digest of the data, and who owns the training examples whose norms are taken."""
    if not exists(files.spec):  # else the code is that of the start before, which has been compared
        store_code(files, spec, code)
    write_bytes_atomically(files.spec, spec.to_json().encode())
    train = dataset.train
    if train.user_ids is not None and spec.users is None:
        write_users(files.users, train.example_ids.numpy(), *ownership(train.user_ids), spec.norms.rows_per_part)
    write_private_sealed(files.data_fingerprint, json.dumps({"data": digest}).encode())


def _counted_texts(train: Split) -> TextCounts | None:
    """Return how many texts are cut or have no token, before secrets are planted; None if there are none."""
    if train.flaws is None:
        return None
    cut, empty = train.flaws.sum(0).tolist()
    return TextCounts(len(train), train.features.shape[1], cut, empty)


def _parts(files: TrialFiles, state: Mapping[str, Any]) -> set[str]:
    """Return the places of the parts of a checkpoint that other ranks have stored. state: of the trainer."""
    earlier = state.get(EARLIER, {"step": 0, "others": ()})
    others = range(1, 1 + len(earlier["others"]))
    return {part_of_rank(files.checkpoint, earlier["step"], rank) for rank in others}


def _preprocessed(spec: TrialSpec, dataset: Dataset, fitted: dict[str, Tensor]) -> Dataset:
    if spec.preprocessing is None:
        return dataset
    return make_preprocessing(spec.preprocessing).transform(dataset, fitted)


def _of_the_shape(spec: TrialSpec, dataset: Dataset) -> Dataset:
    """Return a few examples as preprocessing would leave them, with any values: what a model is built for."""
    some = excerpt(dataset)
    return some if spec.preprocessing is None else make_preprocessing(spec.preprocessing).rehearse(some)


def _divided(
    parts: ClippedParts, spec: TrialSpec, group: RankGroup | None
) -> tuple[ClippedParts, DividedOptimizer | None]:
    """Return parts whose model is built now, with its parameters divided among the ranks, if they divide them.

    Then also the optimizer of this rank's parts, if those that train are among them. Raises: InvalidInput for a model
    that cannot be divided.
    """
    if group is None or group.lending is None:
        return parts, None
    lending = group.lending
    require_divisible(spec, lending.shard)
    model = parts.model()
    digest = parts.digest(model)
    divide(model, lending, group.rank, choose_device(spec.execution.device))
    parts = replace(parts, model=lambda: model, digest=lambda _: digest)
    if not divides_trained(lending.shard):
        return parts, None
    optimizer = DividedOptimizer(parts.optimizer, trained_parameters(model), lending)
    return replace(parts, optimizer=lambda _: optimizer), optimizer


def _of_as_many(stored: Mapping[str, Any], ranks: int) -> tuple[Tensor, ...]:
    """Return random states of the other ranks in a checkpoint. Raises: InvalidInput unless it is of so many ranks.

    Another number of ranks rounds sums differently, and repeated noise would not hide the difference.
    """
    found: tuple[Tensor, ...] = tuple(stored.get("ranks", ()))
    if len(found) + 1 != ranks:
        raise InvalidInput(
            f"the trial began with its gradients shared by {count_of(len(found) + 1, 'rank')} and cannot go on with "
            f"{ranks}, which round sums otherwise; set resources.ranks to {len(found) + 1}, or {START_ANEW}"
        )
    return found


def _require_rounding(spec: TrialSpec, before: str, here: str) -> None:
    """Raise InvalidInput where epochs may have been shown since the checkpoint and would be rounded otherwise here.

    Their noise is repeated, and would not hide the difference. A checkpoint of each epoch is stored before it is shown.
    """
    if here != before and not spec.execution.stores_before_showing:
        raise InvalidInput(
            f"the trial was stored by {before}, and {here} may round otherwise the epochs shown since: go on there, or "
            f"{START_ANEW}; with execution.checkpoint_every_epochs of at most 1, none are shown before they are stored"
        )


def _train(
    spec: TrialSpec,
    files: TrialFiles,
    code: UserCode,
    releases: tuple[Release, ...],
    report: OnProgress,
    group: RankGroup | None,
) -> TrainingResult:
    begun = begin(spec, files, code, releases, 1 if group is None else group.size, group)
    trainer, meter = begun.trainer, DeviceMeter(begun.trainer.local.data.device)
    with closed_afterwards(trainer.stores):
        if group is not None:
            group.meet()
            in_turn = None if begun.optimizer is None else DividedUpdate(begun.optimizer, group)
            trainer.divide(DividedGradients(trainer.local, group, begun.random_states), DividedNoise(group), in_turn)
        _train_to_the_end(spec, trainer, begun.save, report, meter)
        trainer.complete_norms()
    write_device_use(files.device, meter.use())
    result = _finish(spec, files, begun, code)
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


def _finish(spec: TrialSpec, files: TrialFiles, begun: Begun, code: UserCode) -> TrainingResult:
    """Store the results of the run. The training result is written last: its presence marks the trial as finished."""
    trainer, dataset = begun.trainer, begun.dataset
    tested, held_out = trainer.predictions()
    values = whole_values(trainer.released_model().state_dict(keep_vars=True))
    inputs = describe_inputs(spec, begun.source, dataset, begun.fitted)
    is_private_data = not spec.is_private  # trained without noise, a model is as private as the examples
    write_bytes_atomically(files.model, _saved({name: value.cpu() for name, value in values.items()}), is_private_data)
    write_bytes_atomically(files.inputs, _saved(inputs), is_private_data)
    write_trace(files.trace, trainer.trace())
    write_counters(files.private_training, trainer.counters)
    if spec.attacks != AttackSpec() or spec.audit is not None:
        write_attacks(files.attacks, _attacked(spec, trainer, dataset, files, code))
    if dataset.held_out is not None and held_out is not None:
        write_wrong(files.held_out, held_out, dataset.held_out)
    write_outcomes(files.outcomes, outcomes_of(tested, dataset.test, dataset))
    result = _result(spec, trainer, dataset, inputs, tested)
    note_written(files)
    write_bytes_atomically(files.training, result.to_json())
    return result


def _result(
    spec: TrialSpec, trainer: Trainer, dataset: Dataset, inputs: Mapping[str, Any], tested: Predictions
) -> TrainingResult:
    """Return the result of a finished run. inputs: of `describe_inputs`. tested: predictions of the test examples."""
    columns = None if dataset.columns is None else columns_of_rows(dataset.columns)
    row, prediction = example_of(columns, spec.loss.name, dataset.num_classes) if columns else (None, None)
    return TrainingResult(
        key=spec.key,
        epochs=trainer.epoch,
        steps=trainer.step_count,
        steps_per_epoch=trainer.mechanism.steps_per_epoch,
        stopped="completed" if trainer.step_count == trainer.total_steps else "budget",
        train_size=len(dataset.train),
        test_size=len(dataset.test),
        group_names=dataset.group_names,
        parameters=trainer.num_parameters,
        initial_bound=trainer.initial_bound,
        history=trainer.history,
        evaluation=with_counts(trainer.history[-1].test, tested, dataset.test, dataset),
        notes=(*dataset.notes, *claims(spec.clipping), *_of_norms(spec)),
        reasons=reasons_of_trial(spec, dataset.reasons),
        references=reference_scores(dataset) if spec.reference and not spec.is_private else {},
        example_shape=tuple(inputs["example_shape"]),
        example_type=inputs["example_type"],
        output_axes=len(task_called(dataset.task).output_shape(dataset.train.labels, dataset.class_names)),
        squared_errors=squared_errors(trainer.trace()),
        example_row=row,
        example_prediction=prediction,
    )


def _of_norms(spec: TrialSpec) -> tuple[str, ...]:
    """Return a note for readers of results without epsilons of single examples."""
    if spec.users is not None and spec.is_private:
        return ("every epsilon is that of a user with all their rows; none is computed for single examples",)
    if not (spec.norms.are_off and spec.is_private):
        return ()
    return (
        "norms.refreshes_per_epoch is off: the epsilons of single examples were not computed, and the worst case holds "
        "for each of them",
    )


def _attacked(spec: TrialSpec, trainer: Trainer, dataset: Dataset, files: TrialFiles, code: UserCode) -> AttackResults:
    """Results of the attacks and the audit that the trial asks for. Left-out canaries do not count as members."""
    model, loss, canaries = trainer.released_model(), build_loss(spec.loss, code), trainer.canaries
    trained, audited = dataset, None
    if spec.audit is not None and canaries is not None:
        members = np.setdiff1d(np.arange(len(dataset.train)), canaries.absent)
        trained = replace(dataset, train=dataset.train.select(members))
        initial = build_model(spec.model, dataset, spec.seed, code).to(next(model.parameters()).device)
        audited = audit(initial, model, dataset, loss, canaries, spec.audit, spec.delta)
    if trainer.gradient_canaries is not None:
        audited = trainer.audited()
    threshold = attack(model, trained, loss, spec.seed) if spec.attacks.loss_threshold else ()
    ratio = likelihood_ratio_attack(model, trained, loss, spec, files, code) if spec.attacks.rmia else ()
    scored = evaluate(model, trained.train, trained, loss, 1) if spec.attacks.training_scores else None
    secrets = exposure(model, dataset, loss, spec)
    return AttackResults(threshold, audited, ratio, secrets, scored)


def _saved(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file of tensors, numbers, strings and containers, which loads without running code."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()
