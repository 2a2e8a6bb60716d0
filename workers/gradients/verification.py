"""Checks on real examples that the engine's per-example gradients are right, and depend on no other example."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput, public_text
from dpsweep.workers.gradients.checks import has_half_precision, refuse_changed
from dpsweep.workers.gradients.compared_passes import LOSSES, ComparedPasses, Gradients, Kept, Replaced
from dpsweep.workers.gradients.deterministic_passes import HIGH, LOW, ConstantDraws, Start, same, without_dropout
from dpsweep.workers.gradients.divided import displaced, is_divided
from dpsweep.workers.gradients.double_precision import double_precision
from dpsweep.workers.gradients.hidden_state import Contents, HiddenState, changed, require_no_traces
from dpsweep.workers.gradients.modes import RandomState, modes_kept
from dpsweep.workers.machine.devices import lacks_memory

T = TypeVar("T")

TOLERANCE = 1e-2
"""Tolerated difference relative to a parameter's gradient; loose, because wrong formulas and models exceed it."""

HALF_TOLERANCE = 0.1
"""Tolerance if frozen parts compute in half precision, where rounding depends on the batch size."""

DISPLACEMENT = 0.1
"""Standard deviation by which parameters are perturbed if some gradient is 0, in units of 1 / sqrt(fan in)."""

ROUNDING = 1e-9
"""Tolerated relative difference, in double precision, of values that must not depend on other rows."""

ORDER_ROUNDING = 1e-5
"""Tolerated relative difference, in single precision, between orders of rows, which kernels round differently."""


def verify_rows(model: nn.Module, loss: object, passes: ComparedPasses) -> bool:
    """Compare the engine's gradients with autograd's, and prove that they depend on no other rows of the batch.

    Five comparisons, on the rows of ``passes``:

    1. The engine's gradients of a few examples in the batch equal autograd's of each example alone, up to `TOLERANCE`,
       and so do sums over the examples kept in 2, if no layer runs on copies of its parameters. They differ if a
       parameter is also read outside the forward of the module that owns it.
    2. With some examples kept and all others replaced, loss and gradient of those kept are the same bits.
       This finds what derivatives do not see: `detach`, rounding, sorting, autograd functions of the model's own.
    3. In that pass only the losses of those kept are differentiated. By the places of the other examples, in the
       input and in the output of every layer, their derivative is exactly 0. This finds what rounding would hide.
    4. Buffers, parameters and other state (`HiddenState`) are the same after passes of different examples, and the
       losses are the same bits in the next pass.
    5. In another order of the examples, loss and gradient of each are the same but for rounding. One example fewer
       would move all after it. In 2, so are the losses of the copies that stand at the places of others.

    If the gradient of some parameter is 0 for all examples, as behind layers initialised at 0, all is also compared at
    perturbed parameters. Random draws are replaced by constants (`ConstantDraws`). Where some cannot be
    replaced, 2 and 3 are compared with the same numbers at the same places, and all in evaluation mode, if the model
    does not draw there too. State, modes and random states are restored, and parameters unless the model changes them.

    Returns whether the comparison was conclusive: gradients that are 0 or not finite are no evidence.

    Raises: Disagreement naming what disagrees, InvalidInput naming state that depends on the examples, or parameters
    that a pass changes.
    """

    def compare() -> bool:
        with _comparing(model, loss, passes) as comparison:
            done, found = comparison.compare()
            if _is_degenerate(found):
                with _perturbed([parameter for parameter in model.parameters() if parameter.requires_grad]):
                    found += comparison.compare()[1]
        return not done or any(bool(_norm(gradients) > 0.0) for gradients in found)

    return _repeated_if_others_draw(compare)


def check(model: nn.Module, loss: object, passes: ComparedPasses) -> None:
    """Compare what depends on the batch, for a model of this structure that was verified with batches of these shapes.

    As `verify_rows` does, but at the current parameters only, and draws are replaced by constants only if there are
    any. Of examples that stand elsewhere, losses alone are compared.
    Raises: as `verify_rows`.
    """

    def compare() -> None:
        with _comparing(model, loss, passes) as comparison:
            comparison.compare_batch()

    _repeated_if_others_draw(compare)


class _DrawnElsewhere(InvalidInput):
    """Python's or numpy's generator was drawn from during a pass."""


_ATTEMPTS: Final = 3
"""Comparisons after which the model itself draws: another thread, such as one that starts Ray, draws now and then."""


