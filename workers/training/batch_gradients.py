"""Gradient norms and clipped sums of gradients of training examples, which are named by their rows.

`LocalGradients` computes them in this process; `dpsweep.workers.trials.data_parallel` divides the rows among several
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from dpsweep.workers.clipping import ClippingState, ClipRule, PublicFacts
from dpsweep.workers.data import Dataset, Split
from dpsweep.workers.evaluation.predictions import Predictions, predict
from dpsweep.workers.gradients import (
    BatchNorms,
    GradientEngine,
    ShapePlanner,
    TimingPlanner,
    WeightedSum,
    require_autocast,
)
from dpsweep.workers.gradients.rows_at_once import rows_at_once
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.noise.generators import start_generator
from dpsweep.workers.sampling.users import loss_of
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.augmentation import augmented, make_augmentation
from dpsweep.workers.training.run_state import ModelValues
from dpsweep.workers.training.training_data import training_data
from dpsweep.workers.training.training_parts import Parts

Weigh = Callable[[BatchNorms], Tensor]
"""Norms of a whole batch -> weights [b], or [b, L] for per-layer clipping."""

NO_ANSWER: Final = torch.zeros(0, dtype=torch.float64)
"""Empty noisy answer, passed to clipping methods without a query."""


@dataclass(frozen=True)
class Decision:
    """The clipping rule of a step and the state it was decided from, for a method without a query."""

    rule: ClipRule
    state: ClippingState


class BatchGradients(Protocol):
    """Per-example gradients of the training data; see `dpsweep.workers.gradients.GradientEngine`. Rows are on the
    device.

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

    def __init__(self, spec: TrialSpec, dataset: Dataset, parts: Parts) -> None:
        device, execution = choose_device(spec.execution.device), spec.execution
        self.model = parts.model().to(device)
        self.values = ModelValues(self.model, parts.digest(self.model))
        autocast = torch.bfloat16 if execution.autocast else None
        require_autocast(self.model, autocast)
        self.loss, method = parts.loss(), parts.clipping
        self.data = training_data(dataset, spec.users, device)
        self.augmentation_rng = torch.Generator()
        start_generator(self.augmentation_rng, spec.noise_source, spec.seed, "augmentation")
        self._augmentation = make_augmentation(spec.augmentation) if spec.augmentation else None

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
            )

        self.engine = engine(self._augmentation.multiplicity if self._augmentation else rows_of_one)
        self._plain = self.engine if self._augmentation is None else engine(1)
        self._method = method
        size = len(self.data)
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
        chunks = [self._plain.norms(*self.data.inputs(some)) for some in torch.split(rows, self._rows_at_once)]
        by_layer = [chunk.layer_norms for chunk in chunks if chunk.layer_norms is not None]
        return BatchNorms(
            torch.cat([chunk.norms for chunk in chunks]),
            torch.cat(by_layer) if by_layer else None,
            torch.cat([chunk.losses for chunk in chunks]),
        )

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
