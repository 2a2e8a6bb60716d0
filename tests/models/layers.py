"""Classes from which the models of the table are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES = 64, 4


def through(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def linear(width: int = WIDTH, out: int = CLASSES) -> nn.Linear:
    return nn.Linear(width, out)


class Calls(nn.Module):
    """A model of one function of its layers and the input."""

    def __init__(self, run: Callable[[Any, Tensor], object], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> object:
        return self._run(self, x)


class Doubled(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class Counting(nn.Module):
    """Keeps a running mean of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.out = linear()

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.out(x - self.mean)
        return out


class Remembering(nn.Module):
    """Adds the last batch's mean, kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.last = linear(), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x + self.last)
        self.last = x.detach().mean(0)
        return out


class Drawing(nn.Module):
    """Adds noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.rng = linear(), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x + 0.1 * torch.randn(x.shape, generator=self.rng))
        return out


class Capsules(nn.Module):
    """Two rounds of routing by agreement between 8 capsules of 8 numbers and one capsule for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(0.2 * torch.randn(8, CLASSES, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,icde->bice", x.reshape(len(x), 8, 8), self.votes)
        agreement = torch.zeros(votes.shape[:3], device=x.device)
        for _ in range(2):
            joined = torch.tanh((agreement.softmax(2)[..., None] * votes).sum(1))
            agreement = agreement + (votes * joined[:, None]).sum(-1)
        lengths: Tensor = joined.norm(dim=-1)
        return lengths


class Cells(nn.Module):
    """A loop over the steps of a sequence with a cell of torch."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.reshape(len(x), 8, 8).unbind(1):
            state = self.cell(step, state)
        out: Tensor = self.out(state[0] if isinstance(state, tuple) else state)
        return out


class Dispatched(nn.Module):
    """Experts of whom each runs on the rows that the gate gives it, as mixtures of experts are written."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([linear() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = (gate.argmax(1) == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gate[rows, number, None])
        return out


class Message(nn.Module):
    """Messages along the edges of a fixed graph of 8 nodes, added where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: Tensor
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]]))
        self.message, self.out = nn.Linear(16, 8), linear()

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.reshape(len(x), 8, 8)
        sent = torch.relu(self.message(torch.cat((nodes[:, self.edges[0]], nodes[:, self.edges[1]]), 2)))
        out: Tensor = self.out(torch.zeros_like(nodes).index_add(1, self.edges[1], sent).flatten(1))
        return out


class Bags(nn.Module):
    """A bag of embeddings for each row, given as `nn.EmbeddingBag` takes texts of equal length."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 16, **options), linear(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.bag(x))
        return out


class Tied(nn.Module):
    """An autoencoder's features: the decoder reads the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 16), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.inner(x)) @ self.inner.weight)
        return out


class Own(nn.Module):
    """A module that owns one weight and reads it twice: an encoder and its transpose as the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(0.1 * torch.randn(16, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(functional.linear(x, self.weight)) @ self.weight)
        return out


class Quantised(nn.Module):
    """The nearest of 8 learnt vectors instead of each part of the input, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.inner, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8), linear()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x.reshape(len(x), 8, 8))
        distance = (parts[:, :, None] - self.codes).square().sum(-1)
        chosen = functional.one_hot(distance.argmin(-1), 8).to(x.dtype) @ self.codes
        out: Tensor = self.out((parts + chosen - parts.detach()).flatten(1))
        return out
