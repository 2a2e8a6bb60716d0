"""nn.Embedding: an example's gradient has one row per distinct token it contains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.gradients.factors import ExampleGradients, sum_of_squares, widen
from workers.gradients.planning import Planner
from workers.gradients.rules import Differentiate


@dataclass(frozen=True)
class Lookups:
    """g_i[v] = sum of grads[i, t] over the positions t with tokens[i, t] = v; tokens [B, T], grads [B, T, D]."""

    tokens: Tensor
    grads: Tensor
    vocabulary: int

    def norm_sq(self, planner: Planner) -> Tensor:
        """Gradients of equal tokens are added first, so no tensor of size examples x vocabulary is needed."""
        examples = len(self.tokens)
        offsets = torch.arange(examples, device=self.tokens.device)[:, None] * self.vocabulary
        keys, inverse = torch.unique(self.tokens + offsets, return_inverse=True)
        rows = self.grads.new_zeros(len(keys), self.grads.shape[2]).index_add_(
            0, inverse.flatten(), self.grads.flatten(0, 1)
        )
        norm_sq = self.grads.new_zeros(examples)
        return norm_sq.index_add_(0, keys // self.vocabulary, sum_of_squares(rows))

    def prepare(self, planner: Planner) -> tuple[Tensor, ExampleGradients]:
        return self.norm_sq(planner), self

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
    """The rule of nn.Embedding."""
    tokens = activation.reshape(examples, -1)

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        grads = widen(grad).reshape(examples, -1, module.embedding_dim)
        if module.padding_idx is not None:  # this row is never updated
            grads = grads.masked_fill((tokens == module.padding_idx)[:, :, None], 0.0)
        return {"weight": Lookups(tokens, grads, module.num_embeddings)}

    return differentiate
