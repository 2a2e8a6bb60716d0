"""nn.Embedding: an example's gradient has one row per distinct token it contains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsweep.workers.gradients.factors import ExampleGradients, sum_of_squares, widen
from dpsweep.workers.gradients.planners import Planner
from dpsweep.workers.gradients.rules import Differentiate


@dataclass(frozen=True)
class Lookups(ExampleGradients):
    """g_i[v] = sum of grads[i, t] over the positions t with tokens[i, t] = v; tokens [B, T], grads [B, T, D]."""

    tokens: Tensor
    grads: Tensor
    vocabulary: int

    def norm_sq(self, planner: Planner) -> Tensor:
        """Add gradients of equal tokens first, so that no tensor of size examples x vocabulary is needed.

        The distinct tokens of each example are numbered in ascending order; no shape depends on their number.
        """
        examples, length, width = self.grads.shape
        ordered, order = self.tokens.sort(1)
        number = torch.diff(ordered, dim=1, prepend=ordered[:, :1]).ne(0).cumsum(1)
        place = torch.empty_like(number).scatter_(1, order, number)
        place += length * torch.arange(examples, device=place.device)[:, None]
        rows = self.grads.new_zeros(examples * length, width)
        rows.index_add_(0, place.flatten(), self.grads.flatten(0, 1))
        owner = torch.arange(examples, device=place.device).repeat_interleave(length)
        return self.grads.new_zeros(examples).index_add_(0, owner, sum_of_squares(rows))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.grads.new_zeros(self.vocabulary, self.grads.shape[2])
        return total.index_add_(0, self.tokens.flatten(), (self.grads * weights[:, None, None]).flatten(0, 1))

    def instantiate(self) -> Tensor:
        examples, _, width = self.grads.shape
        index = self.tokens[:, :, None].expand_as(self.grads)
        return self.grads.new_zeros(examples, self.vocabulary, width).scatter_add_(1, index, self.grads)

    def select(self, rows: Tensor) -> Lookups:
        return Lookups(self.tokens[rows], self.grads[rows], self.vocabulary)


def embedding(module: nn.Embedding, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.Embedding."""
    return lookups(activation, examples, "weight", module.num_embeddings, module.padding_idx)


def lookups(activation: Tensor, examples: int, weight: str, vocabulary: int, padding: int | None) -> Differentiate:
    """Return gradients of the rows of ``weight`` that tokens look up; row ``padding`` is never updated."""
    tokens = activation.reshape(examples, -1)

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        grads = widen(grad).reshape(examples, -1, grad.shape[-1])
        if padding is not None:
            grads = grads.masked_fill((tokens == padding % vocabulary)[:, :, None], 0.0)
        return {weight: Lookups(tokens, grads, vocabulary)}

    return differentiate
