"""Whether a trial can take its first step: a plan tries the trainer's own path on a few examples.

Data, preprocessing, model, loss and augmentation are combined as a worker combines them, so what a worker would refuse
is refused before anything starts. Nothing is fitted, downloaded or kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from accounting.errors import DpsweepError, InvalidInput, public_text
from workers.augmentation import make_augmentation
from workers.data.base import Dataset
from workers.gradients import GradientEngine
from workers.imports import UserCode, blamed_on
from workers.losses import build_loss
from workers.models import build_model
from workers.preprocessing import make_preprocessing
from workers.spec import Component

EXAMPLES: Final = 3
"""Examples in a trial step: as many as the check of per-example gradients uses."""
_COPIES: Final = 2
"""Augmented copies per example in a trial step."""
_EMBED: Final = "; whole numbers need a model that embeds them, such as transformer with `vocabulary`"


@dataclass(frozen=True)
class Combination:
    """The fields of a trial that decide whether it can take a step at all."""

    model: Component
    loss: Component
    preprocessing: Component | None
    augmentation: Component | None


def excerpt(dataset: Dataset) -> Dataset:
    """The first few examples of ``dataset``, which keep nothing of the others in memory."""
    train, test = (split.select(np.arange(min(EXAMPLES, len(split)))) for split in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, public=None)


def check_feasible(combination: Combination, dataset: Dataset, code: UserCode) -> None:
    """Take the gradients of a few examples (those of `excerpt`) on the CPU, as a training step does.

    Raises: InvalidInput naming the component that does not fit the others.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if combination.preprocessing is not None:
            with _blamed_on("preprocessing", combination.preprocessing, dataset.train.features):
                dataset = make_preprocessing(combination.preprocessing).rehearse(dataset)
        x, y, copies = _batch(combination.augmentation, dataset)
        model, loss = build_model(combination.model, dataset, 0, code), build_loss(combination.loss)
        with _blamed_on("model", combination.model, x):
            logits = _checked_logits(model.cpu(), x, dataset.num_classes)
        with _blamed_on("loss", combination.loss, logits):
            loss(logits, y)
        with _blamed_on("model", combination.model, x):
            GradientEngine(model, loss, multiplicity=copies).norms(x, y)


@contextlib.contextmanager
def _blamed_on(what: str, component: Component, features: Tensor) -> Iterator[None]:
    """An error names the component, once, and what it was given; a user's own model raises what it likes.

    What that says may quote the rows: it is the cause, and only type and place are told.
    """
    subject = f"{what} {component.name!r}"
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = public_text(error)
        if isinstance(error, DpsweepError) and reason == str(error):
            raise error if reason.startswith(subject) else InvalidInput(f"{subject}: {reason}") from error
        raise InvalidInput(
            f"{subject} cannot take features of shape {tuple(features.shape[1:])} and type {features.dtype} ({reason})"
            f"{'' if features.is_floating_point() else _EMBED}"
        ) from error


def _batch(augmentation: Component | None, dataset: Dataset) -> tuple[Tensor, Tensor, int]:
    """Prepared examples, their labels, and how many rows are one example."""
    with blamed_on(dataset.name, "the preparation of"):
        x, y = dataset.prepare(dataset.train.features), dataset.train.labels
    if augmentation is None:
        return x, y, 1
    augment = make_augmentation(augmentation)
    with _blamed_on("augmentation", augmentation, x):
        copies = augment(x, torch.Generator().manual_seed(0)).reshape(len(x), augment.multiplicity, *x.shape[1:])
    some = copies[:, :_COPIES]
    return some.flatten(0, 1), y.repeat_interleave(some.shape[1]), some.shape[1]


def _checked_logits(model: nn.Module, x: Tensor, classes: int) -> Tensor:
    """The logits of ``x``; what is wrong with them is said before the gradients, which cannot name it, fail on it."""
    with torch.enable_grad():
        logits = model(x)
    if not isinstance(logits, Tensor):
        raise InvalidInput(f"its forward returns a {type(logits).__name__}, but must return a tensor of logits")
    if tuple(logits.shape) != (len(x), classes):
        raise InvalidInput(
            f"for {len(x)} rows it returns the shape {tuple(logits.shape)}, but must return {(len(x), classes)}: for "
            f"each row one logit for each of {classes} classes"
        )
    if not logits.is_floating_point():
        raise InvalidInput(f"it returns logits of {logits.dtype}, but they must be floating-point numbers")
    if not logits.requires_grad:
        raise InvalidInput(
            "its logits do not depend on a trainable parameter; do not detach them, nor compute them under no_grad"
        )
    return logits
