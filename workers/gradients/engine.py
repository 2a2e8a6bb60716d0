"""Per-example gradient norms and weighted sums of per-example gradients (book-keeping, Bu et al. 2023).

One forward pass captures what every layer read, one backward pass stops at the layers' outputs, and both the norms
and the weighted sum are computed from those pairs: no second backward pass, no per-example gradient of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.gradients.capture import capturing
from workers.gradients.checks import check_model
from workers.gradients.draws import draws
from workers.gradients.factors import HALF_PRECISION, ExampleGradients, widen
from workers.gradients.layers import find_layers
from workers.gradients.modes import modes_of
from workers.gradients.planning import Planner, ShapePlanner
from workers.gradients.randomness import RandomState
from workers.gradients.results import BatchNorms, WeightedSum
from workers.gradients.sums import Sums
from workers.gradients.verification import HALF_TOLERANCE, TOLERANCE, Gradients, verify

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(model output, targets) -> one loss per row."""

Weigh = Callable[[BatchNorms], Tensor]
"""Norms of a whole batch -> weights [B] or, for a layerwise engine, [B, L]."""

WeighRows = Callable[[BatchNorms, slice], Tensor]
"""Norms of some examples, and which of the batch they are -> weights [b] or [b, L]."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch after its backward pass. finite: mask [b], or None where all norms are; gradients: empty after a
    norm pass; random_state: the state it started from, or None if it drew nothing."""

    norms: BatchNorms
    finite: Tensor | None
    gradients: Mapping[str, ExampleGradients]
    random_state: RandomState | None = None


