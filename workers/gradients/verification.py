"""Checking once, on real rows, that a model is one that per-example gradients can be computed for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.gradients.randomness import RandomState

TOLERANCE = 1e-2
"""Relative, and so loose that only a wrong formula or a wrong use of a parameter exceeds it."""

Gradients = Mapping[str, Tensor | None]


def verify(model: nn.Module, summed: Callable[[], Gradients], reference: Callable[[], Gradients]) -> bool:
    """Compare the sum of per-example gradients with autograd's gradient of the summed loss, on the same few rows.

    They differ where a parameter is also read outside the forward of the module that owns it, which hooks cannot
    see. Both are evaluated without dropout, and the random state is left as it was. Returns whether there was
    something to compare: gradients that are not finite are no evidence.

    Raises: InvalidInput naming the parameters that disagree.
    """
    with _evaluating(model), RandomState.preserved(next(model.parameters()).device):
        ours, theirs = summed(), reference()
    present = {name: gradient for name, gradient in theirs.items() if gradient is not None}
    scale = torch.stack([gradient.norm() for gradient in present.values()]).norm() if present else torch.zeros(())
    if not bool(scale.isfinite()):
        return False
    wrong = [name for name, gradient in present.items() if not _near(ours.get(name), gradient, scale)]
    if wrong:
        raise InvalidInput(
            f"the per-example gradients of {', '.join(wrong)} do not add up to the gradient of the batch. A parameter "
            "must be read only in the forward of the module that owns it: call that module instead of using its "
            "parameter elsewhere, or let the module that uses it own it"
        )
    return True


def _near(ours: Tensor | None, theirs: Tensor, scale: Tensor) -> bool:
    return ours is not None and bool((ours - theirs).norm() <= TOLERANCE * scale)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
