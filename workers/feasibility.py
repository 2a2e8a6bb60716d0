"""Tries the first step of a trial on a few examples when a sweep is planned.

Data, preprocessing, model, loss and augmentation run through the trainer's own code, so a combination that a worker
would refuse is refused before training starts. Nothing is fitted, downloaded or stored.
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
from workers.data import Dataset
from workers.gradients import GradientEngine
from workers.imports import UserCode, blamed_on
from workers.losses import build_loss
from workers.models import build_model
from workers.preprocessing import make_preprocessing
from workers.spec import Component

EXAMPLES: Final = 3
"""Examples in the tried step: as many as the check of per-example gradients compares."""
_COPIES: Final = 2
"""Augmented copies per example in the tried step."""
_EMBED: Final = "; whole numbers need a model that embeds them, such as transformer with `vocabulary`"


@dataclass(frozen=True)
class Combination:
    """The fields of a trial that decide whether a step is possible."""

    model: Component
    loss: Component
    preprocessing: Component | None
    augmentation: Component | None


def excerpt(dataset: Dataset) -> Dataset:
    """A copy of the first few examples of ``dataset``, so that the others can be freed."""
    train, test = (split.select(np.arange(min(EXAMPLES, len(split)))) for split in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test, public=None)


def check_feasible(combination: Combination, dataset: Dataset, code: UserCode) -> None:
    """Compute per-example gradients of ``dataset`` (an `excerpt`) on the CPU, as a training step does.

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
    """Any error becomes an `InvalidInput` that names the component and the features it was given.

    Messages of other libraries and of the user's code may quote rows: they stay in the cause, and only the error's type
    and place are shown.
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
    """Prepared rows, their labels, and the number of rows per example."""
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
    """The logits of ``x``, checked first because later failures in the gradients would not name the cause."""
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
