"""Gradient norms and clipped sums of gradients of training examples, which are named by their rows.

`LocalGradients` computes them in this process; `dpsweep.workers.trials.data_parallel` divides the rows among several
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Protocol, assert_never

import torch
from torch import Tensor, nn

from dpsweep.workers.clipping import ClippingMethod, ClippingState, ClipRule, Examples, PublicFacts
from dpsweep.workers.data import Dataset, Split, as_targets
from dpsweep.workers.evaluation.predictions import Predictions, predict
from dpsweep.workers.gradients.checks import check_model, require_autocast
from dpsweep.workers.gradients.engine import GradientEngine, Weigh
from dpsweep.workers.gradients.micro_batches import Launches
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.gradients.planners import ShapePlanner, TimingPlanner
from dpsweep.workers.gradients.rows_at_once import rows_at_once
from dpsweep.workers.machine.devices import choose_device, room_for_data
from dpsweep.workers.models import build_model
from dpsweep.workers.noise.gaussian_sources import start_generator
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.sampling.users import loss_of, slots_of, with_weights
from dpsweep.workers.spec import TrialSpec, UserSpec
from dpsweep.workers.tasks.losses import Loss, build_loss
from dpsweep.workers.training.augmentation import augmented, make_augmentation
from dpsweep.workers.training.optimizers import Optimizer, Parameters, make_optimizer
from dpsweep.workers.training.run_state import ModelValues, digest_of_frozen


@dataclass(frozen=True)
class TrainingRecipe:
    """A clipping method, and functions that make the model, loss and optimizer that it is applied to.

    optimizer: for parameters on their device.
    digest: of the frozen values of the model.
    launches: as in `GradientEngine`.
    """

    clipping: ClippingMethod
    model: Callable[[], nn.Module]
    loss: Callable[[], Loss]
    optimizer: Callable[[Parameters], Optimizer]
    digest: Callable[[nn.Module], str] = digest_of_frozen
    launches: Launches = "each"


def recipe_of(spec: TrialSpec, method: ClippingMethod, dataset: Dataset, code: UserCode) -> TrainingRecipe:
    """Return the recipe of ``spec``, whose clipping method is made already."""
    return TrainingRecipe(
        method,
        partial(build_model, spec.model, dataset, spec.seed, code),
        partial(build_loss, spec.loss, code, dataset.task, dataset.num_classes),
        partial(make_optimizer, spec.optimizer),
        launches="recorded",
    )


NO_ANSWER: Final = torch.zeros(0, dtype=torch.float64)
"""Empty noisy answer, passed to clipping methods without a query."""


@dataclass(frozen=True)
class Decision:
    """The clipping rule of a step and the state it was decided from, for a method without a query."""

    rule: ClipRule
    state: ClippingState


class BatchGradients(Protocol):
    """Per-example gradients of the training data; see `dpsweep.workers.gradients.engine.GradientEngine`. Rows are on
    the device.

    others_repeat: whether the passes of all other processes were repeatable, which means that they drew no random
    numbers and changed the mode of no module.
    """

    others_repeat: bool

    def norms(self, rows: Tensor) -> BatchNorms:
        """Return norms and losses of the examples as they are, without augmentation."""
        ...

    def weighted_sum(self, rows: Tensor, weigh: Weigh) -> WeightedSum:
        """Return the weighted sum over a batch whose weights may depend on the norms of the whole batch."""
        ...

    def weighted_sum_rowwise(self, rows: Tensor, decision: Decision) -> WeightedSum:
        """Return the weighted sum over a batch in which each weight depends on its own example only: one pass."""
        ...

    def predict(self, model: nn.Module, split: Split, dataset: Dataset, loss: Loss) -> Predictions:
        """Return the bits of `dpsweep.workers.evaluation.predictions.predict`. model: the trained one, or one like
        it.
        """
        ...

    def model_changed(self) -> None:
        """Tell other processes that parameters have changed; call it after every update."""
        ...

    def random_states(self) -> tuple[Tensor, ...]:
        """Return states of the random generators of all other processes, for the checkpoint."""
        ...

    def finish(self) -> None:
        """Let the other processes end."""
        ...


class LocalGradients:
    """`BatchGradients` computed by this process alone.

    Builds the model and the generator of the augmentation. The trainer owns both: it updates and restores them.
    ``values``: of the model, for the checkpoint.
    """

    others_repeat = True

    def __init__(self, spec: TrialSpec, dataset: Dataset, recipe: TrainingRecipe) -> None:
        device, execution = choose_device(spec.execution.device), spec.execution
        self.model = recipe.model()
        check_model(self.model)
        self.model.to(device)
        self.values = ModelValues(self.model, recipe.digest(self.model))
        autocast = torch.bfloat16 if execution.autocast else None
        require_autocast(self.model, autocast)
        self.loss, method = recipe.loss(), recipe.clipping
        self.augmentation_rng = torch.Generator()
        start_generator(self.augmentation_rng, spec.known_seed, "augmentation")
        self._augmentation = make_augmentation(spec.augmentation) if spec.augmentation else None
        self.data = training_data(dataset, spec.users, device)
        size = len(self.data)

        loss, rows_of_one = self.loss, 1
        if spec.users is not None:
            loss, rows_of_one = loss_of(spec.users, loss, dataset.train.labels), spec.users.rows_of_member

        def engine(multiplicity: int) -> GradientEngine:
            return GradientEngine(
                self.model,
                loss,
                micro_batch_size=execution.micro_batch_size,
                last_micro_batch=execution.last_micro_batch,
                multiplicity=multiplicity,
                layerwise=method.layerwise,
                planner=ShapePlanner() if execution.deterministic else TimingPlanner(),
                autocast=autocast,
                launches=recipe.launches,
            )

        self.engine = engine(self._augmentation.multiplicity if self._augmentation else rows_of_one)
        self._plain = self.engine if self._augmentation is None else engine(1)
        self._method = method
        self.facts = PublicFacts(dataset.group_names, self.engine.layer_names, size, spec.sampling.expected_size(size))

    @cached_property
    def _rows_at_once(self) -> int:
        """Number of examples in one pass of `norms`."""
        example, _ = self.data.inputs(torch.zeros(1, dtype=torch.int64, device=self.data.device))
        return max(1, rows_at_once(self.model, example[:1]) // len(example))

    def decision(self, state: ClippingState) -> Decision:
        """Return the decision of a clipping method without a query in this state."""
        return Decision(self._method.decide(state, NO_ANSWER, self.facts), state)

    def norms(self, rows: Tensor) -> BatchNorms:
        chunks = torch.split(rows, self._rows_at_once)
        return BatchNorms.joined([self._plain.norms(*self.data.inputs(some)) for some in chunks])

    def weighted_sum(self, rows: Tensor, weigh: Weigh) -> WeightedSum:
        return self.engine.weighted_sum(*self._batch(rows), weigh)

    def weighted_sum_rowwise(self, rows: Tensor, decision: Decision) -> WeightedSum:
        return self.engine.weighted_sum_rowwise(
            *self._batch(rows), lambda norms, part: decision.rule.weights(self.data.examples(rows[part], norms))
        )

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.data.inputs(rows)
        if self._augmentation is None:
            return x, y
        return augmented(self._augmentation, x, y, self.augmentation_rng)

    def predict(self, model: nn.Module, split: Split, dataset: Dataset, loss: Loss) -> Predictions:
        return predict(model, split, dataset, loss)

    def model_changed(self) -> None:
        return None

    def random_states(self) -> tuple[Tensor, ...]:
        return ()

    def finish(self) -> None:
        return None


class TrainingData:
    """The training split, kept on the device if it fits. ``rows`` are positions in the split, int64 [b].

    `room`: largest number of bytes of features and labels to keep on the device; larger data stay in the memory of the
    host, and each batch is copied to the device.
    """

    def __init__(self, dataset: Dataset, device: torch.device, room: float) -> None:
        split = dataset.train
        place = device if split.features.nbytes + split.labels.nbytes <= room else torch.device("cpu")
        self._preparation = dataset.preparation
        self._features, self._labels = split.features.to(place), split.labels.to(place)
        self._groups, self._ids = split.groups.to(device), split.example_ids
        self.device = device

    def __len__(self) -> int:
        return len(self._ids)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return prepared features [b, ...] and labels [b, ...], copies of those stored.

        index_select copies whole rows, indexing single values.
        """
        return self._prepared(rows), as_targets(_at(self._labels, rows).to(self.device))

    def _prepared(self, rows: Tensor) -> Tensor:
        return self._preparation(_at(self._features, rows).to(self.device))

    def examples(self, rows: Tensor, norms: BatchNorms) -> Examples:
        """Return what a clipping method may know about the examples ``rows``."""
        return Examples(norms.norms, self._groups.index_select(0, rows), rows, norms.layer_norms)

    def ids(self, rows: Tensor) -> Tensor:
        """Return example ids [b], on the CPU."""
        return self._ids[rows.cpu()]


