"""Per-example gradient norms and weighted sums of per-example gradients (book-keeping, Bu et al. 2023).

One forward pass captures what every layer read, one backward pass stops at the layers' outputs, and both the norms
and the weighted sum are computed from those pairs: no second backward pass, no per-example gradient of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.gradients.capture import capturing
from workers.gradients.checks import check_model
from workers.gradients.factors import ExampleGradients
from workers.gradients.layers import find_layers
from workers.gradients.planning import Planner, ShapePlanner
from workers.gradients.results import BatchNorms, WeightedSum

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(model output, targets) -> one loss per row."""

Weigh = Callable[[BatchNorms], Tensor]
"""Norms of a whole batch -> weights [B] or, for a layerwise engine, [B, L]."""

WeighRows = Callable[[BatchNorms, slice], Tensor]
"""Norms of some examples, and which of the batch they are -> weights [b] or [b, L]."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch after its backward pass."""

    losses: Tensor
    norm_sq: Tensor
    layer_norm_sq: Tensor
    gradients: Mapping[str, ExampleGradients]


class GradientEngine:
    """Per-example gradients of ``per_example_loss(model(x), y)`` with respect to the trainable parameters.

    micro_batch_size: at most this many examples are in memory at once; None for the whole batch. multiplicity: K
    consecutive rows of x and y are one example, whose loss is their mean (augmentation multiplicity, De et al. 2022).
    layerwise: also return norms per layer, and accept weights per layer. planner: how equal computations are chosen
    among. autocast: dtype of `torch.autocast` in the forward pass, or None.

    The model must treat the rows of a batch independently; `check_model` refuses the layers known not to.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        *,
        micro_batch_size: int | None = None,
        multiplicity: int = 1,
        layerwise: bool = False,
        planner: Planner | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if micro_batch_size is not None and not micro_batch_size >= 1:
            raise InvalidInput(f"micro_batch_size is {micro_batch_size}, but must be at least 1, or None")
        if not multiplicity >= 1:
            raise InvalidInput(f"multiplicity is {multiplicity}, but must be at least 1")
        check_model(model)
        self.model = model
        self._loss = per_example_loss
        self._micro_batch_size = micro_batch_size
        self._multiplicity = multiplicity
        self._layerwise = layerwise
        self._planner = planner or ShapePlanner()
        self._autocast = autocast
        self._layers = find_layers(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._layer_of: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            for name in layer.parameters.values():
                self._layer_of.setdefault(name, index)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The L layers with trainable parameters, in the order of ``layer_norms``."""
        return tuple(layer.name for layer in self._layers)

    def norms(self, x: Tensor, y: Tensor) -> BatchNorms:
        """Norms and losses of every example, in their cheapest form: nothing is kept for a weighted sum."""
        return self._collect([self._pass(*rows, keep=False) for rows in self._micro_batches(x, y)], x)

    def weighted_sum(self, x: Tensor, y: Tensor, weigh: Weigh) -> WeightedSum:
        """sum_i w_i g_i with w = weigh(norms of the whole batch).

        One micro-batch takes one pass. Several take a norm pass each, and then an ordinary backward pass of the
        weighted losses each (or, with weights per layer, a pass that keeps pairs); where weights do not depend on
        the rest of the batch, `weighted_sum_rowwise` saves that second round. Examples whose gradient is not finite
        get weight 0 and never touch the sum.
        """
        batches = list(self._micro_batches(x, y))
        if len(batches) <= 1:
            return self.weighted_sum_rowwise(x, y, lambda norms, _: weigh(norms))
        norms = self._collect([self._pass(*rows, keep=False) for rows in batches], x)
        weights, finite = _checked_weights(weigh(norms), norms)
        totals = self._zeros()
        start = 0
        for rows in batches:
            part = slice(start, start + len(rows[0]) // self._multiplicity)
            if weights.dim() == 1:
                self._add_weighted_losses(totals, *rows, weights[part], finite[part])
            else:
                self._add(totals, self._pass(*rows, keep=True).gradients, weights[part], finite[part])
            start = part.stop
        return WeightedSum(norms, weights, totals, int((~finite).sum()))

    def weighted_sum_rowwise(self, x: Tensor, y: Tensor, weigh: WeighRows) -> WeightedSum:
        """sum_i w_i g_i where the weight of an example depends on that example alone: one pass per micro-batch.

        ``weigh(norms, rows)`` gets the norms of the examples ``rows`` (a slice of the batch's examples) and returns
        their weights.
        """
        passes, weights, finite, totals, start = [], [], [], self._zeros(), 0
        for rows in self._micro_batches(x, y):
            current = self._pass(*rows, keep=True)
            norms = self._collect([current], x)
            stop = start + len(norms.norms)
            w, f = _checked_weights(weigh(norms, slice(start, stop)), norms)
            self._add(totals, current.gradients, w, f)
            passes.append(replace(current, gradients={}))
            weights.append(w)
            finite.append(f)
            start = stop
        if not passes:
            norms = self._collect([], x)
            return WeightedSum(norms, weigh(norms, slice(0, 0)), totals, 0)
        return WeightedSum(self._collect(passes, x), torch.cat(weights), totals, int((~torch.cat(finite)).sum()))

    def _micro_batches(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if len(x) % self._multiplicity or len(x) != len(y):
            raise InvalidInput(
                f"x has {len(x)} rows and y {len(y)}, but both need the same multiple of {self._multiplicity} rows"
            )
        size = max(1, len(x)) if self._micro_batch_size is None else self._micro_batch_size * self._multiplicity
        for start in range(0, len(x), size):
            yield x[start : start + size], y[start : start + size]

    def _pass(self, x: Tensor, y: Tensor, *, keep: bool) -> Pass:
        examples = len(x) // self._multiplicity
        with torch.enable_grad(), capturing(self._layers, len(x), examples) as capture:
            losses = self._losses(x, y)
            gradients = capture.backward(losses.sum() / self._multiplicity)
        with torch.no_grad():
            losses = losses.detach().float().view(examples, -1).mean(1)
            layer_norm_sq = losses.new_zeros(len(self._layers), examples)
            prepared: dict[str, ExampleGradients] = {}
            for name, factors in gradients.items():
                if keep:
                    norm_sq, prepared[name] = factors.prepare(self._planner)
                else:
                    norm_sq = factors.norm_sq(self._planner)
                layer_norm_sq[self._layer_of[name]] += norm_sq
            return Pass(losses, layer_norm_sq.sum(0), layer_norm_sq.T, prepared)

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self._autocast, enabled=self._autocast is not None):
            losses = self._loss(self.model(x), y)
        if losses.shape != (len(x),):
            raise InvalidInput(f"the loss returned shape {list(losses.shape)}, but must return [{len(x)}]")
        return losses

    def _collect(self, passes: list[Pass], x: Tensor) -> BatchNorms:
        if not passes:
            empty = torch.zeros(0, device=x.device)
            return BatchNorms(empty, empty.new_zeros(0, len(self._layers)) if self._layerwise else None, empty)
        norm_sq = torch.cat([one.norm_sq for one in passes])
        layer_norms = None
        if self._layerwise:
            layer_norms = _root(torch.cat([one.layer_norm_sq for one in passes]))
        return BatchNorms(_root(norm_sq), layer_norms, torch.cat([one.losses for one in passes]))

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def _add(
        self,
        totals: dict[str, Tensor],
        gradients: Mapping[str, ExampleGradients],
        weights: Tensor,
        finite: Tensor,
    ) -> None:
        kept = None if bool(finite.all()) else finite.nonzero().squeeze(1)
        for name, factors in gradients.items():
            column = weights if weights.dim() == 1 else weights[:, self._layer_of[name]]
            if kept is not None:  # 0 * nan is nan: leave these examples out
                factors, column = factors.select(kept), column[kept]
            totals[name] += factors.weighted_sum(column)

    def _add_weighted_losses(
        self, totals: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor, finite: Tensor
    ) -> None:
        """The gradient of sum_i w_i loss_i by an ordinary backward pass."""
        if not bool(finite.all()):
            rows = finite.repeat_interleave(self._multiplicity)
            x, y, weights = x[rows], y[rows], weights[finite]
        if not len(x):
            return
        with torch.enable_grad():
            losses = self._losses(x, y)
            loss = losses @ weights.repeat_interleave(self._multiplicity).to(losses) / self._multiplicity
            gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                total += gradient


def _checked_weights(weights: Tensor, norms: BatchNorms) -> tuple[Tensor, Tensor]:
    """Weights with 0 wherever the gradient is not finite, and the mask [B] of finite ones."""
    finite = norms.norms.isfinite()
    allowed = finite if weights.dim() == 1 else finite[:, None]
    return weights.detach().to(norms.norms).masked_fill(~allowed, 0.0), finite


def _root(norm_sq: Tensor) -> Tensor:
    """Norms; NaN becomes +inf."""
    return norm_sq.clamp_min(0).sqrt().nan_to_num(nan=float("inf"), posinf=float("inf"))
