"""Per-example gradient norms and weighted sums of per-example gradients (book-keeping, Bu et al. 2023).

One forward pass captures the input of every layer, and one backward pass computes the gradient of every layer's output.
Norms and weighted sums are computed from these pairs, without a second backward pass and without instantiating the
per-example gradients of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.checks import check_model, require_trained, unchanged
from dpsweep.workers.gradients.deferred_checks import FinitenessCheck
from dpsweep.workers.gradients.deterministic_passes import draws
from dpsweep.workers.gradients.divided import any_divided
from dpsweep.workers.gradients.factors import ExampleGradients, square_together, sum_together, widen
from dpsweep.workers.gradients.layers import Form, Unverified
from dpsweep.workers.gradients.linear import gram_together
from dpsweep.workers.gradients.micro_batches import (
    LastMicroBatch,
    Launches,
    MicroBatch,
    micro_batches,
    require_equal_rows,
    require_last,
    with_padding,
)
from dpsweep.workers.gradients.modes import RandomState, Structure, structure_of
from dpsweep.workers.gradients.pass_results import (
    BatchNorms,
    Combination,
    Forwarded,
    Pass,
    Sums,
    WeightedSum,
    require_same,
)
from dpsweep.workers.gradients.per_row import reading_as_verified
from dpsweep.workers.gradients.planners import Planner, default_planner
from dpsweep.workers.gradients.recorded import Done, Recording, Recordings
from dpsweep.workers.gradients.verified_model import PerExampleLoss, VerifiedModel
from dpsweep.workers.machine.devices import float32_precisions, lacks_memory, refuse_autocast

T = TypeVar("T")

Weigh = Callable[[BatchNorms], Tensor]
"""Norms of a whole batch -> weights [B] or, for a layerwise engine, [B, L]."""

WeighRows = Callable[[BatchNorms, slice], Tensor]
"""Norms of some examples, and their slice of the batch -> weights [b] or [b, L]."""


class GradientEngine:
    """Per-example gradients of ``per_example_loss(model(x), y)`` with respect to the trainable parameters.

    micro_batch_size: maximum number of examples in memory at once; None for the whole batch.
    last_micro_batch: a last micro-batch with fewer examples stays "shorter", or is "padded" with rows of weight 0, so
    that all have one shape.
    multiplicity: K consecutive rows of x and y are one example, whose loss is their mean (augmentation multiplicity, De
    et al. 2022).
    layerwise: whether to also return norms per layer, and to accept weights per layer.
    planner: chooses among equivalent computations; by default `default_planner`.
    autocast: dtype of `torch.autocast` in the forward pass, or None.
    launches: "recorded" lets passes over full micro-batches be recorded as CUDA graphs; between calls nothing of model
    and loss may then change but values of parameters and buffers.

    The model must treat the rows of a batch independently. `check_model` refuses layers known not to, and gradients are
    verified in the first batch, and of a few examples in the 1st, 8th, 64th ... batch after it. Float32 norms of at
    least 1e-12 have a relative error of at most 1e-5 if TensorFloat-32 is off.

    Raises: InvalidInput for impossible sizes, and for models without per-example gradients.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> engine = GradientEngine(model, lambda output, y: (output[:, 0] - y).square() / 2)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([1.0, 2.0])
    >>> engine.norms(x, y).norms
    tensor([5., 2.])
    >>> clipped = engine.weighted_sum(x, y, lambda norms: (1.0 / norms.norms).clamp(max=1.0))
    >>> clipped.gradients["weight"]
    tensor([[-0.6000, -1.8000]])
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        *,
        micro_batch_size: int | None = None,
        last_micro_batch: LastMicroBatch = "shorter",
        multiplicity: int = 1,
        layerwise: bool = False,
        planner: Planner | None = None,
        autocast: torch.dtype | None = None,
        launches: Launches = "each",
    ) -> None:
        if micro_batch_size is not None and not micro_batch_size >= 1:
            raise InvalidInput(f"micro_batch_size is {micro_batch_size}, but must be at least 1, or None")
        if not multiplicity >= 1:
            raise InvalidInput(f"multiplicity is {multiplicity}, but must be at least 1")
        require_last(last_micro_batch, micro_batch_size)
        check_model(model)
        self.model = model
        self._loss = per_example_loss
        self._micro_batch_size, self._last_micro_batch = micro_batch_size, last_micro_batch
        self._multiplicity = multiplicity
        self._planner = planner or default_planner(next(iter(model.parameters())).device)
        self._read = dict(model.named_parameters())
        self._parameters = {name: p for name, p in self._read.items() if p.requires_grad}
        self._verified = VerifiedModel(
            model, per_example_loss, self._parameters, micro_batch_size, last_micro_batch, multiplicity, autocast
        )
        self._named_layers, self._outputs = self._verified.layers, self._verified.outputs
        self._finiteness = FinitenessCheck()
        self._structure: Structure = ()
        can_record = micro_batch_size is not None and next(iter(self._read.values())).device.type == "cuda"
        self._recordings = Recordings(model, per_example_loss) if launches == "recorded" and can_record else None
        self._axes_of_weights = 1
        self._layer_of: dict[str, int] = {}
        for index, layer in enumerate(self._named_layers):
            for name in layer.parameters.values():
                self._layer_of.setdefault(name, index)
        self._combination = Combination(len(self._named_layers), self._layer_of, layerwise)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The L layers with trainable parameters, in the order of ``layer_norms``."""
        return tuple(layer.name for layer in self._named_layers)

    @property
    def forms(self) -> Mapping[str, Form]:
        """Return how the per-example gradients of each layer are computed, by its name; final after the first batch."""
        return {layer.name: "per example" if layer.forced else layer.form for layer in self._verified.layers}

    @property
    def not_recorded(self) -> str | None:
        """Return why no pass is recorded, or None if passes over full micro-batches are, after the first ones."""
        if self._recordings is None:
            return "recordings need a GPU, a micro-batch size, and launches='recorded'"
        return self._recordings.refused

    @property
    def per_example(self) -> Mapping[str, str]:
        """Return why layers run once per example, by their name; final after the first batch."""
        return {layer.name: layer.forced for layer in self._verified.layers if layer.forced}

    @torch.no_grad()
    def norms(self, x: Tensor, y: Tensor) -> BatchNorms:
        """Return norms and losses of every example, in the cheapest way without a later weighted sum."""
        passes = self._settled(x, y, lambda batches: [self._norms_only(batch) for batch in batches])
        return self._combination.joined(passes, x.device)

    @torch.no_grad()
    def weighted_sum(self, x: Tensor, y: Tensor, weigh: Weigh) -> WeightedSum:
        """Return sum_i w_i g_i with w = weigh(norms of the whole batch).

        A single micro-batch takes one pass. Several micro-batches take a norm pass each, and then each a second pass
        for the sum, which repeats the random numbers and is bit-identical. If each weight depends only on its own
        example, `weighted_sum_rowwise` saves the second pass. Examples whose gradient is not finite get weight 0 and
        are left out of the sum.

        Raises: InvalidInput for weights of a wrong shape, and if the losses differ between the two passes.
        """
        if self._micro_batch_size is None or len(x) <= self._micro_batch_size * self._multiplicity:
            return self.weighted_sum_rowwise(x, y, lambda norms, _: weigh(norms))
        done = self._settled(x, y, lambda batches: [(batch, self._norm_pass(batch)) for batch in batches])
        norms = self._combination.joined([one.norms for _, one in done], x.device)
        weights = self._checked(weigh(norms), norms)
        sums, cleaned, differ = Sums(self._parameters), [], []
        with RandomState.preserved(x.device):
            parts = torch.split(weights, [len(one.norms.losses) for _, one in done])
            for (batch, first), part in zip(done, parts, strict=True):
                cleaned.append(first.without_infinite(part))
                differ.append(self._sum_again(batch, first, cleaned[-1], sums))
        require_same(torch.stack(differ))
        non_finite = sum(one.non_finite() for _, one in done)
        return WeightedSum(norms, torch.cat(cleaned), sums.complete(), non_finite)

    @torch.no_grad()
    def weighted_sum_rowwise(self, x: Tensor, y: Tensor, weigh: WeighRows) -> WeightedSum:
        """Return sum_i w_i g_i in one pass per micro-batch; each weight may depend only on its own example.

        ``weigh(norms, rows)`` returns the weights of the examples ``rows`` (a slice of the batch), given their norms.
        """
        return self._settled(x, y, partial(self._rowwise, x, weigh))

    def _settled(self, x: Tensor, y: Tensor, compute: Callable[[Sequence[MicroBatch]], T]) -> T:
        """Return ``compute`` of the micro-batches; where it calls a layer in a new way, once they are verified."""
        require_equal_rows(x, y, self._multiplicity)
        before = RandomState.of(x.device)
        try:
            batches = self._micro_batches(x, y)
            return self._finiteness.settled(batches, partial(compute, batches))
        except Unverified as error:
            self._verified.adapt_to(error)
        before.restore()
        batches = self._micro_batches(x, y)
        return self._finiteness.settled(batches, partial(compute, batches))

    def _rowwise(self, x: Tensor, weigh: WeighRows, batches: Sequence[MicroBatch]) -> WeightedSum:
        parts, weights, sums, start, non_finite = [], [], Sums(self._parameters), 0, 0
        for batch in batches:
            norms, part, infinite = self._sum_rowwise(batch, start, weigh, sums)
            parts.append(norms)
            weights.append(part)
            start += part.shape[0]
            non_finite += infinite
        norms = self._combination.joined(parts, x.device)
        all_weights = weights[0] if len(weights) == 1 else torch.cat(weights or [weigh(norms, slice(0, 0))])
        return WeightedSum(norms, all_weights, sums.complete(), non_finite)

    def draws(self, x: Tensor, y: Tensor) -> bool:
        """Return whether a pass over these rows draws random numbers, by which norms differ between passes."""
        return draws(self.model, self._loss, x.device, lambda: self._verified.losses(x, y))

    def _sum_again(self, batch: MicroBatch, first: Pass, weights: Tensor, sums: Sums) -> Tensor:
        """Add the weighted sum of a micro-batch in a second pass. Its gradients are freed on return.

        Returns whether any loss differs from the first pass, as a scalar on the device.
        """
        if first.random_state is not None:
            first.random_state.restore()
        losses, gradients = self._differentiate(batch.x, batch.y)
        self._add(sums, batch, gradients, weights, first.finite)
        return (
            torch.isclose(first.norms.losses, losses[: batch.examples], rtol=1e-5, atol=1e-6, equal_nan=True)
            .logical_not_()
            .any()
        )

    def _sum_rowwise(
        self, batch: MicroBatch, start: int, weigh: WeighRows, sums: Sums
    ) -> tuple[BatchNorms, Tensor, int]:
        """Norms, weights and number of infinite norms of one micro-batch. Its gradients are freed on return."""
        rows = slice(start, start + batch.examples)
        replayed, weights = self._replayed(batch, keep=True), None
        if replayed is not None:
            recording, norms = replayed
            weights = self._checked(weigh(norms, rows), norms)
            if weights.dim() == self._axes_of_weights:
                sums.add(recording.sums(self._with_padding(weights, batch)))
                return norms, weights, 0
        done = self._pass(batch, keep=True)
        norms = done.norms
        if weights is None:  # a rule that answers a query must be asked once
            weights = self._checked(weigh(norms, rows), norms)
        weights = done.without_infinite(weights)
        self._axes_of_weights = weights.dim()
        added = self._add(sums, batch, done.gradients, weights, done.finite)
        self._compare_recording(batch, Done(norms, self._with_padding(weights, batch), added), done.finite)
        return norms, weights, done.non_finite()

    def _norms_only(self, batch: MicroBatch) -> BatchNorms:
        replayed = self._replayed(batch, keep=False)
        if replayed is not None:
            return replayed[1]
        done = self._pass(batch, keep=False)
        self._compare_recording(batch, Done(done.norms, None, {}), done.finite)
        return done.norms

    def _replayed(self, batch: MicroBatch, *, keep: bool) -> tuple[Recording, BatchNorms] | None:
        """Return the recording of this kind of pass with its norms; None if there is none, or norms are not finite."""
        recordings = self._recordings_of(batch)
        recording = None if recordings is None else recordings.ready(self._kind(batch, keep))
        if recording is None:
            return None
        norms, total = recording.norms(batch.x, batch.y)
        if not self._finiteness.are_finite(norms, total):
            return None
        return recording, norms.of_first(batch.examples)

    def _compare_recording(self, batch: MicroBatch, done: Done, finite: Tensor | None) -> None:
        """Compare a pass with its recording, if it can have one."""
        recordings, keep = self._recordings_of(batch), done.weights is not None
        if recordings is not None and finite is None:
            kind, forward = self._kind(batch, keep), partial(self._forward, keep=keep)
            recordings.compare(kind, batch.x, batch.y, forward, self._weighted, done)

    def _recordings_of(self, batch: MicroBatch) -> Recordings | None:
        """Return the recordings if the pass may be recorded: of a full micro-batch, and a model in one piece."""
        recordings = self._recordings
        if recordings is None or recordings.refused or any_divided():
            return None
        is_full = len(batch.x) == (self._micro_batch_size or 0) * self._multiplicity
        places = {batch.x.device, batch.y.device, next(iter(self._read.values())).device}
        return recordings if is_full and len(places) == 1 else None

    def _kind(self, batch: MicroBatch, keep: bool) -> Hashable:
        """Return everything outside x and y that a pass reads, by address where values may change."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        rows = [(each.shape, each.stride(), each.dtype, each.device) for each in (batch.x, batch.y)]
        held = [(each.data_ptr(), each.shape, each.stride(), each.dtype, each.requires_grad) for each in tensors]
        settings = self._structure, self._outputs.finding, *float32_precisions()
        return keep, self._axes_of_weights * keep, *settings, *rows, *held

    def _with_padding(self, weights: Tensor, batch: MicroBatch) -> Tensor:
        padded = with_padding(weights, batch.x.shape[0] // self._multiplicity)
        return padded if self._recordings is None else padded.contiguous()

    def _in_room(self, compute: Callable[[], T], device: torch.device) -> T:
        """Return the result of ``compute``, at the cost of recordings if these hold the memory that it needs."""
        recordings = self._recordings
        if recordings is None or not recordings.hold_memory:
            return compute()
        before = RandomState.of(device)
        try:
            return compute()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            recordings.release()
        before.restore()
        return compute()

    def _micro_batches(self, x: Tensor, y: Tensor) -> list[MicroBatch]:
        refuse_autocast()
        if torch.is_inference_mode_enabled():
            raise InvalidInput("torch.inference_mode() is on, in which there are no gradients; leave its block")
        require_trained(self.model, self._parameters)
        self._structure = structure_of(self.model)
        size = self._micro_batch_size or max(1, x.shape[0] // self._multiplicity)
        if not self._verified.covers(self._structure):
            if self._recordings is not None:
                self._recordings.forget()  # verification may change how layers run
            self._verified.verify(x, y, self._structure, size)
        elif some := self._verified.due(x, y):
            if self._recordings is not None:
                self._recordings.check_again()
            self._in_room(partial(self._verified.compare_again, *some), x.device)
        batches = micro_batches(x, y, size, self._multiplicity, self._last_micro_batch)
        # Products may depend on the alignment of memory: passes that are recorded later, or were, have their own.
        return batches if self._recordings is None else [batch.copied() for batch in batches]

    def _norm_pass(self, batch: MicroBatch) -> Pass:
        """Return a pass that records its initial random state if it draws, so that it can be repeated."""
        before = RandomState.of(batch.x.device)
        done = self._pass(batch, keep=False)
        return done if before.is_current() else replace(done, random_state=before)

    def _pass(self, batch: MicroBatch, *, keep: bool) -> Pass:
        before = RandomState.of(batch.x.device) if self._outputs.are_read else None
        forward = partial(self._forward, batch.x, batch.y, keep=keep)
        norms, total, gradients, squares = self._in_room(forward, batch.x.device)
        finite = None
        if not self._finiteness.are_finite(norms, total):
            if before is not None and self._outputs.look_again():
                before.restore()
                return self._pass(batch, keep=keep)
            norms, finite = self._combination.precise(squares, gradients, norms.losses)
        return Pass(norms.of_first(batch.examples), finite, gradients if keep else {})

    def _forward(self, x: Tensor, y: Tensor, *, keep: bool) -> Forwarded:
        losses, gradients = self._differentiate(x, y)
        squares: dict[str, Tensor] = {}
        square_together(gradients.values())
        gram_together(gradients.values())
        for name in gradients:
            if keep:  # the form that replaces another one frees its memory
                squares[name], gradients[name] = gradients[name].prepare(self._planner)
            else:
                squares[name] = gradients[name].norm_sq(self._planner)
        norms = self._combination.of_squares(squares, losses)
        return Forwarded(norms, self._outputs.confirmed(norms.norms.sum()), gradients, squares)

    def _differentiate(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, ExampleGradients]]:
        """Return the losses [B], and the per-example gradients of every parameter in factored form."""
        with (
            reading_as_verified(),
            torch.enable_grad(),
            unchanged(self._read),
            self._verified.capturing(len(x)) as capture,
        ):
            losses = self._verified.losses(x, y)
        gradients = capture.backward(losses, 1.0 / self._multiplicity)
        losses = widen(losses.detach())
        return losses if self._multiplicity == 1 else losses.view(-1, self._multiplicity).mean(1), gradients

    def _checked(self, weights: Tensor, norms: BatchNorms) -> Tensor:
        """``weights`` in the dtype and on the device of the norms. Raises: InvalidInput for a wrong shape."""
        layer_norms = norms.layer_norms
        if weights.shape != norms.norms.shape and (layer_norms is None or weights.shape != layer_norms.shape):
            layerwise = "" if layer_norms is None else f" or {list(layer_norms.shape)}"
            raise InvalidInput(
                f"weigh returned weights of shape {list(weights.shape)}, but must return "
                f"{list(norms.norms.shape)}{layerwise}"
            )
        return weights.to(norms.norms)

    def _add(
        self,
        sums: Sums,
        batch: MicroBatch,
        gradients: Mapping[str, ExampleGradients],
        weights: Tensor,
        finite: Tensor | None,
    ) -> Mapping[str, Tensor]:
        """Return the weighted sum of a micro-batch, if all its norms are finite, after adding it."""
        weights = self._with_padding(weights, batch)
        if finite is None:
            added = self._in_room(partial(self._weighted, gradients, weights), weights.device)
            sums.add(added)
            return added
        kept = finite.nonzero().squeeze(1)
        for name, factors in gradients.items() if len(kept) else ():  # 0 * nan is nan, so leave the others out
            sums.add(self._weighted({name: factors.select(kept)}, weights[kept]))
        return {}

    def _weighted(self, gradients: Mapping[str, ExampleGradients], weights: Tensor) -> Mapping[str, Tensor]:
        """Return the weighted sums by parameter. weights: [B] or [B, L], finite, as all gradients."""
        if weights.dim() == 1:
            return sum_together(gradients, weights)
        return {name: each.weighted_sum(weights[:, self._layer_of[name]]) for name, each in gradients.items()}
