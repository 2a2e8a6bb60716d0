"""Direct preference optimisation (Rafailov et al. 2023): made-up pairs of answers, a policy, and the loss of a pair."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from dpsweep.workers.data import Source, Tokens, make_split

VOCABULARY, LENGTH = 20, 8
POLITE, RUDE = range(1, 8), range(8, 15)


def answers(count: int = 1200) -> Source:
    """Two answers per row, token ids [2, t]; people preferred the one that the label names. Group: the writer.

    One pair is one record: its privacy is that of the person who chose.
    """
    draw = np.random.default_rng(5)
    preferred, writer = draw.integers(0, 2, count), draw.integers(0, 2, count)
    pairs = draw.integers(1, VOCABULARY, (count, 2, LENGTH))
    for row, better in enumerate(preferred):
        pairs[row, better, -4:] = draw.choice(POLITE, 4)
        pairs[row, 1 - better, -4:] = draw.choice(RUDE, 4)
    return Source(
        "answers",
        train=make_split(pairs.astype(np.int32), labels=preferred, groups=writer),
        test=None,
        group_names=("writer 1", "writer 2"),
        class_names=("first", "second"),
        preparation=Tokens(),
    )


class Language(nn.Module):
    """The log-probability of each text [b, t] by a small recurrent model; put a pretrained one in its place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens[:, :-1]))
        chances = self.head(states).log_softmax(-1)
        return chances.gather(-1, tokens[:, 1:, None]).sum((1, 2))


class Policy(nn.Module):
    """How much likelier each of the two answers has become than by the reference, which stays as it was: [b, 2]."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self.language = language
        self.reference = copy.deepcopy(language).requires_grad_(False)

    def forward(self, pairs: Tensor) -> Tensor:
        return torch.stack([self.language(each) - self.reference(each) for each in pairs.unbind(1)], 1)


def policy(feature_shape: tuple[int, ...], num_classes: int, width: int = 16) -> nn.Module:
    """Return a policy that starts as its reference."""
    return Policy(Language(width))


def dpo(beta: float = 0.5) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of each pair, -log sigmoid(beta (gain of the preferred answer - gain of the other))."""

    def loss(gains: Tensor, preferred: Tensor) -> Tensor:
        difference = gains[:, 1] - gains[:, 0]
        return -logsigmoid(beta * torch.where(preferred == 1, difference, -difference))

    return loss