class GradientEngine:
    """Per-example gradients of ``per_example_loss(model(x), y)`` with respect to the parameters trainable by now.

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
        self._verified = set[tuple[tuple[str, bool], ...]]()
        self._layer_of: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            for name in layer.parameters.values():
                self._layer_of.setdefault(name, index)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The L layers with trainable parameters, in the order of ``layer_norms``."""
        return tuple(layer.name for layer in self._layers)

    @torch.no_grad()
    def norms(self, x: Tensor, y: Tensor) -> BatchNorms:
        """Norms and losses of every example, in their cheapest form: nothing is kept for a weighted sum."""
        return self._joined([self._pass(*rows, keep=False).norms for rows in self._micro_batches(x, y)], x)

    @torch.no_grad()
    def weighted_sum(self, x: Tensor, y: Tensor, weigh: Weigh) -> WeightedSum:
        """sum_i w_i g_i with w = weigh(norms of the whole batch).

        One micro-batch takes one pass. Several take a norm pass each, and then the same pass again, with the same
        random numbers and bits, for the sum; where weights do not depend on the rest of the batch,
        `weighted_sum_rowwise` saves that second round. Examples whose gradient is not finite get weight 0 and never
        touch the sum.
        """
        batches = self._micro_batches(x, y)
        if len(batches) <= 1:
            return self.weighted_sum_rowwise(x, y, lambda norms, _: weigh(norms))
        passes = [self._norm_pass(*rows) for rows in batches]
        norms = self._joined([one.norms for one in passes], x)
        weights = self._checked(weigh(norms), norms)
        sums, cleaned = Sums(self._parameters), []
        with RandomState.preserved(x.device):
            parts = torch.split(weights, [len(one.norms.losses) for one in passes])
            for first, rows, part in zip(passes, batches, parts, strict=True):
                cleaned.append(_without(part, first.finite))
                self._sum_again(*rows, first, cleaned[-1], sums)
        non_finite = sum(_count_infinite(one) for one in passes)
        return WeightedSum(norms, torch.cat(cleaned), sums.complete(), non_finite)

    @torch.no_grad()
    def weighted_sum_rowwise(self, x: Tensor, y: Tensor, weigh: WeighRows) -> WeightedSum:
        """sum_i w_i g_i where the weight of an example depends on that example alone: one pass per micro-batch.

        ``weigh(norms, rows)`` gets the norms of the examples ``rows`` (a slice of the batch's examples) and returns
        their weights.
        """
        parts, weights, sums, start, non_finite = [], [], Sums(self._parameters), 0, 0
        for rows in self._micro_batches(x, y):
            norms, part, infinite = self._sum_rowwise(*rows, start, weigh, sums)
            parts.append(norms)
            weights.append(part)
            start += len(part)
            non_finite += infinite
        norms = self._joined(parts, x)
        all_weights = _cat(weights) if weights else weigh(norms, slice(0, 0))
        return WeightedSum(norms, all_weights, sums.complete(), non_finite)

    def draws(self, x: Tensor, y: Tensor) -> bool:
        """Whether a pass over these rows draws random numbers, as dropout does: then norms differ from pass to pass."""
        return draws(self.model, x.device, lambda: self._losses(x, y))

    def _sum_again(self, x: Tensor, y: Tensor, first: Pass, weights: Tensor, sums: Sums) -> None:
        """The sum of a micro-batch whose norms the first pass found; its gradients are freed on return."""
        if first.random_state is not None:
            first.random_state.restore()
        losses, gradients = self._differentiate(x, y)
        _require_same(first.norms.losses, losses)
        self._add(sums, gradients, weights, first.finite)

    def _sum_rowwise(
        self, x: Tensor, y: Tensor, start: int, weigh: WeighRows, sums: Sums
    ) -> tuple[BatchNorms, Tensor, int]:
        """Norms, weights and the count of infinite norms of one micro-batch, whose gradients are freed on return."""
        done = self._pass(x, y, keep=True)
        norms = done.norms
        weights = _without(self._checked(weigh(norms, slice(start, start + len(norms.norms))), norms), done.finite)
        self._add(sums, done.gradients, weights, done.finite)
        return norms, weights, _count_infinite(done)

    def _micro_batches(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor):
                raise InvalidInput(f"{name} is a {type(value).__name__}, but must be a tensor with one row per example")
        rows = x.shape[0]
        if rows % self._multiplicity or rows != y.shape[0]:
            raise InvalidInput(
                f"x has {rows} rows and y {y.shape[0]}, but both need the same multiple of {self._multiplicity} rows"
            )
        frozen = [name for name, parameter in self._parameters.items() if not parameter.requires_grad]
        if frozen:
            raise InvalidInput(f"{', '.join(frozen)} no longer require gradients; make a new engine after freezing")
        modes = tuple(modes_of(self.model).items())
        if modes not in self._verified and self._verify(x, y):
            self._verified.add(modes)
        size = rows if self._micro_batch_size is None else self._micro_batch_size * self._multiplicity
        if 0 < rows <= size:
            return [(x, y)]
        return [(x[start : start + size], y[start : start + size]) for start in range(0, rows, max(1, size))]

    def _verify(self, x: Tensor, y: Tensor) -> bool:
        """Check a few examples within a micro-batch; on one alone, nothing can be said about batches."""
        rows, scale = self._multiplicity, 1.0 / self._multiplicity
        examples = len(x) // rows
        compared = min(3, examples)
        if self._micro_batch_size is not None:
            examples = min(examples, max(compared, self._micro_batch_size))

        def within(count: int) -> list[Gradients]:
            some = slice(count * rows)
            with torch.enable_grad(), capturing(self._layers, count * rows, count) as capture:
                losses = self._precise_losses(x[some], y[some])
            found = capture.backward(losses, scale)
            one = torch.ones(1, dtype=next(iter(self._parameters.values())).dtype, device=x.device)
            indices = torch.arange(min(compared, count), device=x.device)[:, None]
            return [{name: g.select(index).weighted_sum(one) for name, g in found.items()} for index in indices]

        def alone(index: int) -> Gradients:
            some = slice(index * rows, (index + 1) * rows)
            with torch.enable_grad():
                loss = self._precise_losses(x[some], y[some]).sum() * scale
            if not loss.requires_grad:
                return dict.fromkeys(self._parameters)
            found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
            return {name: None if g is None else g.to_dense() for name, g in zip(self._parameters, found, strict=True)}

        tolerance = HALF_TOLERANCE if self._has_half_precision else TOLERANCE
        return examples > 0 and verify(self.model, within, alone, examples, tolerance) and examples > 1

    def _norm_pass(self, x: Tensor, y: Tensor) -> Pass:
        """A pass whose random numbers, if any, can be drawn again."""
        before = RandomState.of(x.device)
        done = self._pass(x, y, keep=False)
        return done if before.is_current() else replace(done, random_state=before)

    def _pass(self, x: Tensor, y: Tensor, *, keep: bool) -> Pass:
        losses, gradients = self._differentiate(x, y)
        by_layer: list[list[Tensor]] = [[] for _ in self._layers]
        prepared: dict[str, ExampleGradients] = {}
        for name, factors in gradients.items():
            if keep:
                norm_sq, prepared[name] = factors.prepare(self._planner)
            else:
                norm_sq = factors.norm_sq(self._planner)
            by_layer[self._layer_of[name]].append(norm_sq)
        layers = [reduce(torch.add, found) if found else torch.zeros_like(losses) for found in by_layer]
        norms = reduce(torch.add, layers).sqrt()
        layer_norms = torch.stack(layers, 1).sqrt_() if self._layerwise else None
        finite = None
        if not math.isfinite(float(norms.sum())):
            finite = norms.isfinite()
            norms.masked_fill_(~finite, math.inf)
            if layer_norms is not None:
                layer_norms.nan_to_num_(nan=math.inf, posinf=math.inf)
        return Pass(BatchNorms(norms, layer_norms, losses), finite, prepared)

    def _differentiate(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, ExampleGradients]]:
        """Losses [B], and what the gradients of every parameter are made of."""
        rows = x.shape[0]
        with torch.enable_grad(), capturing(self._layers, rows, rows // self._multiplicity) as capture:
            losses = self._losses(x, y)
        gradients = capture.backward(losses, 1.0 / self._multiplicity)
        losses = widen(losses.detach())
        return losses if self._multiplicity == 1 else losses.view(-1, self._multiplicity).mean(1), gradients

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        if self._autocast is None:
            losses = self._loss(self.model(x), y)
        else:
            with torch.autocast(x.device.type, self._autocast):
                losses = self._loss(self.model(x), y)
        return self._one_per_row(losses, len(x))

    @property
    def _has_half_precision(self) -> bool:
        """In frozen parts: what is trained is in single or double precision."""
        return any(parameter.dtype in HALF_PRECISION for parameter in self.model.parameters())

    def _precise_losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Without autocast, whose rounding would hide small mistakes, unless frozen parts in half precision need it."""
        if self._has_half_precision:
            return self._losses(x, y)
        return self._one_per_row(self._loss(self.model(x), y), len(x))

    def _one_per_row(self, losses: Tensor, rows: int) -> Tensor:
        if losses.shape != (rows,):
            raise InvalidInput(
                f"the loss returned shape {list(losses.shape)} for a batch of {rows} rows, "
                f"but must return one number for each, [{rows}]"
            )
        return losses

    def _checked(self, weights: Tensor, norms: BatchNorms) -> Tensor:
        """Weights of these examples, in the norms' dtype and on their device."""
        layer_norms = norms.layer_norms
        if weights.shape != norms.norms.shape and (layer_norms is None or weights.shape != layer_norms.shape):
            layerwise = "" if layer_norms is None else f" or {list(layer_norms.shape)}"
            raise InvalidInput(
                f"weigh returned weights of shape {list(weights.shape)}, but must return "
                f"{list(norms.norms.shape)}{layerwise}"
            )
        return weights.to(norms.norms)

    def _joined(self, parts: list[BatchNorms], x: Tensor) -> BatchNorms:
        if not parts:
            empty = torch.zeros(0, device=x.device)
            return BatchNorms(empty, empty.new_zeros(0, len(self._layers)) if self._layerwise else None, empty)
        if len(parts) == 1:
            return parts[0]
        layer_norms = [part.layer_norms for part in parts if part.layer_norms is not None]
        return BatchNorms(
            torch.cat([part.norms for part in parts]),
            torch.cat(layer_norms) if self._layerwise else None,
            torch.cat([part.losses for part in parts]),
        )

    def _add(
        self, sums: Sums, gradients: Mapping[str, ExampleGradients], weights: Tensor, finite: Tensor | None
    ) -> None:
        kept = None if finite is None else finite.nonzero().squeeze(1)
        if kept is not None and not len(kept):
            return
        for name, factors in gradients.items():
            column = weights if weights.dim() == 1 else weights[:, self._layer_of[name]]
            if kept is not None:  # 0 * nan is nan: leave these examples out
                factors, column = factors.select(kept), column[kept]
            sums.add(name, factors.weighted_sum(column))


def _require_same(first: Tensor, second: Tensor) -> None:
    """Else the norms that weights were chosen by are not those of the gradients that are summed."""
    if not torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True):
        raise InvalidInput(
            "the model's losses on the same rows differ from one pass to the next: it draws random numbers from "
            "elsewhere than torch's own generators, or changes while it runs; use torch.rand and the like"
        )


def _without(weights: Tensor, finite: Tensor | None) -> Tensor:
    """Weights [B] or [B, L] with 0 for examples that are not finite."""
    if finite is None:
        return weights
    return weights.masked_fill(~(finite if weights.dim() == 1 else finite[:, None]), 0.0)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _count_infinite(one: Pass) -> int:
    return 0 if one.finite is None else int((~one.finite).sum())
