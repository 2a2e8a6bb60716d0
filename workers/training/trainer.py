"""One differentially private training run, step by step.

Each step draws a batch, lets the clipping method choose a rule (from a noisy answer about the batch, if it asks for
one), and sums the clipped gradients. Then it adds noise of std sigma * S to the sum, divides by the public expected
batch size and passes the result to the optimiser. An empty batch is a step like any other: it adds noise and the
accountant counts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.accounting.calibration.planned_runs import TrialMechanism
from dpsweep.accounting.errors import START_ANEW, InvalidInput
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.shards import NormSnapshot
from dpsweep.workers.clipping import NORM_ERROR, ClippingState, ClipRule, released_bound
from dpsweep.workers.data import Dataset, Split
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.evaluation.predictions import Predictions, evaluate, with_evaluated_on
from dpsweep.workers.evaluation.rates import mean_by_group
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.gradients.checks import trained_parameters
from dpsweep.workers.gradients.modes import RandomState, cuda_state, modes_of, set_cuda_state, set_modes
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.machine.devices import sent
from dpsweep.workers.noise.gaussian_sources import NoiseSource, derive_seed, seed_torch
from dpsweep.workers.noise.step_noise import OtherShares, make_step_noise
from dpsweep.workers.sampling.samplers import make_row_draws, make_sampler
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.tasks import labelled
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.batch_gradients import NO_ANSWER, BatchGradients, Decision, LocalGradients, TrainingRecipe
from dpsweep.workers.training.counters import Counters, GroupCourse, GroupDepartures
from dpsweep.workers.training.gradient_canaries import GradientCanaries
from dpsweep.workers.training.history import EpochRecord
from dpsweep.workers.training.norm_recorder import NormRecorder, NormStores, choose_rows, is_due, oldest_norm
from dpsweep.workers.training.one_run_audit import Canaries, audit_gradient_scores
from dpsweep.workers.training.optimizers import InTurn, make_average, make_learning_rate_schedule
from dpsweep.workers.training.run_state import RunState, Stateful, StateOf
from dpsweep.workers.training.snapshot_intervals import Measurement, generator_rate
from dpsweep.workers.training.trial_mechanism import affordable_epochs, check_spec, moment_order, with_chosen_norms


class Trainer:
    """A training run, one step at a time. After `restore` of a `state` it continues bit-identically."""

    def __init__(
        self,
        spec: TrialSpec,
        mechanism: TrialMechanism,
        dataset: Dataset,
        noise: NoiseSource,
        norms: NormStores,
        recipe: TrainingRecipe,
    ) -> None:
        self._method = recipe.clipping
        spec = with_chosen_norms(spec, mechanism, self._method)
        self._spec, self._noise = spec, noise
        check_spec(spec, mechanism, self._method, 0 if dataset.public is None else len(dataset.public))
        self._step_noise = make_step_noise(mechanism.strategy, noise)
        self.total_steps = spec.epochs * mechanism.steps_per_epoch
        self._paid_epochs = 0
        self._test_predictions: Predictions | None = None

        self.local = local = LocalGradients(spec, dataset, recipe)
        self.gradients: BatchGradients = local
        """The engine that computes norms and clipped sums."""
        self._in_turn: InTurn | None = None
        self._model, self._data = local.model, local.data
        self._modes = modes_of(self._model)
        device = self._data.device
        self._dataset = with_evaluated_on(device, dataset)
        self._parameters = trained_parameters(self._model)
        self.canaries, self.gradient_canaries = self._make_canaries(mechanism)
        self._optimizer = recipe.optimizer(self._parameters)
        self._learning_rate = make_learning_rate_schedule(
            spec.learning_rate_schedule, self.total_steps, mechanism.steps_per_epoch
        )
        self._average = make_average(spec.averaging, self._parameters) if spec.averaging else None
        self._sampler = make_sampler(spec.sampling, len(self._data), make_row_draws(spec.known_seed), self.canaries)
        seed_torch(spec.known_seed, "model")

        draws = not self._method.keeps_to_contributions and local.engine.draws(*self._data.inputs(torch.arange(1)))
        self._mechanism = mechanism
        self._run = RunState(contributions="estimate" if draws else mechanism.contributions)
        self._everyone, self._exact = self._make_recorders(norms)
        self.stores = () if spec.norms.are_off else tuple(filter(None, (norms.everyone, norms.exact)))
        """Where norms are stored: wait for it before a checkpoint, and close it in any case."""
        self._facts = local.facts
        self._order = moment_order(spec, mechanism)
        self._rule = ClipRule(float("inf"), lambda examples: torch.ones_like(examples.norms))
        self._decided_from: ClippingState | None = None
        self._components = self._make_components(device)

    def _make_components(self, device: torch.device) -> Mapping[str, Stateful]:
        """Everything that changes from step to step, besides `RunState`, by its name in the checkpoint."""
        return {
            "model": self.local.values,
            "modes": StateOf(partial(modes_of, self._model), partial(set_modes, self._model)),
            "optimizer": self._optimizer,
            **({"average": self._average} if self._average else {}),
            **({"canaries": self.canaries} if self.canaries else {}),
            **({"gradient canaries": self.gradient_canaries} if self.gradient_canaries else {}),
            "sampler": self._sampler,
            "noise": self._noise,
            **self._step_noise.kept,
            "augmentation": _generator(self.local.augmentation_rng),
            "torch": _generator(torch.default_generator),
            "cuda": StateOf(partial(cuda_state, device), partial(set_cuda_state, device)),
            "interval": self._everyone,
        }

    def _make_canaries(self, mechanism: TrialMechanism) -> tuple[Canaries | None, GradientCanaries | None]:
        """Return the canaries of the kind that the trial is audited by, if it is."""
        spec, audit = self._spec, self._spec.audit
        if audit is None:
            return None, None
        if audit.leaves_out_rows:
            coins = make_row_draws(spec.known_seed, "coins of canaries")
            return Canaries(audit, len(self._dataset.train), spec.seed, coins), None
        trace = mechanism.trace(spec.epochs)
        return None, GradientCanaries(spec, audit, self._parameters, self._method, self.local.facts, trace)

    def _make_recorders(self, stores: NormStores) -> tuple[NormRecorder, NormRecorder | None]:
        count, population = self._spec.norms.exact_examples, len(self._data)
        everyone = NormRecorder(self._data, torch.arange(population), self.gradients, stores.everyone)
        if stores.exact is None:
            return everyone, None
        rows = choose_rows(population, count, derive_seed(self._spec.seed, "exact examples"))
        return everyone, NormRecorder(self._data, rows, self.gradients, stores.exact)

    def divide(self, gradients: BatchGradients, noise: OtherShares, in_turn: InTurn | None) -> None:
        """Use ``gradients``, which several processes compute with the same model, and their ``noise`` from here on.

        in_turn: updates parameters that the processes have divided; None where each has all of them.
        """
        self.gradients, self._in_turn = gradients, in_turn
        self._step_noise.divide(noise)
        for recorder in filter(None, (self._everyone, self._exact)):
            recorder.gradients = gradients

    def begin(self) -> None:
        """Start a new run; an initial bound that is a median is released here (its cost is in the trace).

        Raises: InvalidInput when the budget does not cover one epoch.
        """
        if not self.may_continue():
            raise InvalidInput(
                f"the budget {self._spec.budget} does not pay for one epoch at noise multiplier "
                f"{self.noise_multiplier:.6g}; raise the budget or the noise"
            )
        bound = released_bound(
            self._method.bound,
            lambda: self._everyone.measure().examples.norms,
            lambda std: float(self._noise.normal((1,), std)),
        )
        self._run.initial_bound = bound if self._spec.clipping.name != "none" else None
        self._run.clipping = self._method.start(bound, self._facts)
        if self.gradient_canaries:
            self.gradient_canaries.begin(bound)

    @property
    def mechanism(self) -> TrialMechanism:
        """The planned mechanism; contributions become estimates if the model drew random numbers or changed modes."""
        return replace(self._mechanism, contributions=self._run.contributions)

    @property
    def step_count(self) -> int:
        return self._run.step_count

    @property
    def initial_bound(self) -> float | None:
        return self._run.initial_bound

    @property
    def history(self) -> tuple[EpochRecord, ...]:
        return self._run.history

    @property
    def counters(self) -> Counters:
        return self._run.counters

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.step_count // self._mechanism.steps_per_epoch

    @property
    def at_epoch_end(self) -> bool:
        return self.step_count % self._mechanism.steps_per_epoch == 0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def public_accuracies(self) -> tuple[float, ...]:
        return tuple(record.public.main for record in self.history if record.public is not None)

    @property
    def noise_multiplier(self) -> float:
        """sigma of the current epoch."""
        return self._mechanism.schedule.noise_multiplier(self.epoch, self.public_accuracies)

    @property
    def _snapshot_is_due(self) -> bool:
        often = self._spec.norms.snapshots_per_epoch
        return often is None or is_due(self.step_count, often, self._mechanism.steps_per_epoch)

    def trace(self) -> Trace:
        """Return the trace of the steps so far."""
        epochs = -(-self.step_count // self._mechanism.steps_per_epoch)
        return self.mechanism.trace(epochs, self.public_accuracies).until(self.step_count)

    def may_continue(self) -> bool:
        """Return whether another step is planned and within the budget.

        The budget is checked again only after the last affordable epoch: by then a validation-driven schedule may have
        cost less than planned.
        """
        if self.epoch >= self._paid_epochs:
            self._paid_epochs = affordable_epochs(self._spec, self.mechanism, self.public_accuracies)
        return self.epoch < self._paid_epochs

    def draw(self) -> Tensor:
        """Return the rows of the next batch, int64 [b], on the device."""
        return sent(torch.from_numpy(self._sampler.next_batch()), self._data.device)

    def step(self, rows: Tensor | None = None) -> None:
        """Take one step: compute all norms if a refresh is due, clip, add noise, update.

        rows: those that `draw` gave last, if it was called since the last step. A step that fails before it is counted
        has shown nothing, and can be taken again.
        """
        before, decided = RandomState.of(self._data.device), (self._run.clipping, self._rule, self._decided_from)
        step = self.step_count
        try:
            if self._snapshot_is_due:
                self.refresh()
            self.advance(rows)
        except BaseException:
            if self.step_count == step:
                self._run.clipping, self._rule, self._decided_from = decided
            raise
        self._weaken_unless_repeatable(before)

    def refresh(self) -> None:
        """Store the last snapshot of all norms, and compute them again; with ``when_sampled``, only old ones."""
        step, rate = self.step_count, generator_rate(self._order, self.noise_multiplier)
        if self._spec.norms.when_sampled and step > 0:
            self._everyone.renew_as_old_as(oldest_norm(step, self._mechanism.steps_per_epoch))
            self._everyone.continue_at(step, rate)
        else:
            self._everyone.store()
            self._run.clipping = self._method.refresh(self._run.clipping, self._everyone.open(step, rate))

    @property
    def needs_norms(self) -> bool:
        """Return whether `advance` needs the norms of all examples."""
        return self._method.refreshes or self._spec.norms.when_sampled

    def advance(self, rows: Tensor | None = None) -> None:
        """Take the part of a step after the norms of all examples: clip, add noise, update. rows: as in `step`.

        It is counted before the update, because an interrupted update has shown a part.
        """
        sigma, step = self.noise_multiplier, self.step_count
        prices = self._mechanism.prices(sigma)
        if prices is not None:
            self._run.clipping = self._method.pay(self._run.clipping, prices)
            if self.gradient_canaries:
                self.gradient_canaries.pay(prices)

        rows = self.draw() if rows is None else rows
        clipped = self._clipped_sum(rows)
        self.counters.non_finite_gradients += clipped.non_finite
        self.counters.empty_batches += int(len(rows) == 0)

        if self._spec.norms.when_sampled:
            self._everyone.renew(rows, clipped.norms)
        self._everyone.extend(self._rule)
        if self._exact is not None:
            self._exact.open(step, generator_rate(self._order, sigma))
            self._exact.extend(self._rule)
            self._exact.store()
        self._run.step_count += 1
        self._update(clipped.gradients, sigma, step)

    def _weaken_unless_repeatable(self, before: RandomState) -> None:
        """Downgrade contributions if this step drew torch random numbers or changed modes.

        The measured norms may then differ from the norms of the summed gradients. A model can begin to do so at any
        step.
        """
        repeatable = before.is_current() and modes_of(self._model) == self._modes
        if not (repeatable and self.gradients.others_repeat) and not self._method.keeps_to_contributions:
            self._run.contributions = "estimate"

    def norms_so_far(self) -> tuple[NormSnapshot, ...]:
        """Return the snapshots that are not stored yet, as they would be if the run ended here."""
        return () if self._spec.norms.are_off else self._everyone.so_far()

    def complete_norms(self) -> None:
        """Have all snapshots stored that are not yet, and marked as complete, at the end of training."""
        self._everyone.store()
        for store in self.stores:
            store.complete()

    def _clipped_sum(self, rows: Tensor) -> WeightedSum:
        """Return the clipped sum under the rule of this step.

        A method without a query chooses its rule before the batch, which saves a second pass over micro-batches.
        """
        query = self._method.query
        if query is None:
            self._decide(NO_ANSWER)
            assert self._decided_from is not None, "the rule of this step was decided from it"
            return self.gradients.weighted_sum_rowwise(rows, Decision(self._rule, self._decided_from))

        def weigh(norms: BatchNorms) -> Tensor:
            batch = self._data.examples(rows, norms)
            answer = self._method.answer(self._run.clipping, batch, self._facts)
            self._decide(self._noise.added(answer, query.noise_std).cpu())
            return self._rule.weights(batch)

        return self.gradients.weighted_sum(rows, weigh)

    def _decide(self, noisy_answer: Tensor) -> None:
        """Set the rule of this step; without a query, the last rule is reused while the clipping state is unchanged."""
        clipping = self._run.clipping
        if self._method.query is not None or clipping is not self._decided_from:
            self._rule = self._method.decide(clipping, noisy_answer, self._facts)
            self._decided_from = clipping
        self._run.clipping = self._method.advance(clipping, noisy_answer, self._facts)

    def _update(self, gradients: Mapping[str, Tensor], sigma: float, step: int) -> None:
        """Add noise of std sigma S (1 + NORM_ERROR), which covers the rounding error of clipped norms, and update."""
        std = sigma * self._rule.sensitivity * (1.0 + NORM_ERROR) if sigma > 0.0 else 0.0
        if self._in_turn is None:
            self._update_whole(gradients, std, step)
        else:
            self._update_in_turn(self._in_turn, gradients, std, step)
        self._test_predictions = None
        self.gradients.model_changed()

    def _update_whole(self, gradients: Mapping[str, Tensor], std: float, step: int) -> None:
        batch_size = self._facts.batch_size
        canaries = self.gradient_canaries
        summed = canaries.with_canaries(gradients, self._rule, self._facts.num_groups) if canaries else gradients
        noisy, spread = self._step_noise.released(summed, std)
        if canaries:
            canaries.see(gradients, noisy, std)
        torch._foreach_div_(list(noisy.values()), batch_size)
        factor, noise_std = self._learning_rate(step), spread / batch_size
        taken = canaries.left_of(noisy, factor, noise_std) if canaries else noisy
        self._optimizer.step(taken, factor, noise_std)
        if self._average is not None:
            self._average.update(self._parameters)

    def _update_in_turn(self, others: InTurn, gradients: Mapping[str, Tensor], std: float, step: int) -> None:
        """Update as `_update_whole`, to the same bits, with one whole gradient at a time."""
        size, sums = self._facts.batch_size, (each.flatten() for each in gradients.values())
        noisy, spread = self._step_noise.in_turn(sums, self.num_parameters, std)
        means = (torch._foreach_div([each], size)[0] for each in noisy)  # a kernel of one tensor rounds otherwise
        others.step(zip(gradients, means, strict=True), self._learning_rate(step), spread / size)

    def end_epoch(self) -> EpochRecord:
        """Evaluate on held-out and public data, and append the public record of the completed epoch to the history."""
        step, epoch = self.step_count, self.epoch - 1
        test, public = self.evaluations()
        record = EpochRecord(
            epoch=epoch,
            step=step,
            noise_multiplier=self._mechanism.schedule.noise_multiplier(epoch, self.public_accuracies),
            sensitivity=self._rule.sensitivity if self.initial_bound is not None else None,
            bounds=dict(self._rule.bounds),
            test=test,
            public=public,
        )
        self._run.history = (*self.history, record)
        self._note_departures(record.noise_multiplier)
        if not self._spec.norms.are_off:
            self.counters.courses = self.counters.courses or new_courses(self._dataset.train.groups)
            note_epoch(self.counters.courses, self._everyone.measured, self._rule, self._dataset.train.labels)
        return record

    def evaluations(self) -> tuple[Evaluation, Evaluation | None]:
        """Return the model as it is now on held-out test data and, if there are any, on public data."""
        model, dataset = self.released_model(), self._dataset

        def evaluated(split: Split) -> Evaluation:
            return evaluate(model, split, dataset, self.local.loss, self._spec.min_group_size, self._predict)

        return evaluated(dataset.test), None if dataset.public is None else evaluated(dataset.public)

    def predictions(self) -> tuple[Predictions, Predictions | None]:
        """Return predictions of the current model on test data and, if there are any, on held-out examples."""
        shown, dataset, loss = self.released_model(), self._dataset, self.local.loss
        tested, held_out = self._test_predictions or self._predict(shown, dataset.test, dataset, loss), dataset.held_out
        return tested, None if held_out is None else self._predict(shown, held_out, dataset, loss)

    def _predict(self, model: nn.Module, split: Split, dataset: Dataset, loss: Loss) -> Predictions:
        """Predictions on ``split``; those on test data are kept until the model changes."""
        found = self.gradients.predict(model, split, dataset, loss)
        if split is dataset.test:
            self._test_predictions = found
        return found

    def _note_departures(self, sigma: float) -> None:
        prices, groups = self._mechanism.prices(sigma), self._dataset.train.groups
        if prices is not None:
            none = [GroupDepartures(group, size) for group, size in _sizes(groups)]
            self.counters.departures = self.counters.departures or none
            left = groups[self._method.used_up(self._run.clipping, prices)]
            for each in self.counters.departures:
                each.left.append(int((left == each.group).sum()))

    def audited(self) -> AuditResult | None:
        """Return what gradient canaries prove, after the last step; None without any."""
        canaries = self.gradient_canaries
        if canaries is None:
            return None
        run = canaries.stated(self.trace(), self._spec.delta)
        return audit_gradient_scores(canaries.scores, canaries.included, canaries.audit, run, self._spec.seed)

    def released_model(self) -> nn.Module:
        """Return the model to evaluate and store: a copy with averaged parameters if averaging is on."""
        return self._model if self._average is None else self._average.averaged(self._model)

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs to continue bit for bit; private data."""
        components = {name: component.state() for name, component in self._components.items()}
        rule_stands = self._method.query is None and self._run.clipping is self._decided_from
        return {**self._run.state(), **components, "rule_stands": rule_stands}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises: InvalidInput when it lacks a component."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise InvalidInput(
                f"the checkpoint lacks {', '.join(missing)}: another version of dpsweep wrote it. Finish the trial "
                f"with that one, or {START_ANEW}"
            )
        self._test_predictions = None
        self._run.restore(state)
        for name, component in self._components.items():
            component.restore(state[name])
        if state["rule_stands"]:
            self._decided_from = self._run.clipping
            self._rule = self._method.decide(self._run.clipping, NO_ANSWER, self._facts)
            self._everyone.keep_rule(self._rule)


