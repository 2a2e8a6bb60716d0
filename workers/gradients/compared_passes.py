"""Gradients of the engine and of autograd for the same examples, which `verify_rows` compares."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dpsweep.workers.gradients.capture import Capture, Use
from dpsweep.workers.gradients.factors import ExampleGradients, Instantiated
from dpsweep.workers.gradients.layers import Layer
from dpsweep.workers.machine.devices import lacks_memory

Capturing = Callable[[int], AbstractContextManager[Capture]]
"""Number of rows -> the context in which a forward pass is captured."""

_LEVELS: Final = 16
"""Number of different weights 2^k of losses, k from -8 to 7."""

LOSSES: Final = "the losses"

Gradients = Mapping[str, Tensor | None]
"""Gradient by parameter name; None for a parameter that was not used."""

Kept = Mapping[str, Tensor]
"""`LOSSES` of the examples that are kept, and weighted sums of their gradients by parameter name."""

INPUT: Final = "the input"
NUMBERS: Final = "numbers from whole numbers of the input"
"""Names of the tensors, besides parameters, by which losses are differentiated."""

_ERROR: Final = 2
"""The debug mode in which torch refuses what it has no deterministic algorithm for."""
_CPU: Final = torch.device("cpu")
"""Device on which choices are drawn, whatever torch's default device is."""
_INTO_THE_FIRST: Final = frozenset({Tensor.__setitem__, Tensor.set_})
"""Functions that write into their first argument, and do not return it."""
_HOLDS_TENSORS: Final = (Tensor, list, tuple, dict)


@dataclass(frozen=True)
class Side:
    """Some examples of a batch that are kept while all others are replaced by copies of them.

    kept, others: indices of examples, ascending.
    sources [examples]: which example stands at each place once the others are replaced.
    weights: of the losses of those kept, powers of two, so that products with them are exact.
    of_others: normal numbers, by which derivatives at the places of others are weighted, so that none cancel.
    """

    kept: Tensor
    others: Tensor
    sources: Tensor
    weights: Tensor
    of_others: Tensor


