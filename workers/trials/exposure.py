"""Extraction of secrets from a language model: exposure of random sequences that it was trained on.

Carlini et al. 2019, "The Secret Sharer", Sec. 4. Secrets are uniformly random sequences of tokens, written over random
training examples before training. Afterwards the loss of each is ranked among that of sequences drawn by the same law
which the model has not seen. With rank r among R the exposure is log2 R - log2 r: the bits by which the model narrows
down a search for the secret.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from dpsweep.accounting.attacks import mean_exposure
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.data import Dataset, Split, Tokens
from dpsweep.workers.evaluation.attack_results import ExposureAttack
from dpsweep.workers.evaluation.predictions import predict
from dpsweep.workers.spec import ExposureSpec, TrialSpec
from dpsweep.workers.tasks import IGNORED
from dpsweep.workers.tasks.losses import Loss

_DRAWS: Final = 0x5EC2E7
"""Separates these draws from others of the seed."""
_LARGEST_SHARE: Final = 0.5
"""Maximum share of the training examples that secrets may replace."""


def with_secrets(spec: TrialSpec, dataset: Dataset) -> Dataset:
    """Return the data set in which secrets replace random training examples, each ``repeats`` times.

    The secrets and their places depend on the seed alone, and on no example. So any other example keeps its guarantee,
    and the examples written over are not trained on. Raises: InvalidInput where the data do not predict next tokens.
    """
    asked = spec.attacks.exposure
    if asked is None:
        return dataset
    require_room(asked, dataset, len(dataset.train))
    tokens = _tokens_of(dataset)
    generator = np.random.default_rng((spec.seed, _DRAWS))
    secrets = _sequences(asked, asked.canaries, tokens, generator).repeat_interleave(asked.repeats, 0)
    places = torch.from_numpy(generator.choice(len(dataset.train), len(secrets), replace=False))
    split = _of_tokens(dataset.train, secrets, tokens)
    features, labels = dataset.train.features.clone(), dataset.train.labels.clone()
    features[places], labels[places] = split.features, split.labels
    note = f"{count_of(len(places), 'example')} of the training data were written over by secrets (attacks.exposure)"
    train = replace(dataset.train, features=features, labels=labels, place=None)
    return replace(dataset, train=train, notes=(*dataset.notes, note))


def exposure(model: nn.Module, dataset: Dataset, loss: Loss, spec: TrialSpec) -> ExposureAttack | None:
    """Rank the secrets of `with_secrets` by loss among ``candidates`` - 1 others; None without such an attack.

    A tie counts against the secret. The interval is over the secrets (`mean_exposure`). The result is computed without
    noise: private data.
    """
    asked = spec.attacks.exposure
    if asked is None:
        return None
    tokens = _tokens_of(dataset)
    generator = np.random.default_rng((spec.seed, _DRAWS))
    secrets = _sequences(asked, asked.canaries, tokens, generator)
    others = _sequences(asked, asked.candidates - 1, tokens, np.random.default_rng((spec.seed, _DRAWS, 1)))
    split = _of_tokens(dataset.train, torch.cat([secrets, others]), tokens)
    losses = np.nan_to_num(predict(model, split, dataset, loss).losses, nan=np.inf)
    of_others = np.sort(losses[len(secrets) :])
    ranks = 1 + np.searchsorted(of_others, losses[: len(secrets)], side="right")
    mean, lower, upper = mean_exposure(ranks, asked.candidates)
    return ExposureAttack(
        asked.canaries, asked.repeats, asked.candidates, mean, lower, upper, int(np.count_nonzero(ranks == 1))
    )


def require_room(asked: ExposureSpec | None, dataset: Dataset, train_size: int) -> None:
    """Raises: InvalidInput where the data, with ``train_size`` training examples in all, have no room for secrets."""
    if asked is None:
        return
    _tokens_of(dataset)
    longest, rows = dataset.train.features.shape[1], asked.canaries * asked.repeats
    if asked.length > longest:
        raise InvalidInput(
            f"attacks.exposure.length is {asked.length}, but the texts have {count_of(longest, 'token')}; set it to "
            f"{longest} or less, or data.max_length to more"
        )
    if rows > (most := int(_LARGEST_SHARE * train_size)):
        raise InvalidInput(
            f"attacks.exposure would write over {rows} training examples, but at most {most}, half of them, may go; "
            "lower canaries or repeats"
        )


def _tokens_of(dataset: Dataset) -> Tokens:
    """Return how texts are tokens. Raises: InvalidInput for data whose next tokens are not predicted."""
    tokens = dataset.preparation
    if not isinstance(tokens, Tokens) or not tokens.causal or tokens.vocabulary is None:
        raise InvalidInput(
            "attacks.exposure ranks secrets by a model of the next token (data: text, objective: causal_lm), which "
            f"{dataset.name!r} has not; leave it out"
        )
    return tokens


def _sequences(asked: ExposureSpec, count: int, tokens: Tokens, generator: np.random.Generator) -> Tensor:
    """Return uniformly random tokens other than padding, int64 [count, length]."""
    vocabulary = np.array([each for each in range(tokens.vocabulary or 0) if each != tokens.padding])
    return torch.from_numpy(vocabulary[generator.integers(len(vocabulary), size=(count, asked.length))])


def _of_tokens(like: Split, sequences: Tensor, tokens: Tokens) -> Split:
    """Return sequences [n, length] as examples of the split's form, filled up by padding."""
    rows, length = sequences.shape
    features = torch.full((rows, like.features.shape[1]), tokens.padding or 0, dtype=like.features.dtype)
    labels = torch.full((rows, like.labels.shape[1]), IGNORED, dtype=like.labels.dtype)
    features[:, :length] = sequences.to(features.dtype)
    labels[:, : length - 1] = sequences[:, 1:].to(labels.dtype)
    ids = torch.arange(rows)
    return Split(features, labels, torch.zeros(rows, dtype=torch.int64), ids)
