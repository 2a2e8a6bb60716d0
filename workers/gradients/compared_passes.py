"""Gradients of the engine and of autograd for the same examples, which `verify` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.gradients.capture import Capture
from workers.gradients.verification import Gradients

Capturing = Callable[[int], AbstractContextManager[Capture]]
"""Number of rows -> the context in which a forward pass is captured."""


@dataclass(frozen=True)
class ComparedPasses:
    """Passes over the rows x and y: the gradients of a few single examples, and then a weighted sum over all of them.

    losses: loss of each row. multiplicity: K consecutive rows are one example. alone: number of single examples, which
    are spread over the batch. weights: of the examples in the sum, from `different_weights`.

    The sum takes one pass of autograd, and differs if the engine takes a gradient of any example in the batch for
    another one's, as where a model sorts its rows by length.
    """

    capturing: Capturing
    losses: Callable[[Tensor, Tensor], Tensor]
    parameters: Mapping[str, nn.Parameter]
    multiplicity: int
    x: Tensor
    y: Tensor
    alone: int
    weights: Tensor

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.x) // self.multiplicity

    def of_engine(self, count: int) -> list[Gradients]:
        """The engine's gradients in a batch of the first ``count`` examples."""
        rows = slice(count * self.multiplicity)
        with torch.enable_grad(), self.capturing(count * self.multiplicity) as capture:
            losses = self.losses(self.x[rows], self.y[rows])
        found = capture.backward(losses, 1.0 / self.multiplicity)
        one = torch.ones_like(self.weights[:1])
        singles = [torch.tensor([index], device=self.x.device) for index in self._spread(count)]
        return [
            *({name: each.select(index).weighted_sum(one) for name, each in found.items()} for index in singles),
            {name: each.weighted_sum(self.weights[:count]) for name, each in found.items()},
        ]

    def of_autograd(self, position: int) -> Gradients:
        """Autograd's gradient of what has this position in `of_engine` of all examples."""
        spread = self._spread(self.examples)
        if position < len(spread):
            first, count, weights = spread[position], 1, torch.ones_like(self.weights[:1])
        else:
            first, count, weights = 0, self.examples, self.weights
        rows = slice(first * self.multiplicity, (first + count) * self.multiplicity)
        with torch.enable_grad():
            losses = self.losses(self.x[rows], self.y[rows]).view(count, self.multiplicity)
            loss = (losses.mean(1) * weights).sum()
        if not loss.requires_grad:
            return dict.fromkeys(self.parameters)
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {name: None if g is None else g.to_dense() for name, g in zip(self.parameters, found, strict=True)}

    def _spread(self, count: int) -> list[int]:
        """Indices of the single examples among ``count``: the first, the last, and those between at equal distances."""
        few = min(self.alone, count)
        return [round(place * (count - 1) / max(few - 1, 1)) for place in range(few)]


@dataclass
class LaterBatches:
    """The batches after the first one, which is verified: the 1st, 4th, 16th, ... of them are compared again.

    Batches differ in what a model may do with their rows. A trial that is resumed begins anew. seen: their number so
    far. next: the first one that is to be compared.
    """

    seen: int = 0
    next: int = 1

    def is_to_be_compared(self, examples: int) -> bool:
        """Whether the batch that is seen now is; one with a single example leaves it to the next batch."""
        self.seen += 1
        if self.seen < self.next or examples < 2:
            return False
        self.next = 4 * self.seen
        return True


def different_weights(examples: int, like: Tensor) -> Tensor:
    """[examples]: normal numbers, always the same ones, drawn without torch's global generator."""
    drawn = torch.randn(examples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(like.device, like.dtype)
