"""Per-example losses: logits [b, classes] and labels [b] -> losses [b]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from accounting.errors import InvalidInput, require_finite
from accounting.registry import build
from workers.imports import NO_CODE, UserCode, import_function, is_import_path
from workers.spec import Component

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy() -> Loss:
    """-log softmax(logits)[label]."""
    return _cross_entropy


def hinge(margin: float = 1.0) -> Loss:
    """Multi-class hinge (Yu et al. 2023, App. F): mean over the classes of max(0, margin - z_label + z_other)."""
    require_finite("margin of hinge", margin, above=0.0)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        # not torch's multi_margin_loss, which returns 0 for NaN and so hides a diverged model
        violations = functional.relu(margin - logits.gather(1, labels[:, None]) + logits)
        is_other = torch.arange(logits.shape[1], device=logits.device) != labels[:, None]
        return torch.where(is_other, violations, 0.0).sum(1) / logits.shape[1]

    return loss


def binary_logistic() -> Loss:
    """log(1 + exp(-s z)), s = +1 for class 1 and -1 for class 0; z is the single logit, or logit 1 minus logit 0.

    Raises (when called): InvalidInput for more than two classes.
    """
    return _binary_logistic


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def _binary_logistic(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[1] > 2:
        raise InvalidInput(f"binary_logistic takes two classes, but there are {logits.shape[1]}; use cross_entropy")
    margin = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else torch.zeros_like(logits[:, 0]))
    return functional.softplus(torch.where(labels == 1, -margin, margin))


LOSSES: Mapping[str, Callable[..., Loss]] = {
    "binary_logistic": binary_logistic,
    "cross_entropy": cross_entropy,
    "hinge": hinge,
}


def build_loss(component: Component, code: UserCode = NO_CODE) -> Loss:
    """The per-example loss called ``component.name``.

    The user's own is ``module:function(**params)`` with a module in ``code``, and returns a `Loss`.

    Raises: InvalidInput for unknown names, keys and values, or the user's own loss whose module is not in ``code``.

    >>> hinge = build_loss(Component("hinge", {"margin": 1.0}))
    >>> hinge(torch.tensor([[2.0, 0.5], [0.0, 0.0]]), torch.tensor([0, 1]))
    tensor([0.0000, 0.5000])
    """
    name = component.name
    if not is_import_path(name):
        return build(LOSSES, name, component.params, "loss")
    loss: object = build({name: import_function(name, "loss", code)}, name, component.params, "loss")
    if not callable(loss):
        raise InvalidInput(
            f"loss {name!r} returned {type(loss).__name__}, but must return a function of logits [b, classes] and "
            "labels [b] that returns a loss for each row [b]"
        )
    return loss
