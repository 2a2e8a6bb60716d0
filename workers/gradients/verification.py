"""Checking once, on real examples, that a model is one that per-example gradients can be computed for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.gradients.randomness import RandomState

TOLERANCE = 1e-2
"""Relative to a parameter's gradient: so loose that only a wrong formula or a wrong use of a parameter exceeds it."""

DISPLACEMENT = 0.1
"""How far parameters are moved from where some gradient is 0, in multiples of 1 / sqrt(fan in)."""

Gradients = Mapping[str, Tensor | None]
"""By parameter name; None for a parameter that took no part."""


def verify(model: nn.Module, together: Callable[[], Sequence[Gradients]], alone: Callable[[int], Gradients]) -> bool:
    """Compare each example's gradient as computed within a batch with autograd's gradient of that example alone.

    They differ where a parameter is also read outside the forward of the module that owns it, which the engine cannot
    see, and where model or loss mix or reorder the rows of a batch. Where a gradient is 0, as behind layers that start
    at 0, they are compared at displaced parameters as well. Dropout is off meanwhile; a model that draws random numbers
    even so cannot be compared, and passes. Parameters and random state are left as they were. Returns whether there
    was something to compare: gradients that are not finite are no evidence.

    Raises: InvalidInput naming the parameters that disagree.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def compare() -> list[Gradients]:
        start = RandomState.of(parameters[0].device)
        pairs = [(ours, alone(index)) for index, ours in enumerate(together())]
        if start.is_current():
            _require_equal(pairs)
        return [theirs for _, theirs in pairs if _size(theirs).isfinite()]

    with _evaluating(model), RandomState.preserved(parameters[0].device):
        found = compare()
        if _is_degenerate(found):
            with _displaced(parameters):
                compare()
    return bool(found)


def _require_equal(pairs: Iterable[tuple[Gradients, Gradients]]) -> None:
    wrong = {name: None for ours, theirs in pairs for name in theirs if not _near(ours, theirs, name)}
    if wrong:
        raise InvalidInput(
            f"the per-example gradients of {', '.join(wrong)} are not those of each example alone. Model and loss must "
            "treat the rows of a batch independently and keep their order, and a parameter must be read only in the "
            "forward of the module that owns it: call that module instead of using its parameter elsewhere, or let the "
            "module that uses it own it"
        )


def _near(ours: Gradients, theirs: Gradients, name: str) -> bool:
    """Up to rounding, which grows with the gradient of the whole model where terms cancel."""
    size, found, expected = _size(theirs), ours.get(name), theirs[name]
    if expected is None or not size.isfinite():
        return True
    difference = expected if found is None else found - expected
    rounding = torch.finfo(expected.dtype).eps ** 0.5 * size
    return bool(difference.norm() <= TOLERANCE * expected.norm() + rounding)


def _size(gradients: Gradients) -> Tensor:
    present = [gradient.norm() for gradient in gradients.values() if gradient is not None]
    return torch.stack(present).norm() if present else torch.zeros(())


def _is_degenerate(examples: Sequence[Gradients]) -> bool:
    """Whether the gradient of a parameter that takes part is 0 for every example."""
    largest: dict[str, float] = {}
    for gradients in examples:
        for name, gradient in gradients.items():
            if gradient is not None:
                largest[name] = max(largest.get(name, 0.0), float(gradient.norm()))
    return 0.0 in largest.values()


@contextmanager
def _displaced(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.add_(torch.randn_like(parameter), alpha=DISPLACEMENT * fan_in**-0.5)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)


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
