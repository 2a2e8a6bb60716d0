"""A forward pass that records every layer's input and the graph edge at which its output gradient will appear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.gradients.divided import is_away
from dpsweep.workers.gradients.factors import ExampleGradients, Instantiated, Summed
from dpsweep.workers.gradients.fallback import run_per_row
from dpsweep.workers.gradients.layers import ON_LAST_AXES, Form, Layer, Unverified, on_copies
from dpsweep.workers.gradients.linear import affine
from dpsweep.workers.gradients.per_row import NotCovered, PerRow, Reading, as_batch, reading_per_row
from dpsweep.workers.gradients.rules import Differentiate


class Unreached(Unverified):
    """Gradients of outputs of ``layers`` did not arrive at their hooks."""

    def __init__(self, layers: Collection[str]) -> None:
        named = ", ".join(sorted(layers))
        super().__init__(f"the loss depends on {named} in some micro-batches only; call a layer where it does")
        self.layers = layers


@dataclass(frozen=True)
class Use:
    """One call of a layer.

    edges: graph edges by which the losses are differentiated; none where a hook receives the gradient. differentiate:
    maps the gradients to per-example gradients; it may read ``input``. version: counter of changes of the input in
    place, at the time of the call.
    """

    layer: Layer
    edges: Sequence[GradientEdge]
    differentiate: Differentiate
    input: Tensor | None = None
    version: int = 0

    @staticmethod
    def reading(layer: Layer, edges: Sequence[GradientEdge], differentiate: Differentiate, activation: Tensor) -> Use:
        """Return a call that may read the activation later."""
        return Use(layer, edges, differentiate, activation, activation._version)

    def require_unchanged(self) -> None:
        """Raise InvalidInput when the input was changed in place since."""
        if self.input is not None and self.input._version != self.version:
            raise InvalidInput(
                f"{self.layer.described} read a tensor that was changed in place afterwards; "
                "change a copy of it, so that gradients see what the layer saw"
            )

    def gradients(self, *grads: Tensor | None) -> Mapping[str, ExampleGradients]:
        """Return the per-example gradients by parameter name; none without any gradient of an output."""
        if all(grad is None for grad in grads):
            return {}
        self.require_unchanged()
        names = self.layer.parameters
        return {names[local]: found for local, found in self.differentiate(*grads).items() if local in names}


@dataclass
class Capture:
    """The uses of all layers in one forward pass.

    `rows`: leading dimension of every activation.
    `examples`: rows / K, with K rows per example.
    `layers`: the layers that must run in the same form again if activation checkpointing recomputes them.
    `without_output`: names of layers whose rule must not read the output.
    `held`: names of layers whose gradients no hook receives.
    `calls`: number of calls of each layer with a rule, by its name.
    """

    rows: int
    examples: int
    layers: Sequence[Layer] = ()
    without_output: Collection[str] = ()
    held: Collection[str] = ()
    uses: list[Use] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    _awaited: dict[int, Use] = field(default_factory=dict)
    _arrived: dict[int, Mapping[str, ExampleGradients]] | None = None

    def add(self, layer: Layer, output: Tensor, differentiate: Differentiate, activation: Tensor) -> None:
        """Capture the gradient of an output.

        A hook receives it as soon as it is known, so that memory of layers with small gradients is freed in the
        backward pass. Autograd only runs hooks on the way to the tensors it differentiates by. It skips the hook of a
        layer whose activation depends on no other layer.
        """
        if layer.name in self.held or not activation.requires_grad:
            self.uses.append(Use.reading(layer, [get_gradient_edge(output)], differentiate, activation))
            return
        self._awaited[len(self.uses)] = Use.reading(layer, [], differentiate, activation)
        output.register_hook(partial(_arrive, ref(self), len(self.uses)))  # a cycle would hold the memory
        self.uses.append(Use(layer, [], _nothing))

    def receive(self, place: int, grad: Tensor) -> None:
        """Differentiate the use at ``place`` by the gradient of its output, in `backward_with`."""
        if self._arrived is not None and place in self._awaited:
            self._arrived[place] = self._awaited.pop(place).gradients(grad)

    def backward(self, losses: Tensor, scale: float) -> dict[str, ExampleGradients]:
        """Return per-example gradients of ``scale * losses`` [rows] by parameter name; unused parameters have none.

        Only gradients of layer outputs are computed; autograd skips all parameter gradients. Call this with gradients
        disabled.
        """
        return self.backward_with(losses, scale, ())[0]

    def backward_with(
        self, losses: Tensor, scale: float, tensors: Sequence[Tensor]
    ) -> tuple[dict[str, ExampleGradients], list[Tensor | None]]:
        """As `backward`, and autograd's gradients of ``scale * losses.sum()`` with respect to ``tensors``."""
        places: list[GradientEdge | Tensor] = [edge for use in self.uses for edge in use.edges]
        places.extend(tensors)
        if not losses.requires_grad or (not self.uses and not tensors):
            return {}, [None] * len(tensors)
        self._arrived = arrived = dict[int, Mapping[str, ExampleGradients]]()
        with torch.enable_grad():
            total = losses.sum()  # torch.autograd.grad of a vector would import sympy
            total = total if scale == 1.0 else total * scale
        again = capturing(self.layers, self.rows, self.examples) if self.layers else nullcontext()
        try:
            with again:  # activation checkpointing runs layers again: use the same form
                grads = torch.autograd.grad(total, places, allow_unused=True) if places else ()  # type: ignore[arg-type]
        except RuntimeError:  # torch names no layer
            for use in (*self.uses, *self._awaited.values()):
                use.require_unchanged()
            raise
        if self._awaited:
            raise Unreached({use.layer.name for use in self._awaited.values()})
        remaining: list[Tensor | None] = [*reversed(grads)]
        del grads
        found: dict[str, list[ExampleGradients]] = {}
        for place, use in enumerate(self.uses):
            own = arrived[place] if place in arrived else use.gradients(*(remaining.pop() for _ in use.edges))
            for name, gradients in own.items():
                found.setdefault(name, []).append(gradients)
        by_name = {name: parts[0] if len(parts) == 1 else Summed(parts) for name, parts in found.items()}
        return by_name, remaining[::-1]