def sides_of(examples: int, like: Tensor, turn: int = 0) -> tuple[Side, Side]:
    """Return a random half of the examples, with the first and without the last, and the other half.

    turn: another turn draws another half. At least two examples.
    """
    generator = torch.Generator().manual_seed(turn)
    chosen = torch.zeros(examples, dtype=torch.bool, device=_CPU)
    chosen[torch.randperm(examples - 2, generator=generator, device=_CPU)[: (examples - 1) // 2] + 1] = True
    chosen[0] = True
    levels = torch.randperm(examples, generator=generator, device=_CPU) % _LEVELS - _LEVELS // 2

    def side(kept: Tensor) -> Side:
        inside, outside = kept.nonzero().squeeze(1), kept.logical_not().nonzero().squeeze(1)
        sources = torch.arange(examples, device=_CPU)
        sources[outside] = inside[torch.randint(len(inside), (len(outside),), generator=generator, device=_CPU)]
        weights = torch.pow(2.0, levels[inside].double())
        of_others = torch.randn(len(outside), generator=generator, device=_CPU, dtype=torch.float64)
        device = like.device
        return Side(
            kept=inside.to(device),
            others=outside.to(device),
            sources=sources.to(device),
            weights=weights.to(device, like.dtype),
            of_others=of_others.to(device, like.dtype),
        )

    return side(chosen), side(~chosen)


def chosen_examples(examples: int, turn: int, most: int) -> list[int]:
    """Return up to ``most`` different examples: the first, the last, the middle one, and random ones, ascending."""
    generator = torch.Generator().manual_seed(turn)
    drawn = torch.randperm(examples, generator=generator, device=_CPU)
    order = [0, examples - 1, examples // 2, *drawn[:most].tolist()]
    return sorted(list(dict.fromkeys(order))[: min(most, examples)])


def order_of(examples: int, like: Tensor) -> Tensor:
    """Return a random order of the examples, in which none stands at its place."""
    generator = torch.Generator().manual_seed(examples)
    drawn = torch.randperm(examples, generator=generator, device=_CPU)
    order = torch.empty_like(drawn).scatter_(0, drawn, drawn.roll(1))
    return order.to(like.device)


def of_examples(rows: Tensor, examples: Tensor, multiplicity: int) -> Tensor:
    """Return the rows of the examples at these indices, K consecutive rows each."""
    by_example = rows.reshape(-1, multiplicity, *rows.shape[1:])
    return by_example.index_select(0, examples).flatten(0, 1)


@dataclass(frozen=True)
class Replaced:
    """Results of the examples that a side keeps, where the others are replaced.

    kept: as without the replacement.
    touched: names of tensors with a derivative that is not 0 at the places of others.
    sums: autograd's weighted sums of their gradients; None if layers read copies of their parameters.
    losses: of the examples at all places.
    """

    kept: Kept
    touched: Sequence[str]
    sums: Gradients | None
    losses: Tensor


@dataclass(frozen=True)
class OfAll:
    """Results of a batch as it is.

    singles: the engine's gradients of single examples. kept: of the examples that each side keeps. losses: of the
    examples that stand at all places once the others of a side are replaced.
    """

    singles: list[Gradients]
    kept: list[Kept]
    losses: list[Tensor]


@dataclass(frozen=True)
class ComparedPasses:
    """Passes over the rows x and y, by the engine and by autograd.

    losses: loss of each row.
    multiplicity: K consecutive rows are one example.
    alone: number of single examples that are compared with autograd, spread over the batch.
    sides: one is kept while the others are replaced.
    sizes: of smaller batches that pass before.
    orders: others of the examples, in which they pass again.
    repeats: how often the losses are computed again at the end.
    """

    capturing: Capturing
    losses: Callable[[Tensor, Tensor], Tensor]
    parameters: Mapping[str, nn.Parameter]
    multiplicity: int
    x: Tensor
    y: Tensor
    sides: Sequence[Side]
    alone: int = 0
    sizes: Sequence[int] = ()
    orders: Sequence[Tensor] = ()
    repeats: int = 1

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.x) // self.multiplicity

    @property
    def singles(self) -> list[int]:
        """Indices of the single examples: the first, the last, and those between at equal distances."""
        few = min(self.alone, self.examples)
        return [round(place * (self.examples - 1) / max(few - 1, 1)) for place in range(few)]

    def of_first(self, count: int) -> None:
        """Pass the first examples: the fallback compares their number with later ones, to find which axis is theirs."""
        rows = slice(count * self.multiplicity)
        self._backward(self.x[rows], self.y[rows])

    def of_single(self, index: int) -> Gradients:
        """Return autograd's gradient of the example at this index, alone."""
        rows = slice(index * self.multiplicity, (index + 1) * self.multiplicity)
        with torch.enable_grad():
            loss = self.losses(self.x[rows], self.y[rows]).mean()
        if not loss.requires_grad:
            return dict.fromkeys(self.parameters)
        return self._named(torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True))

    def _named(self, found: Sequence[Tensor | None]) -> Gradients:
        return {name: None if g is None else g.to_dense() for name, g in zip(self.parameters, found, strict=True)}

    def of_all(self) -> OfAll:
        """Pass the batch as it is."""
        losses, found = self._backward(self.x, self.y)
        one = self._ones(1)
        places = [torch.tensor([index], device=self.x.device) for index in self.singles]
        singles: list[Gradients] = [
            {name: found[name].select(at).weighted_sum(one) for name in self._differentiated(found)} for at in places
        ]
        kept = [self._kept(losses, found, side.kept, side.weights) for side in self.sides]
        return OfAll(singles, kept, [losses.view(-1, self.multiplicity)[side.sources] for side in self.sides])

    def of_side(self, side: Side) -> Replaced:
        """Compare what is kept where the other examples are replaced.

        Only the losses of those kept are differentiated. Their gradients at the places of other examples, of every
        layer's output and of the input, are therefore exactly 0 if rows are independent.
        """
        x, y = self._of_examples(self.x, side.sources), self._of_examples(self.y, side.sources)
        losses, capture = self._forward(x, y)
        with torch.enable_grad():
            scored = (losses.view(-1, self.multiplicity)[side.kept] * side.weights[:, None]).flatten()
        own = not capture.layers  # others read copies of their parameters
        tensors = list(self.parameters.values()) if own else []
        with _algorithms_for_the_input():
            found, sums = capture.backward_with(scored, 1.0 / self.multiplicity, tensors)
        kept = self._kept(losses.detach(), found, side.kept, self._ones(len(side.kept)))
        strange = [name for name, each in found.items() if _is_touched(each.select(side.others), side.of_others)]
        each = losses.detach().view(-1, self.multiplicity)
        return Replaced(kept, strange, self._named(sums) if own else None, each)

    def of_order(self, order: Tensor) -> list[Kept]:
        """Return what `of_all` does of each side, where example ``order[i]`` stands at place i."""
        losses, found = self._backward(self._of_examples(self.x, order), self._of_examples(self.y, order))
        places = order.argsort()
        return [self._kept(losses, found, places[side.kept], side.weights) for side in self.sides]

    def losses_again(self) -> list[Kept]:
        """Return the losses of the examples of each side, as `of_all` computes them."""
        losses = self._forward(self.x, self.y)[0].detach().view(-1, self.multiplicity)
        return [{LOSSES: losses[side.kept]} for side in self.sides]

    def forward(self, side: Side | None) -> None:
        """Compute the losses, with all others replaced if a side is kept."""
        places = torch.arange(self.examples, device=self.x.device) if side is None else side.sources
        self._forward(self._of_examples(self.x, places), self._of_examples(self.y, places))

    def rows_of(self, side: Side) -> tuple[int, Tensor]:
        """Return the number of rows, and the indices of rows of the kept examples."""
        rows = torch.arange(len(self.x), device=self.x.device).view(-1, self.multiplicity)
        return len(self.x), rows[side.kept].flatten()

    def _of_examples(self, rows: Tensor, examples: Tensor) -> Tensor:
        return of_examples(rows, examples, self.multiplicity)

    def _differentiated(self, found: Mapping[str, ExampleGradients]) -> list[str]:
        """Return the parameters among what was differentiated by."""
        return [name for name in found if name in self.parameters]

    def _ones(self, count: int) -> Tensor:
        like = next(iter(self.parameters.values()))
        return torch.ones(count, device=like.device, dtype=like.dtype)

    def _kept(self, losses: Tensor, found: Mapping[str, ExampleGradients], places: Tensor, weights: Tensor) -> Kept:
        sums = {name: found[name].select(places).weighted_sum(weights) for name in self._differentiated(found)}
        return {LOSSES: losses.view(-1, self.multiplicity)[places], **sums}

    def _backward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, ExampleGradients]]:
        """Return the losses, and per-example gradients of their sum."""
        losses, capture = self._forward(x, y)
        with _algorithms_for_the_input():
            return losses.detach(), capture.backward(losses, 1.0 / self.multiplicity)

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Capture]:
        """Return the losses, and what is captured: layers, and the input if the model runs on one with a gradient."""
        try:
            with _leaves(x, y) as (inputs, leaves), torch.enable_grad(), self.capturing(len(x)) as capture:
                losses = self.losses(inputs, y)
            capture.uses.extend(_use(name, leaf, capture.examples) for name, leaf in leaves)
        except RuntimeError as error:  # x.numpy(), for one; genuine errors occur again
            if lacks_memory(error):
                raise
            with torch.enable_grad(), self.capturing(len(x)) as capture:
                losses = self.losses(x, y)
        return losses, capture