def _repeated_if_others_draw(compare: Callable[[], T]) -> T:
    for _ in range(_ATTEMPTS - 1):
        with suppress(_DrawnElsewhere):
            return compare()
    return compare()


@contextmanager
def _comparing(model: nn.Module, loss: object, passes: ComparedPasses) -> Iterator[_Comparison]:
    """Within this context passes can be compared; then the state before is restored."""
    device, start = next(model.parameters()).device, Start(model)
    tolerance = HALF_TOLERANCE if has_half_precision(model) else TOLERANCE
    try:
        with RandomState.preserved(device), modes_kept(model), without_dropout(model):
            hidden = HiddenState(model, loss)
            try:
                yield _Comparison(model, passes, tolerance, device, start, hidden)
            finally:
                hidden.restore()
    finally:
        start.restore()


ComparedGradients = tuple[bool, list[Gradients]]
"""Whether the passes were deterministic, and the finite gradients of each example alone; none if they were not."""


@dataclass(frozen=True)
class _Comparison:
    """The comparisons of `verify_rows`. start, hidden: state that is reset before each pass."""

    model: nn.Module
    passes: ComparedPasses
    tolerance: float
    device: torch.device
    start: Start
    hidden: HiddenState

    def compare(self) -> ComparedGradients:
        """Compare in the model's own mode; if its draws cannot be replaced there, in evaluation mode."""
        done, found = self._with_constant_draws_if_possible()
        if done:
            return done, found
        with _evaluating(self.model):
            return self._with_constant_draws_if_possible()

    def compare_batch(self) -> None:
        """Compare as the model is, if it draws nothing, and else as `compare`."""
        done, _ = self._compared(None)
        if not done:
            self.compare()

    def _with_constant_draws_if_possible(self) -> ComparedGradients:
        try:
            return self._with_constant_draws()
        except RuntimeError as error:  # higher-order operators fail in a dispatch mode; genuine errors occur again
            if lacks_memory(error):
                raise
            return self._compared(None)

    def _with_constant_draws(self) -> ComparedGradients:
        """Compare with all random draws replaced by a low constant and then, if there were any, by a high one."""
        low, high = (ConstantDraws(self.device, constants) for constants in (LOW, HIGH))
        done, found = self._compared(low)
        _refuse_own_generator(low)
        return done, found + self._compared(high)[1] if low.replaced else found

    def _compared(self, draws: ConstantDraws | None) -> ComparedGradients:
        """Compare every example; nothing is compared if passes were not deterministic.

        draws: replaces random draws by constants; None replaces nothing.
        """
        runs, passes, sides = _Runs(self, draws), self.passes, self.passes.sides
        for size in passes.sizes:
            runs.run(partial(passes.of_first, size))
        whole = runs.run(passes.of_all)
        ours, kept = whole.singles, whole.kept
        if draws is None and not runs.before.is_current():
            return False, []
        theirs = [runs.run(partial(passes.of_single, index)) for index in passes.singles]
        replaced = [runs.run(partial(passes.of_side, side)) for side in sides]
        sums = [(expected, one.sums) for expected, one in zip(kept, replaced, strict=True) if one.sums is not None]
        moved = [runs.run(partial(passes.of_order, order)) for order in passes.orders]
        with draws or nullcontext():  # from the state that the last pass has left
            again = [_run(passes.losses_again) for _ in range(passes.repeats)]
        done = runs.before.is_current() if draws is None else not draws.missed
        if not done and draws is not None:
            self._require_all_kept(kept, replaced, runs)
        if not done:
            return False, []
        _require_independent(runs.buffers)
        self._require_no_traces(runs)
        for losses in again:
            for expected, found in zip(kept, losses, strict=True):
                if not _is_kept(expected[LOSSES], found[LOSSES], None):
                    self._refuse_counted(runs)
        self._require_all_kept(kept, replaced, runs)
        for standing, other in zip(whole.losses, replaced, strict=True):
            _require_placed({LOSSES: standing}, {LOSSES: other.losses}, self.tolerance)
        _require_equal([*zip(ours, theirs, strict=True), *sums], self.tolerance)
        for ordered in moved:
            for expected, there in zip(kept, ordered, strict=True):
                _require_placed(expected, there, self.tolerance)
        return True, [each for each in theirs if _norm(each).isfinite()]

    def _require_all_kept(self, kept: Sequence[Kept], replaced: Sequence[Replaced], runs: _Runs) -> None:
        for expected, other in zip(kept, replaced, strict=True):
            _require_kept(expected, other.kept, other.touched, partial(self._where, runs))

    def _require_no_traces(self, runs: _Runs) -> None:
        """Require that what differs after passes over other examples is overwritten by the next pass."""
        suspects, passes = runs.different(), self.passes
        if not suspects or not passes.sides:
            return
        firsts: list[Callable[[], object]] = [partial(passes.forward, side) for side in (None, *passes.sides)]
        firsts += [partial(passes.of_single, index) for index in passes.singles]
        ends = []
        for first in firsts:
            runs.run(first)
            ends.append((runs.follow(passes.of_all).kept, runs.contents[-1]))
        _require_overwritten(suspects, ends, alike=1 + len(passes.sides))

    def _refuse_counted(self, runs: _Runs) -> NoReturn:
        """Raise InvalidInput naming the state by which losses change from pass to pass."""
        self.hidden.restore()
        self.start.restore()
        begun, now = self.start.buffers(), runs.buffers[-1]
        moved = {name for name, value in begun.items() if not same(value, now[name])}
        moved |= changed(self.hidden.contents(), runs.contents[-1])
        raise InvalidInput(
            f"the losses of the same rows change from pass to pass, with {', '.join(sorted(moved)) or 'hidden state'}. "
            "Each micro-batch takes a pass, so one example fewer would move others; compute such values within an "
            "example, or set them between steps"
        )

    def _where(self, runs: _Runs) -> str | None:
        """Return the module in which rows begin to depend on each other, if a forward pass shows it."""
        for side in self.passes.sides:
            passes = [partial(runs.follow, partial(self.passes.forward, which)) for which in (None, side)]
            found = _where_rows_mix(self.model, self.hidden.restore, passes, *self.passes.rows_of(side))
            if found is not None:
                return found
        return None


