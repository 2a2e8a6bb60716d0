"""Checks once, on real examples, that the engine's per-example gradients of a model are correct."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput, public_text
from workers.gradients.checks import refuse_changed
from workers.gradients.deterministic_passes import SHARES, ConstantDraws, Start, same, without_dropout
from workers.gradients.half_precision import has_half_precision
from workers.gradients.modes import modes_kept
from workers.gradients.randomness import RandomState

T = TypeVar("T")

TOLERANCE = 1e-2
"""Tolerated difference relative to a parameter's gradient; loose, because wrong formulas and models exceed it."""

HALF_TOLERANCE = 0.1
"""Tolerance if frozen parts compute in half precision, where rounding depends on the batch size."""

DISPLACEMENT = 0.1
"""Standard deviation by which parameters are perturbed if some gradient is 0, in units of 1 / sqrt(fan in)."""

Gradients = Mapping[str, Tensor | None]
"""Gradient by parameter name; None for a parameter that was not used."""


def verify(
    model: nn.Module,
    within: Callable[[int], Sequence[Gradients]],
    alone: Callable[[int], Gradients],
    sizes: Sequence[int],
) -> bool:
    """Compare the engine's gradient of each example in a batch with autograd's gradient of that example alone.

    within(n): the engine's gradients of a few examples in a batch of n, or of sums of them. alone(i): autograd's i-th
    of these. sizes: those of the batches, of which the last one is compared; one of size 1 before it shows the
    fallback which axes are not the batch.

    The two differ if a parameter is also read outside the forward of the module that owns it, which the engine cannot
    see, or if model or loss mix or reorder the rows of a batch. If the gradient of some parameter is 0 for all
    examples, as behind layers initialised at 0, gradients are also compared at perturbed parameters. Random draws are
    replaced by constants (`ConstantDraws`). A model with draws that cannot be replaced is compared in evaluation mode
    instead, and accepted if it draws there too. Buffers, modes and random states are restored, and parameters unless
    the model changes them.

    Returns whether the comparison was conclusive: gradients that are 0 or not finite are no evidence.

    Raises: Disagreement naming the parameters that disagree, InvalidInput naming buffers that depend on the examples,
    or parameters that a pass changes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, start = parameters[0].device, Start(model)
    tolerance = HALF_TOLERANCE if has_half_precision(model) else TOLERANCE
    comparison = _Comparison(within, alone, sizes, tolerance, device, start)
    try:
        with RandomState.preserved(device), modes_kept(model), without_dropout(model):
            done, found = comparison.where_possible(model)
            if _is_degenerate(found):
                with _perturbed(parameters):
                    found += comparison.where_possible(model)[1]
    finally:
        start.restore()
    return not done or any(bool(_norm(gradients) > 0.0) for gradients in found)


Compared = tuple[bool, list[Gradients]]
"""Whether the passes were deterministic, and the finite gradients of each example alone; none if they were not."""


@dataclass(frozen=True)
class _Comparison:
    """The passes that `verify` compares. start: what parameters and buffers are reset to before each pass."""

    within: Callable[[int], Sequence[Gradients]]
    alone: Callable[[int], Gradients]
    sizes: Sequence[int]
    tolerance: float
    device: torch.device
    start: Start

    def where_possible(self, model: nn.Module) -> Compared:
        """Compare in the model's own mode; if its draws cannot be replaced there, in evaluation mode."""
        with suppress(RuntimeError):  # higher-order operators fail in a dispatch mode; genuine errors occur again
            done, found = self._without_chance()
            if found:
                return done, found
        with _evaluating(model):
            try:
                return self._without_chance()
            except RuntimeError:
                return self._with(None)

    def _without_chance(self) -> Compared:
        """Compare with all random draws replaced by a low constant and then, if there were any, by a high one."""
        low, high = (ConstantDraws(self.device, share) for share in SHARES)
        done, found = self._with(low)
        _refuse_own_generator(low)
        return done, found + self._with(high)[1] if low.replaced else found

    def _with(self, draws: ConstantDraws | None) -> Compared:
        """Compare every example; nothing is compared if passes were not deterministic.

        draws: replaces random draws by constants; None replaces nothing.
        """
        before, buffers = RandomState.of(self.device), list[Mapping[str, Tensor | None]]()
        parameters = self.start.fingerprints()

        def run(function: Callable[[int], T], argument: int) -> T:
            self.start.restore()
            with draws or nullcontext():
                found = _run(function, argument)
            after = self.start.fingerprints()
            refuse_changed([name for name, known in parameters.items() if known != after[name]])
            buffers.append(self.start.buffers())
            return found

        *_, compared = [run(self.within, size) for size in self.sizes]
        pairs = [(ours, run(self.alone, index)) for index, ours in enumerate(compared)]
        done = before.is_current() if draws is None else not draws.missed
        if done:
            _require_independent(buffers)
            _require_equal(pairs, self.tolerance)
        return done, [theirs for _, theirs in pairs if done and _norm(theirs).isfinite()]