@contextmanager
def _algorithms_for_the_input() -> Iterator[None]:
    """Let torch differentiate by the input, as no training step does, where it has no deterministic algorithm.

    The gradient is only compared with 0, which every order of a sum gives. Where torch has a deterministic algorithm it
    stays with it, so that gradients of parameters are the same bits.
    """
    if torch.get_deterministic_debug_mode() != _ERROR:
        yield
        return
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
            yield
    finally:
        torch.set_deterministic_debug_mode("error")


@contextmanager
def _leaves(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, list[tuple[str, Tensor]]]]:
    """The input as a tensor by which losses are differentiated, and the list of all such tensors with their names."""
    found = list[tuple[str, Tensor]]()
    if x.is_floating_point():
        found.append((INPUT, x.detach().requires_grad_()))
        with torch.enable_grad():
            x = found[0][1].clone()  # which the model may change in place
    with _FromIntegers(len(x), found) as mode:
        mode.follow(x, y)
        yield x, found


class _FromIntegers(TorchFunctionMode):
    """Within this context a tensor that is computed from whole numbers of the batch can be differentiated by.

    Examples are the output of a frozen embedding, and ``x.float()``. leaves: where zeros are noted that were added to
    them. Followed is everything that torch computes from the batch. A table that is not, such as that of positions,
    may have as many entries as the batch has rows, and is the same in all of them.
    """

    def __init__(self, rows: int, leaves: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._rows, self._leaves = rows, leaves
        self._followed = WeakIdKeyDictionary()

    def follow(self, *values: Tensor) -> None:
        """Follow what is computed from these tensors."""
        for value in values:
            self._followed[value] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _INTO_THE_FIRST and (type(output) is torch.Size or not isinstance(output, _HOLDS_TENSORS)):
            return output  # as most calls do: shapes, modes, gradient edges
        given = [each for each in _tensors((args, kwargs)) if each in self._followed]
        if not given:
            return output
        if func in _INTO_THE_FIRST:
            self.follow(args[0])
        if self._is_new(output) and any(self._holds_integers(each) for each in given):
            leaf = torch.zeros_like(output, requires_grad=True)
            self._leaves.append((f"{NUMBERS} ({len(self._leaves)})", leaf))
            output = output + leaf
        self.follow(*_tensors(output))
        return output

    def _is_new(self, output: object) -> bool:
        """Return whether the output is a floating-point tensor of the batch, no view, that no gradient reaches yet."""
        return (
            torch.is_grad_enabled()
            and type(output) is Tensor
            and output.is_floating_point()
            and output.shape[:1] == (self._rows,)
            and not output.requires_grad
            and not output._is_view()
            and output._version == 0
            and not is_functorch_wrapped_tensor(output)
        )

    def _holds_integers(self, value: Tensor) -> bool:
        return not value.is_floating_point() and value.shape[:1] == (self._rows,)


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors among values, and in their lists, tuples and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _use(name: str, leaf: Tensor, examples: int) -> Use:
    """Return the tensor [rows, ...] as a layer whose only parameter has its own value in each row."""
    layer = Layer(name, nn.Identity(), {name: name}, "rule")

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        return {name: Instantiated(grad.reshape(examples, -1))}

    return Use(layer, [get_gradient_edge(leaf)], differentiate)


def _is_touched(others: ExampleGradients, weights: Tensor) -> bool:
    """Return whether any gradient of these examples is not 0; NaN, such as 0 times infinity, is no evidence."""
    values = others.gradients if isinstance(others, Instantiated) else others.weighted_sum(weights)
    return bool(((values != 0.0) & ~values.isnan()).any())


@dataclass
class LaterBatches:
    """The batches after the first one, which is verified: the 1st, 8th, 64th, ... of them are compared again.

    Batches differ in the branches that a model may take. A trial that is resumed begins again. seen: their number so
    far. next: the first one that is to be compared.
    """

    seen: int = 0
    next: int = 1

    def is_to_be_compared(self, examples: int) -> bool:
        """Return whether the batch that is seen now is; one with a single example leaves it to the next batch."""
        self.seen += 1
        if self.seen < self.next or examples < 2:
            return False
        self.next = 8 * self.seen
        return True
