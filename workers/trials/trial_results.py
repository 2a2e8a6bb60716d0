"""Stores what a trained trial leaves: model, trace, predictions, attacks and the result that marks it as finished."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpsweep.accounting.mechanism.correlated import squared_errors
from dpsweep.accounting.records.files import write_bytes_atomically
from dpsweep.accounting.records.traces import write_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.clipping import claims
from dpsweep.workers.data import Dataset, reader_of_rows
from dpsweep.workers.evaluation.attack_results import AttackResults, write_attacks
from dpsweep.workers.evaluation.outcomes import outcomes_of, write_outcomes, write_wrong
from dpsweep.workers.evaluation.predictions import Predictions, evaluate, with_counts
from dpsweep.workers.evaluation.references import reference_scores
from dpsweep.workers.gradients.divided import whole_values
from dpsweep.workers.machine.stored_tensors import note_written
from dpsweep.workers.models import build_model
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import AttackSpec, TrialSpec
from dpsweep.workers.tasks import task_called
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.training.counters import write_counters
from dpsweep.workers.training.history import TrainingResult, reasons_of_trial
from dpsweep.workers.training.one_run_audit import audit
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.trials.exposure import exposure
from dpsweep.workers.trials.membership import attack, likelihood_ratio_attack
from dpsweep.workers.trials.predicted_table import example_of
from dpsweep.workers.trials.trained_model import describe_inputs
from dpsweep.workers.trials.trial_setup import TrialSetup


def store_results(spec: TrialSpec, files: TrialFiles, setup: TrialSetup, code: UserCode) -> TrainingResult:
    """Store the results of the run. The training result is written last: its presence marks the trial as finished."""
    trainer, dataset = setup.trainer, setup.dataset
    tested, held_out = trainer.predictions()
    values = whole_values(trainer.released_model().state_dict(keep_vars=True))
    inputs = describe_inputs(spec, setup.source, dataset, setup.fitted)
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
    columns = None if dataset.columns is None else reader_of_rows(dataset.columns)
    row, prediction = example_of(columns, spec.loss.name, dataset.num_classes)
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