class _Runs:
    """Passes of a comparison, each from the same start, and the state after each. before: the random state at it."""

    def __init__(self, comparison: _Comparison, draws: ConstantDraws | None) -> None:
        self._comparison, self._draws = comparison, draws
        self.before, self._fingerprints = RandomState.of(comparison.device), comparison.start.fingerprints()
        self.buffers = list[Mapping[str, Tensor | None]]()
        self.contents = list[Contents]()

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of a pass from the same start as all others."""
        self._comparison.hidden.restore()
        return self.follow(function)

    def follow(self, function: Callable[[], T]) -> T:
        """Return the result of a pass that starts with the hidden state that the last one has left."""
        start = self._comparison.start
        start.restore()
        if self._draws is not None:  # draws that cannot be replaced are the same numbers at the same places
            self.before.restore()
        with self._draws or nullcontext():
            found = _run(function)
        if not start.is_current():
            raise _DrawnElsewhere(f"model or loss draw from Python's or numpy's generator, {_DRAW_FROM_TORCH}")
        refuse_changed(start.changed_since(self._fingerprints))
        self.buffers.append(start.buffers())
        self.contents.append(self._comparison.hidden.contents())
        return found

    def different(self) -> set[str]:
        """Return the names of the hidden values that are not the same after all passes."""
        first, *others = self.contents
        return set[str]().union(*(changed(first, other) for other in others))


class Disagreement(InvalidInput):
    """The gradients of some example in a batch differ from the example's alone."""


def in_double_where_rounding_matters(
    compare: Callable[[Tensor, Tensor], T], model: nn.Module, x: Tensor, y: Tensor
) -> T:
    """Return ``compare(x, y)``, repeated in double precision if gradients disagree.

    In a deep ReLU network the input of a unit may round to different sides of zero in a batch and alone, and such a
    small rounding difference changes gradients much. In double precision this does not happen for a few examples, while
    mixed rows still disagree.

    Parameters that ranks have divided stay in their precision. Raises: Disagreement if gradients disagree in both
    precisions, and the other errors of ``compare``.
    """
    try:
        return compare(x, y)
    except Disagreement as refused:
        if any(map(is_divided, model.parameters())):
            raise
        try:
            with double_precision(model):
                return compare(*(each.double() if each.is_floating_point() else each for each in (x, y)))
        except Disagreement:
            raise
        except Exception as error:  # code of the model may fail in double precision with any error
            if lacks_memory(error):
                raise
            raise refused from None