def _generator(generator: torch.Generator) -> StateOf:
    return StateOf(generator.get_state, generator.set_state)


def new_courses(groups: Tensor) -> list[GroupCourse]:
    """Return an empty course for each group that has examples. groups: int64 [n]."""
    return [GroupCourse(group, size) for group, size in _sizes(groups)]


def note_epoch(courses: Sequence[GroupCourse], measured: Measurement, rule: ClipRule, labels: Tensor) -> None:
    """Append the means of the epoch that ended with a step under ``rule``. labels: [n, ...], of training examples."""
    examples = measured.examples
    finite = examples.norms.isfinite() & measured.losses.isfinite()
    has_loss = torch.from_numpy(labelled(labels)).to(finite.device)[examples.rows]
    losses = _means(measured.losses, examples.groups, finite & has_loss)
    norms, biases = (_means(values, examples.groups, finite) for values in (examples.norms, rule.removed(examples)))
    for course in courses:
        course.losses.append(losses[course.group])
        course.norms.append(norms[course.group])
        course.biases.append(biases[course.group])


def _sizes(groups: Tensor) -> list[tuple[int, int]]:
    """Return each group [n] that has examples, and their number."""
    return [(group, size) for group, size in enumerate(torch.bincount(groups.cpu()).tolist()) if size]


def _means(values: Tensor, groups: Tensor, finite: Tensor) -> list[float | None]:
    """Return the mean of the finite ``values`` [n] by group; None for a group without any."""
    known = finite.cpu().numpy()
    of_groups = groups.cpu().numpy()
    means = mean_by_group(values.double().cpu().numpy()[known], of_groups[known], int(of_groups.max()) + 1)
    return [None if math.isnan(mean) else mean for mean in means.tolist()]