def _at(column: Tensor, rows: Tensor) -> Tensor:
    return column.index_select(0, rows.to(column.device))


class UserData(TrainingData):
    """The training split as users, each an example of ``most`` consecutive rows
    (`dpsweep.workers.sampling.users.slots_of`).

    ``rows`` are positions among the users. Targets carry the weights of the rows
    (`dpsweep.workers.sampling.users.with_weights`).
    """

    def __init__(self, dataset: Dataset, device: torch.device, room: float, most: int) -> None:
        super().__init__(dataset, device, room)
        slots, weights = slots_of(dataset.train, most)
        self._slots, self._weights = torch.from_numpy(slots).to(device), torch.from_numpy(weights).to(device)
        self._targets: Tensor | None = None
        """Targets of all users [users, most, 2], where a row has one label: joined once, not at every step."""
        if self._labels.ndim == 1:
            labels = as_targets(_at(self._labels, self._slots.flatten()).to(device))
            self._targets = with_weights(labels, self._weights.flatten()).view(*slots.shape, 2)
        self._groups, self._ids = torch.zeros(len(slots), dtype=torch.int64, device=device), torch.arange(len(slots))

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return prepared features and weighted targets of the users' rows, [b * most, ...]."""
        slots = _at(self._slots, rows).flatten()
        if self._targets is not None:
            return self._prepared(slots), _at(self._targets, rows).flatten(0, 1)
        features, labels = super().inputs(slots)
        return features, with_weights(labels, _at(self._weights, rows).flatten())


def training_data(dataset: Dataset, users: UserSpec | None, device: torch.device) -> TrainingData:
    """Return the population that is sampled: the rows of the training split, or its users."""
    room = room_for_data(device)
    if users is None:
        return TrainingData(dataset, device, room)
    match users.sampling:
        case "els":
            return TrainingData(dataset, device, room)
        case "uls":
            return UserData(dataset, device, room, users.max_records)
        case _:
            assert_never(users.sampling)