def _refuse_own_generator(draws: ConstantDraws) -> None:
    if draws.own_generator:
        raise InvalidInput(f"model or loss draw from a torch.Generator of their own, {_DRAW_FROM_TORCH}")


_DRAW_FROM_TORCH: Final = (
    "which is not secret and in no checkpoint; draw from torch's global generator, as torch.rand without `generator` "
    "does"
)


def _run(function: Callable[[], T]) -> T:
    try:
        return function()
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
    taken = [name for name in first if not all(same(first[name], other[name]) for other in others)]
    if taken:
        raise InvalidInput(
            f"buffers {', '.join(taken)} change with the examples that pass: no noise would cover what they keep of "
            "them, and later examples would be computed with it. Compute such values within an example, or fix them"
        )


def _require_equal(pairs: Sequence[tuple[Gradients, Gradients]], tolerance: float) -> None:
    wrong = dict.fromkeys(name for ours, theirs in pairs for name in _disagreeing(ours, theirs, tolerance))
    if wrong:
        raise Disagreement(
            f"the per-example gradients of {', '.join(wrong)} are not those of each example alone. Model and loss must "
            "treat the rows of a batch independently and keep their order, and a parameter must be read only in the "
            "forward of the module that owns it: call that module instead of using its parameter elsewhere, or let the "
            "module that uses it own it"
        )


def _require_kept(expected: Kept, found: Kept, strange: Sequence[str], place: Callable[[], str | None]) -> None:
    """Raises: Disagreement if losses or gradients have changed with other rows, or depend on them by their derivative.

    strange: names of tensors with a derivative that is not 0. place: finds where rows mix, to be named.
    """
    size = torch.stack([each.norm() for name, each in expected.items() if name != LOSSES] or [torch.zeros(())]).norm()
    wrong = dict.fromkeys(
        name
        for name in {**expected, **found}
        if not _is_kept(expected.get(name), found.get(name), size if name != LOSSES else None)
    )
    if wrong or strange:
        where = place()
        raise Disagreement(
            f"{', '.join(wrong | dict.fromkeys(strange))} of some examples depend on others of their batch"
            f"{f', from module {where} on' if where else ''}: the per-example gradients are not those of each example "
            "alone, and one example may move those of all others. Model and loss must treat the rows of a batch "
            "independently and keep their order"
        )


def _require_placed(expected: Kept, found: Kept, tolerance: float) -> None:
    """Raise Disagreement if losses or gradients have changed with the order of the examples.

    The tolerance is that of the comparison with single examples, where parts are in half precision.
    """
    rounding = tolerance if tolerance > TOLERANCE else ORDER_ROUNDING
    size = _norm({name: each for name, each in expected.items() if name != LOSSES})
    wrong = [
        name
        for name, value in expected.items()
        if not _is_equal(value, found.get(name), value.norm() if name == LOSSES else size, rounding)
    ]
    if wrong:
        raise Disagreement(
            f"{', '.join(wrong)} of some examples depend on their place in the batch: one example fewer would move "
            "those after it, and with them their gradients. Model and loss must treat the rows of a batch alike, "
            "wherever they stand"
        )


def _is_equal(expected: Tensor, found: Tensor | None, size: Tensor, rounding: float) -> bool:
    """Return whether values are equal but for rounding relative to ``size``; what is not finite is no evidence."""
    if found is None:
        return not bool(expected.any())
    allowed = (ROUNDING if expected.dtype is torch.float64 else rounding) * size
    return not bool((found - expected).norm() > allowed)


def _is_kept(expected: Tensor | None, found: Tensor | None, size: Tensor | None) -> bool:
    """Return whether values are the same bits, or in double precision equal but for rounding, relative to ``size``."""
    if expected is None or found is None:
        return all(each is None or not bool(each.any()) for each in (expected, found))
    if same(expected, found):
        return True
    scale = expected.norm() if size is None else size
    return found.dtype is torch.float64 and bool((found - expected).norm() <= ROUNDING * scale)