class Disagreement(InvalidInput):
    """The gradients of some example in a batch are not those of the example alone."""


def in_double_where_rounding_matters(
    compare: Callable[[Tensor, Tensor], bool], model: nn.Module, x: Tensor, y: Tensor
) -> bool:
    """``compare(x, y)``, repeated in double precision if gradients disagree.

    In a deep ReLU network the input of a unit may round to different sides of zero in a batch and alone, and such a
    small rounding difference changes gradients much. In double precision this does not happen for a few examples, while
    mixed rows still disagree.

    Raises: Disagreement if gradients disagree in both precisions, and the other errors of ``compare``.
    """
    try:
        return compare(x, y)
    except Disagreement as refused:
        try:
            with _double(model):
                return compare(*(each.double() if each.is_floating_point() else each for each in (x, y)))
        except Exception:  # code of the model may fail in double precision with any error
            raise refused from None


@contextmanager
def _double(model: nn.Module) -> Iterator[None]:
    """Within this context parameters and buffers are in double precision; then the original tensors are restored."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]
    try:
        for parameter, value in parameters:
            parameter.data = value.double() if value.is_floating_point() else value
        for module, name, value in buffers:
            module._buffers[name] = value.double() if value.is_floating_point() else value.clone()
        yield
    finally:
        for parameter, value in parameters:
            parameter.data = value
        for module, name, value in buffers:
            module._buffers[name] = value


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
        torch.compiler.reset()  # torch 2.11 would cache that an operator fails in a mode
        raise
    except ValueError as error:  # batch norms, for instance, need several rows
        raise InvalidInput(
            f"model or loss do not run on one example, or a few: {public_text(error)}; they must treat the rows "
            "of a batch independently"
        ) from error


def _require_independent(passes: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Raises: InvalidInput for buffers that differ between passes, because they depend on the examples."""
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
    wrong = {name: None for ours, theirs in pairs for name in theirs if not _agree(ours, theirs, name, tolerance)}
    if wrong:
        raise Disagreement(
            f"the per-example gradients of {', '.join(wrong)} are not those of each example alone. Model and loss must "
            "treat the rows of a batch independently and keep their order, and a parameter must be read only in the "
            "forward of the module that owns it: call that module instead of using its parameter elsewhere, or let the "
            "module that uses it own it"
        )


def _agree(ours: Gradients, theirs: Gradients, name: str, tolerance: float) -> bool:
    """Whether gradients are equal up to ``tolerance``, plus rounding relative to the gradient of the whole model."""
    size, found, expected = _norm(theirs), ours.get(name), theirs[name]
    if expected is None or not size.isfinite():
        return True
    difference = expected if found is None else found - expected
    rounding = torch.finfo(expected.dtype).eps ** 0.5 * size
    return bool(difference.norm() <= tolerance * expected.norm() + rounding)


def _norm(gradients: Gradients) -> Tensor:
    present = [gradient.norm() for gradient in gradients.values() if gradient is not None]
    return torch.stack(present).norm() if present else torch.zeros(())


def _is_degenerate(examples: Sequence[Gradients]) -> bool:
    """Whether the gradient of some used parameter is 0 for every example."""
    largest: dict[str, float] = {}
    for gradients in examples:
        for name, gradient in gradients.items():
            if gradient is not None:
                largest[name] = max(largest.get(name, 0.0), float(gradient.norm()))
    return 0.0 in largest.values()


@contextmanager
def _perturbed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
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
    """Evaluation mode, except for recurrent layers, which cuDNN differentiates in training mode only.

    Their dropout rate is already 0 (`without_dropout`).
    """
    with modes_kept(model):
        for module in model.modules():
            module.training &= isinstance(module, nn.RNNBase)
        yield