def _arrive(capture: ref[Capture], place: int, grad: Tensor) -> None:
    alive = capture()
    if alive is not None:
        alive.receive(place, grad)


def _nothing(*grads: Tensor | None) -> Mapping[str, ExampleGradients]:
    return {}


@contextmanager
def capturing(
    layers: Sequence[Layer],
    rows: int,
    examples: int,
    without_output: Collection[str] = (),
    held: Collection[str] = (),
) -> Iterator[Capture]:
    """Within this context a forward pass of the model fills the capture; afterwards the model is restored.

    The context replaces the forward of each layer and hooks no module: a replaced forward sees exactly the layer's own
    input and output, whatever hooks the user has registered, and is faster.
    """
    capture = Capture(rows, examples, on_copies(layers), without_output, held)
    with ExitStack() as replaced:
        for layer in layers:
            run = partial(_RUN[layer.form], layer, capture, layer.module.forward)
            replaced.enter_context(_forwarding(layer.module, run))
        yield capture


def _run_by_rule(layer: Layer, capture: Capture, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a layer that has a rule, and record its input and output."""
    name, activation = ("input", kwargs["input"]) if "input" in kwargs else (None, args[0])

    def run(on: Tensor) -> Tensor:
        return original(on, *args[1:], **kwargs) if name is None else original(*args, **{**kwargs, name: on})

    if activation.shape[:1] == (0,):  # no row of any example, such as those of an expert that is given none
        return original(*args, **kwargs)
    if not _holds_batch(layer, capture, activation) or isinstance(activation, PerRow):
        return _without_batch(layer, capture, activation, run)
    return _recorded(layer, capture, activation, run)


def _recorded(layer: Layer, capture: Capture, activation: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    if is_rounded_by_autocast(activation) and isinstance(layer.module, nn.Linear):
        activation = activation.to(torch.get_autocast_dtype("cuda"))  # as the layer would: once for it and its rule
    output = run(activation)
    if output.requires_grad:
        if output._is_view():  # an in-place change of a view removes its edge from the graph
            output = output.clone()
        assert layer.rule is not None
        read = None if layer.name in capture.without_output else output
        differentiate = layer.rule(layer.module, activation, read, capture.examples)
        capture.add(layer, output, differentiate, activation)
    return output


def is_rounded_by_autocast(activation: Tensor) -> bool:
    """Return whether products on a GPU would first round the activation to half precision."""
    on_gpu = activation.device.type == "cuda" and activation.dtype == torch.float32
    return on_gpu and torch.is_autocast_enabled("cuda")


def _holds_batch(layer: Layer, capture: Capture, activation: Tensor) -> bool:
    """Return whether the first axis of the input is the batch, or stacks the rows of the batch with other axes.

    An argument of a single example whose length is not yet known to hold the batch can be taken as its entries.
    """
    position = ("input of call", capture.calls[layer.name])
    capture.calls[layer.name] += 1
    length = activation.shape[0] if activation.dim() else -1
    undecided = layer.axes.stacks and capture.examples == 1 and activation.dim() > 1
    return bool(layer.entries(position, length, capture.rows)) or undecided


def _without_batch(layer: Layer, capture: Capture, activation: Tensor, run: Callable[[Tensor], Tensor]) -> Any:
    """Run a layer on an input without a batch axis, such as the positions of tokens.

    Such an input is equal in all rows, unless it was computed from parameters per row (`PerRow`). The output has no
    batch axis either.
    """
    reading, rows = _reading(layer, capture), capture.rows
    by_row = activation.by_row if isinstance(activation, PerRow) else activation.expand(rows, *activation.shape)
    if activation.shape[:1] == (1,):
        return PerRow.of(_recorded(layer, capture, by_row.flatten(0, 1), run).unsqueeze(1), reading)
    if isinstance(layer.module, ON_LAST_AXES):
        return PerRow.of(_recorded(layer, capture, by_row, run), reading)
    if isinstance(activation, PerRow):
        raise NotCovered(f"{layer.described} was given a parameter of shape {list(activation.shape)}")
    with reading_per_row(reading, _copies(layer, capture)):
        return run(activation)


def _run_by_rewrite(layer: Layer, capture: Capture, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer without a rule as linear maps if its rewrite covers the call, else row by row."""
    with _forwarding(layer.module, original):
        if layer.rewrite is not None:
            args, kwargs = pytree.tree_map(as_batch, (args, kwargs))
            output = layer.rewrite(layer.module, _Recorder(layer, capture), *args, **kwargs)
            if output is not None:
                return output
            layer.uncovered.add(layer.form)
        return _run_per_example(layer, capture, args, kwargs)


@dataclass(frozen=True)
class _Recorder:
    """`dpsweep.workers.gradients.rules.Recorder` that adds the computations of a layer's rewrite to a capture."""

    layer: Layer
    capture: Capture

    @property
    def examples(self) -> int:
        return self.capture.examples

    def linear(self, activation: Tensor, weight: str, bias: str) -> Tensor:
        parameters = dict(self.layer.module.named_parameters())
        output = functional.linear(activation, parameters[weight], parameters.get(bias))
        if output.requires_grad:
            self.record([output], affine(activation, self.examples, weight, bias), activation)
        return output

    def record(self, outputs: Sequence[Tensor], differentiate: Differentiate, activation: Tensor) -> None:
        if not _holds_batch(self.layer, self.capture, activation):
            raise InvalidInput(
                f"{self.layer.described} was given a tensor of shape {list(activation.shape)} in a batch of "
                f"{count_of(self.capture.rows, 'row')}; every layer must see the batch on its first axis"
            )
        edges = [get_gradient_edge(output) for output in outputs]
        self.capture.uses.append(Use.reading(self.layer, edges, differentiate, activation))


def _reading(layer: Layer, capture: Capture) -> Reading:
    return Reading(layer, capture.rows, _Recorder(layer, capture))


def _run_per_example(layer: Layer, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generic fallback: run every example with its own copy of the parameters, so that gradients stay separate.

    Raises: InvalidInput for packed sequences.
    """
    if any(isinstance(each, PackedSequence) for each in (*args, *kwargs.values())):
        raise InvalidInput(
            f"{layer.described} was given a PackedSequence, which has the positions of all examples on one axis; "
            "give it the padded tensor, and read the output of each example at its length"
        )
    args, kwargs = pytree.tree_map(as_batch, (args, kwargs))
    return run_per_row(layer, _copies(layer, capture), capture.rows, args, kwargs)


def _run_reading_per_row(
    layer: Layer, capture: Capture, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module on the whole batch, but operations that read its own parameters once per row."""
    with reading_per_row(_reading(layer, capture), _copies(layer, capture)):
        return original(*args, **kwargs)


def _copies(layer: Layer, capture: Capture) -> dict[str, Tensor]:
    """Copies of the layer's parameters, [rows, *shape], one per example; the gradients of the copies are captured."""
    owned = dict(layer.module.named_parameters())
    away = [layer.parameters[local] for local in layer.parameters if is_away(owned[local])]
    if away:
        raise InvalidInput(
            f"{layer.described} runs once per example, with its parts, and ranks have divided {', '.join(away)}, which "
            "are gathered for their own layer alone; leave resources.shard out"
        )
    leaves = {
        local: owned[local].detach().expand(capture.examples, *owned[local].shape).requires_grad_()
        for local in layer.parameters
    }

    def differentiate(*grads: Tensor | None) -> dict[str, ExampleGradients]:
        return {local: Instantiated(grad) for local, grad in zip(leaves, grads, strict=True) if grad is not None}

    capture.uses.append(Use(layer, [get_gradient_edge(leaf) for leaf in leaves.values()], differentiate))
    copies = capture.rows // capture.examples
    return leaves if copies == 1 else {local: leaf.repeat_interleave(copies, 0) for local, leaf in leaves.items()}


_RUN: Final[Mapping[Form, Callable[..., Any]]] = {
    "rule": _run_by_rule,
    "rewrite": _run_by_rewrite,
    "parameters per row": _run_reading_per_row,
    "per example": _run_by_rewrite,
}


@contextmanager
def _forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of the module within this context."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
