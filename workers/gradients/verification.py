"""Checking once, on real examples, that a model is one that per-example gradients can be computed for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput, public_text
from workers.gradients.draws import SHARES, ConstantDraws, Start, same, without_dropout
from workers.gradients.modes import modes_kept
from workers.gradients.randomness import RandomState

T = TypeVar("T")

TOLERANCE = 1e-2
"""Relative to a parameter's gradient: so loose that only a wrong formula or a wrong use of a parameter exceeds it."""

HALF_TOLERANCE = 0.1
"""The same where frozen parts compute in half precision, which round differently in batches of another size."""

DISPLACEMENT = 0.1
"""How far parameters are moved from where some gradient is 0, in multiples of 1 / sqrt(fan in)."""

Gradients = Mapping[str, Tensor | None]
"""By parameter name; None for a parameter that took no part."""


def verify(
    model: nn.Module,
    within: Callable[[int], Sequence[Gradients]],
    alone: Callable[[int], Gradients],
    examples: int,
    tolerance: float = TOLERANCE,
) -> bool:
    """Compare each example's gradient as computed within a batch with autograd's gradient of that example alone.

    within: gradients of the first few examples in a batch of so many, as the engine finds them; alone: autograd's, of
    one of them; examples: how many the batch has; tolerance: how far they may be apart, relative to a parameter's
    gradient. They differ where a parameter is also read outside the forward of the module that owns it, which the
    engine cannot see, and where model or loss mix or reorder the rows of a batch. Where a gradient is 0, as behind
    layers that start at 0, they are compared at displaced parameters as well. Chance is taken out of these passes
    (`draws`); a model that draws random numbers even so is compared in evaluation instead, and passes if it draws
    there, too. Parameters, buffers, modes and random states are left as they were. Returns whether there was something
    to compare: gradients that are 0 or not finite are no evidence.

    Raises: InvalidInput naming the parameters that disagree, or buffers that take up something of the examples.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, start = parameters[0].device, Start(model)

    def compare(draws: ConstantDraws | None) -> tuple[bool, list[Gradients]]:
        """Whether no chance was left, and the gradients of each example alone, compared if so. draws: None for none."""
        before, buffers = RandomState.of(device), list[Mapping[str, Tensor | None]]()

        def run(function: Callable[[int], T], argument: int) -> T:
            start.restore()
            with draws or nullcontext():
                found = _run(function, argument)
            buffers.append(start.buffers())
            return found

        run(within, 1)  # so that another axis as long as the batch is not mistaken for it in the pass that counts
        pairs = [(ours, run(alone, index)) for index, ours in enumerate(run(within, examples))]
        done = before.is_current() if draws is None else not draws.missed
        if done:
            _require_independent(buffers)
            _require_equal(pairs, tolerance)
        return done, [theirs for _, theirs in pairs if done and _size(theirs).isfinite()]

    def compare_without_chance() -> tuple[bool, list[Gradients]]:
        low, high = (ConstantDraws(device, share) for share in SHARES)
        done, found = compare(low)
        _refuse_own_generator(low)
        return done, found + compare(high)[1] if low.replaced else found

    def compare_where_possible() -> tuple[bool, list[Gradients]]:
        with suppress(RuntimeError):  # operators of higher order run within no mode; real errors come back
            done, found = compare_without_chance()
            if found:
                return done, found
        with _evaluating(model):
            try:
                return compare_without_chance()
            except RuntimeError:
                return compare(None)

    try:
        with RandomState.preserved(device), modes_kept(model), without_dropout(model):
            done, found = compare_where_possible()
            if _is_degenerate(found):
                with _displaced(parameters):
                    found += compare_where_possible()[1]
    finally:
        start.restore()
    return not done or any(bool(_size(gradients) > 0.0) for gradients in found)


def _refuse_own_generator(draws: ConstantDraws) -> None:
    if draws.own_generator:
        raise InvalidInput(
            "model or loss draw from a torch.Generator of their own, which is not secret and in no checkpoint; "
            "draw from torch's global generator, as torch.rand without `generator` does"
        )


def _run(function: Callable[[int], T], argument: int) -> T:
    try:
        return function(argument)
    except InvalidInput:
        raise
    except RuntimeError:
        torch.compiler.reset()  # torch 2.11 would remember that an operator does not run within a mode
        raise
    except ValueError as error:  # as of batch norms, which need several rows
        raise InvalidInput(
            f"model or loss do not run on one example, or a few: {public_text(error)}; they must treat the rows "
            "of a batch independently"
        ) from error


def _require_independent(passes: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Buffers after every pass; those that differ hold something of the rows that passed."""
    first, *others = passes
    taken = [name for name in first if not all(_same(first[name], other[name]) for other in others)]
    if taken:
        raise InvalidInput(
            f"buffers {', '.join(taken)} change with the examples that pass: no noise would cover what they keep of "
            "them, and later examples would be computed with it. Compute such values within an example, or fix them"
        )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else same(left, right)


def _require_equal(pairs: Sequence[tuple[Gradients, Gradients]], tolerance: float) -> None:
    wrong = {name: None for ours, theirs in pairs for name in theirs if not _near(ours, theirs, name, tolerance)}
    if wrong:
        raise InvalidInput(
            f"the per-example gradients of {', '.join(wrong)} are not those of each example alone. Model and loss must "
            "treat the rows of a batch independently and keep their order, and a parameter must be read only in the "
            "forward of the module that owns it: call that module instead of using its parameter elsewhere, or let the "
            "module that uses it own it"
        )


def _near(ours: Gradients, theirs: Gradients, name: str, tolerance: float) -> bool:
    """Up to rounding, which grows with the gradient of the whole model where terms cancel."""
    size, found, expected = _size(theirs), ours.get(name), theirs[name]
    if expected is None or not size.isfinite():
        return True
    difference = expected if found is None else found - expected
    rounding = torch.finfo(expected.dtype).eps ** 0.5 * size
    return bool(difference.norm() <= tolerance * expected.norm() + rounding)


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
        fan_in = max(1, math.prod(parameter.shape[1:]))
        parameter.add_(torch.randn_like(parameter), alpha=DISPLACEMENT * fan_in**-0.5)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Recurrent layers stay in training: cuDNN differentiates them there only, and their dropout is off anyway."""
    with modes_kept(model):
        for module in model.modules():
            module.training &= isinstance(module, nn.RNNBase)
        yield