def _require_overwritten(suspects: set[str], ends: Sequence[tuple[Sequence[Kept], Contents]], alike: int) -> None:
    """Require that nothing of earlier examples is left after, or used in, a pass that followed one over others.

    A module may note its last output, or keep masks for each size of a batch. ends: the results of a batch after
    others, and what was hidden then. alike: number of the first of these others that have as many rows as the batch.
    """
    expected, hidden = ends[0]
    left = set[str]().union(*(changed(hidden, other) for _, other in ends[1:alike]))
    require_no_traces(sorted(suspects & left))
    for found, _ in ends[1:]:
        for one, other in zip(expected, found, strict=True):
            if not all(_is_kept(value, other.get(name), None) for name, value in one.items()):
                require_no_traces(sorted(suspects))


def _disagreeing(ours: Gradients, theirs: Gradients, tolerance: float) -> Iterator[str]:
    """Yield the names of gradients that differ by more than ``tolerance``, and rounding of the whole model's."""
    size = _norm(theirs)
    if not size.isfinite():
        return
    for name, expected in theirs.items():
        found = ours.get(name)
        present = expected if found is None else found
        if present is not None:
            expected = torch.zeros_like(present) if expected is None else expected
            difference = expected if found is None else found - expected
            rounding = torch.finfo(expected.dtype).eps ** 0.5 * size
            if not bool(difference.norm() <= tolerance * expected.norm() + rounding):
                yield name


def _norm(gradients: Gradients) -> Tensor:
    present = [gradient.norm() for gradient in gradients.values() if gradient is not None]
    return torch.stack(present).norm() if present else torch.zeros(())


def _is_degenerate(examples: Sequence[Gradients]) -> bool:
    """Return whether the gradient of some used parameter is 0 for every example."""
    largest: dict[str, float] = {}
    for gradients in examples:
        for name, gradient in gradients.items():
            if gradient is not None:
                largest[name] = max(largest.get(name, 0.0), float(gradient.norm()))
    return 0.0 in largest.values()


@contextmanager
def _perturbed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    with ExitStack() as stack:
        for seed, parameter in enumerate(parameters):
            stack.enter_context(displaced(parameter, partial(_displace, seed)))
        yield


def _displace(seed: int, values: Tensor) -> None:
    """Move the values of a parameter at random, by the same numbers in each pass of a comparison.

    They are numpy's, because torch's draws are watched meanwhile.
    """
    noise = np.random.default_rng(seed).standard_normal(values.shape, dtype=np.float32)
    values.add_(torch.as_tensor(noise).to(values), alpha=DISPLACEMENT * max(1, math.prod(values.shape[1:])) ** -0.5)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, except for recurrent layers, which cuDNN differentiates in training mode only.

    Their dropout rate is already 0 (`without_dropout`).
    """
    with modes_kept(model):
        for module in model.modules():
            module.training &= isinstance(module, nn.RNNBase)
        yield


@dataclass(frozen=True)
class _Call:
    """One call of a module: the rows that were kept of its arguments and of its outputs."""

    name: str
    arguments: list[Tensor]
    outputs: list[Tensor]

    def differs(self, other: _Call) -> bool:
        """Return whether outputs differ though arguments do not."""
        return _all_same(self.arguments, other.arguments) and not _all_same(self.outputs, other.outputs)


def _where_rows_mix(
    model: nn.Module, reset: Callable[[], object], passes: Sequence[Callable[[], object]], rows: int, kept: Tensor
) -> str | None:
    """Return the innermost module whose outputs for the rows ``kept`` change between two passes, though not its inputs.

    `reset`: called before each pass. `passes`: of a batch, and of the same one with all other rows replaced. None if
    there is no such module.
    """
    calls: list[list[_Call]] = []
    for run in passes:
        reset()
        with _noting(model, rows, kept) as noted:
            run()
        calls.append(noted)
    pairs = zip(*calls, strict=False)
    return next((one.name for one, other in pairs if one.name == other.name and one.differs(other)), None)


@contextmanager
def _noting(model: nn.Module, rows: int, kept: Tensor) -> Iterator[list[_Call]]:
    noted: list[_Call] = []

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            described = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            noted.append(_Call(described, _rows_kept((args, kwargs), rows, kept), _rows_kept(output, rows, kept)))

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _rows_kept(values: object, rows: int, kept: Tensor) -> list[Tensor]:
    """Copies of the rows ``kept`` of all tensors that have the batch on their first axis."""
    tensors = [each for each in pytree.tree_leaves(values) if type(each) is Tensor and each.shape[:1] == (rows,)]
    return [each.detach().index_select(0, kept).clone() for each in tensors]


def _all_same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))
