"""Per-example losses: outputs [b, ...] of a model, labels [b, ...] (`dpsweep.workers.tasks`) -> losses [b]."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput, count_of, require_finite
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, build_named
from dpsweep.workers.spec import Component
from dpsweep.workers.tasks import IGNORED

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy() -> Loss:
    """Return cross-entropy: -log softmax(logits)[label]."""
    return lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none")


def hinge(margin: float = 1.0) -> Loss:
    """Return multi-class hinge (Yu et al. 2023, App. F): mean over the classes of max(0, margin - z_label +
    z_other).
    """
    require_finite("margin of hinge", margin, above=0.0)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        # not torch's multi_margin_loss, which returns 0 for NaN and so hides a diverged model
        violations = functional.relu(margin - logits.gather(1, labels[:, None]) + logits)
        is_other = torch.arange(logits.shape[1], device=logits.device) != labels[:, None]
        return torch.where(is_other, violations, 0.0).sum(1) / logits.shape[1]

    return loss


def binary_logistic() -> Loss:
    """Return the logistic loss log(1 + exp(-s z)) of two classes, s = +1 for class 1 and -1 for class 0.

    z: the single logit, or logit 1 minus logit 0.

    Raises (when called): InvalidInput for more than two classes.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.shape[1] > 2:
            raise InvalidInput(f"binary_logistic takes two classes, but there are {logits.shape[1]}; use cross_entropy")
        margin = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else torch.zeros_like(logits[:, 0]))
        return functional.softplus(torch.where(labels == 1, -margin, margin))

    return loss


def mse() -> Loss:
    """Return the mean over targets of (output - target)^2: outputs and labels [b, T]."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        _require_like(outputs, labels)
        return (outputs - labels).square().mean(1)

    return loss


def _require_like(outputs: Tensor, labels: Tensor) -> None:
    """Raises: InvalidInput where outputs [b, 1] meet labels [b], as torch then pairs each row with every label."""
    if outputs.ndim != labels.ndim:
        raise InvalidInput(
            f"outputs have the shape {list(outputs.shape)} and labels {list(labels.shape)}, so that each row would "
            "meet the labels of all others; give labels one number for each output, as labels[:, None] does for one"
        )


def binary_cross_entropy() -> Loss:
    """Return the mean over labels of -ln p(0 or 1), p = sigmoid(logit): logits and labels [b, L]."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)

    return loss


def masked_lm() -> Loss:
    """Return the mean of -ln p(token) over the counted positions of an example, 0 without any: logits [b, t, V], labels
    [b, t].

    The sum of an example is divided by its own number of counted positions, so that its gradient depends on no other
    example. With a mean over the counted tokens of the batch, as in torch's `cross_entropy`, an example would affect
    the gradients of others, which clipping does not bound.
    """
    return _mean_of_counted


def pixel_cross_entropy() -> Loss:
    """Return the mean of -ln p(class) over the counted pixels of an example, 0 without any: logits [b, K, h, w], labels
    [b, h, w].

    The sum of an example is divided by its own number of counted pixels, for the reason given at `masked_lm`.
    """
    return lambda logits, labels: _mean_of_counted(logits.movedim(1, -1), labels)


def _mean_of_counted(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean [b] of -ln p over each example's counted positions: logits [b, ..., K], labels [b, ...]."""
    counted = (labels != IGNORED).flatten(1).sum(1).clamp(min=1)
    # flattened, because torch has no deterministic algorithm for sequences and pictures on CUDA
    rows, classes = logits.flatten(0, -2), labels.flatten()
    losses = functional.cross_entropy(rows, classes, reduction="none", ignore_index=IGNORED).view(len(labels), -1)
    return losses.sum(1) / counted


_BY_TASK: Mapping[str, Mapping[str, Callable[..., Loss]]] = {
    "classification": {"binary_logistic": binary_logistic, "cross_entropy": cross_entropy, "hinge": hinge},
    "language_modelling": {"causal_lm": masked_lm, "masked_lm": masked_lm},  # one function; labels are the next tokens
    "multi_label": {"binary_cross_entropy": binary_cross_entropy},
    "regression": {"mse": mse},
    "segmentation": {"pixel_cross_entropy": pixel_cross_entropy},
}
LOSSES = dict(sorted((name, make) for losses in _BY_TASK.values() for name, make in losses.items()))
"""Losses by name."""
TASK_OF = {name: task for task, losses in _BY_TASK.items() for name in losses}
"""Task of each loss in `LOSSES`; the user's own losses are accepted for every task."""

FURTHER_COLUMNS: Final = (
    "further columns, such as of a second head, need a loss of your own, and the first ones are taken"
)


def build_loss(
    component: Component, code: UserCode = NO_CODE, task: str | None = None, columns: int | None = None
) -> Loss:
    """Return the per-example loss called ``component.name``.

    `task`: the task of the data, if known. `columns`: its number of outputs, if known; the loss then refuses rows with
    more, unless it is the user's. A loss of the user's own is ``module:function(**params)`` with a module in ``code``;
    the function returns a `Loss`.

    Raises: InvalidInput for unknown names, keys and values, a loss of another task, or the user's own loss whose module
    is not in ``code``.

    >>> hinge = build_loss(Component("hinge", {"margin": 1.0}))
    >>> hinge(torch.tensor([[2.0, 0.5], [0.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.0000, 0.5000])
    """
    name = component.name
    loss = build_named(LOSSES, name, component.params, "loss", code)
    if name in LOSSES:
        if task is not None and TASK_OF[name] != task:
            fitting = " or ".join(_BY_TASK[task])
            raise InvalidInput(
                f"loss {name!r} is for {TASK_OF[name]}, but the data are for {task}; set loss: {fitting}"
            )
        return loss if columns is None else _of_columns(loss, columns)
    if not callable(loss):
        raise InvalidInput(
            f"loss {name!r} returned {type(loss).__name__}, but must return a function of logits [b, classes] and "
            "labels [b] that returns a loss for each row [b]"
        )
    return loss


def of_each_row(loss: nn.Module) -> Loss:
    """Return a loss module of torch as the loss of each row, [b].

    Where a row has several targets: their sum if the module sums, and else the mean of those that it does not ignore,
    for the reason given at `masked_lm`.
    """
    single, ignored = copy.copy(loss), getattr(loss, "ignore_index", None)
    is_sum = loss.reduction in ("sum", "batchmean")
    vars(single)["reduction"] = "none"

    def of_each(outputs: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = single(outputs, labels)
        if losses.numel() > max(outputs.numel(), labels.numel()):
            _require_like(outputs, labels)
        if losses.ndim == 1:
            return losses
        if is_sum:
            return losses.flatten(1).sum(1)
        if ignored is None or labels.is_floating_point():
            return losses.flatten(1).mean(1)
        counted: Tensor = labels != ignored
        return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)

    return of_each


def _of_columns(known: Loss, columns: int) -> Loss:
    """Return the loss, for rows of at most so many outputs: cross-entropy would take others for further classes."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if outputs.ndim == 2 and outputs.shape[1] > columns:
            raise InvalidInput(
                f"the model returns {count_of(outputs.shape[1], 'output')} for {columns}; {FURTHER_COLUMNS}"
            )
        return known(outputs, labels)

    return loss
