"""Splits a model into layers: modules whose per-example gradients are computed together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.gradients import convolution, embedding, linear, normalization, rewritten
from dpsweep.workers.gradients.factors import ExampleGradients, Instantiated, widen
from dpsweep.workers.gradients.rules import Differentiate, Rewrite, Rule
from dpsweep.workers.models import WeightStandardizedConv2d


def prelu(module: nn.PReLU, activation: Tensor, output: Tensor | None, examples: int) -> Differentiate:
    """Return the rule of nn.PReLU, which has one slope for all entries or one for each index of the second axis."""
    slopes = module.num_parameters

    def differentiate(grad: Tensor) -> dict[str, ExampleGradients]:
        sloped = widen(grad) * widen(activation).clamp(max=0.0)
        by_slope = sloped.reshape(examples, -1, slopes, math.prod(grad.shape[1:]) // slopes)
        return {"weight": Instantiated(by_slope.sum((1, 3)))}

    return differentiate


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear.linear,
    nn.Conv1d: convolution.convolution,
    nn.Conv2d: convolution.convolution,
    nn.Conv3d: convolution.convolution,
    nn.ConvTranspose1d: convolution.transposed_convolution,
    nn.ConvTranspose2d: convolution.transposed_convolution,
    nn.ConvTranspose3d: convolution.transposed_convolution,
    nn.Embedding: embedding.embedding,
    nn.BatchNorm1d: normalization.batch_norm,
    nn.BatchNorm2d: normalization.batch_norm,
    nn.BatchNorm3d: normalization.batch_norm,
    nn.GroupNorm: normalization.group_norm,
    nn.LayerNorm: normalization.layer_norm,
    nn.RMSNorm: normalization.rms_norm,
    nn.InstanceNorm1d: normalization.instance_norm,
    nn.InstanceNorm2d: normalization.instance_norm,
    nn.InstanceNorm3d: normalization.instance_norm,
    nn.PReLU: prelu,
    WeightStandardizedConv2d: convolution.standardized_convolution,
}


ON_LAST_AXES: Final = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
"""Layers with a rule that act on the last axes and take any number of axes before these."""

NAMED_RULES: Mapping[str, Rule] = {"transformers.pytorch_utils.Conv1D": linear.transposed_linear}
"""Rules by class name, for classes of libraries that are not imported here."""

NONE: Final[Mapping[str, str]] = {}

OUTERMOST: Final = "model"
"""Name of the outermost module as a layer."""

REWRITES: Mapping[type[nn.Module], Rewrite] = {
    nn.GRU: rewritten.gru_or_rnn,
    nn.LSTM: rewritten.lstm,
    nn.RNN: rewritten.gru_or_rnn,
    nn.MultiheadAttention: rewritten.self_attention,
}


Form = Literal["rule", "rewrite", "parameters per row", "per example"]
"""How per-example gradients of a layer are computed.

rule: from its input and output gradient, by the formula of its class. rewrite: the call is expressed by linear maps; a
call that the rewrite does not cover runs per example. parameters per row: only operations that read the module's own
parameters run per row, and its children are separate layers. per example: the module with its children runs once per
example.
"""


Position = tuple[str, int]
"""Place of an argument: a call of a layer or an operation in it, and the index of the argument."""


@dataclass
class Axes:
    """The content of the first axes of a layer's arguments, as found in its first passes, which are verified.

    held: arguments that held the batch.
    without_batch: those that once had another length than it.
    verified: those that held it in all passes which verified gradients, and must in later ones; None until they are
    verified.
    stacks: whether stacked arguments are looked for, such as the windows or tokens of all rows on one axis. They are
    those whose length grew with the number of rows between two passes.
    stacked: their entries per row, which are consecutive.
    """

    held: set[Position] = field(default_factory=set)
    without_batch: set[Position] = field(default_factory=set)
    verified: frozenset[Position] | None = None
    stacks: bool = True
    stacked: dict[Position, int] = field(default_factory=dict)
    _first: dict[Position, tuple[int, int]] = field(default_factory=dict)

    def per_row(self, position: Position, length: int, rows: int) -> int:
        """Return the number of consecutive entries of each row on an axis; 0 if it does not hold the batch."""
        if self.stacks:
            before, shorter = self._first.setdefault(position, (rows, length))
            if before < rows < length and length * before == shorter * rows and length % rows == 0:
                self.stacked[position] = length // rows
        entries = self.stacked.get(position)
        if entries is not None and length == rows * entries:
            self.held.add(position)
            return entries
        return self.one_per_row(position, length, rows)

    def one_per_row(self, position: Position, length: int, rows: int) -> int:
        """As `per_row`, for an argument that stacks nothing."""
        if length != rows:
            self.without_batch.add(position)
        elif position not in self.without_batch:
            self.held.add(position)
            return 1
        return 0


class Unverified(InvalidInput):
    """A layer or parameter is read in another way than in the batches that were verified."""


@dataclass(frozen=True)
class Layer:
    """A module, and how its per-example gradients are computed.

    parameters: trainable parameters, local name -> name in the model.
    rule, rewrite: given for the forms that use them.
    axes: which arguments hold the batch.
    uncovered: not empty after a call that the rewrite did not cover.
    why: if the layer runs per example, the reason as a clause.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, str]
    form: Form
    rule: Rule | None = None
    rewrite: Rewrite | None = None
    axes: Axes = field(default_factory=Axes)
    uncovered: set[Form] = field(default_factory=set)
    why: str = "no rule covers its class"

    @property
    def forced(self) -> str | None:
        """Return why the layer runs once per example, final after the first batch; None if it does not."""
        if self.uncovered:
            return "its rule does not cover how it is built or called"
        return self.why if self.form == "per example" else None

    @property
    def described(self) -> str:
        """Name and class, for errors."""
        return f"layer {self.name!r} ({type(self.module).__name__})"

    def entries(self, position: Position, length: int, rows: int, *, stacks: bool = True) -> int:
        """Return the number of consecutive entries that each row has in an argument; 0 if it does not hold the batch.

        Without the batch every row would get all of the argument. Raises: Unverified where it held the batch in the
        passes that were verified. Also for an argument that none of them had, such as that of an expert called for the
        first time: rows of several examples may be in it.
        """
        if length == 0:  # no row of any example, such as those of an expert that is given none
            return 0
        axes = self.axes
        held = axes.verified is not None and position in axes.verified
        is_new = axes.verified is not None and not held and position not in axes.without_batch
        found = axes.per_row(position, length, rows) if stacks else axes.one_per_row(position, length, rows)
        if is_new or (held and not found):
            raise Unverified(
                f"{self.described} is called in another way than in the batch that was verified: with {length} entries "
                f"for {count_of(rows, 'row')}, not {axes.stacked.get(position, 1)} for each; keep to that, or make a "
                "new engine"
            )
        return found


def outputs_are_precise(layers: Sequence[Layer]) -> Tensor:
    """Return the mask [len(layers)]: whether gradients computed from the layer's output are precise enough.

    layers: from `which_read_outputs`.
    """
    modules = [layer.module for layer in layers]
    return convolution.outputs_are_precise([each for each in modules if isinstance(each, WeightStandardizedConv2d)])


def which_read_outputs(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers whose rule reads the output, if it is precise enough."""
    return tuple(layer for layer in layers if layer.rule is convolution.standardized_convolution)


def without_batch(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers with a rule or rewrite that had an input whose first axis is not the batch."""
    return {layer.name for layer in layers if layer.rule or layer.rewrite if layer.axes.without_batch}


def identified_by_length(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers that find the rows of the batch by the lengths of their inputs."""
    return {layer.name for layer in layers if layer.form == "parameters per row"} | without_batch(layers)


def on_copies(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that may run on copies of their parameters, one for each row."""
    return [layer for layer in layers if layer.form != "rule" or layer.axes.without_batch]


def are_aligned(layers: Sequence[Layer]) -> bool:
    """Return whether every layer has a rule, whose inputs hold the batch first, one entry for each row."""
    return not on_copies(layers) and not any(layer.axes.stacked for layer in layers)


def keep_axes(layers: Sequence[Layer]) -> None:
    """Look for no more arguments that stack rows: what is found after a verification would not be verified."""
    for layer in layers:
        layer.axes.stacks = False


def open_axes(layers: Sequence[Layer]) -> None:
    """Before a verification: arguments may be other than in earlier ones."""
    for layer in layers:
        layer.axes.stacks, layer.axes.verified = True, None


def settle_axes(layers: Sequence[Layer]) -> None:
    """After a verification: what held the batch must hold it from now on."""
    keep_axes(layers)
    for layer in layers:
        axes = layer.axes
        axes.verified = frozenset(axes.stacked.keys() | axes.held - axes.without_batch)


def find_rule(module: nn.Module) -> Rule | None:
    """Return the rule of the module's class; None if a subclass or parametrization changes the computation."""
    if is_parametrized(module):
        return None
    for kind, rule in RULES.items():
        if type(module).forward is kind.forward and isinstance(module, kind):
            return rule
    for kind in type(module).__mro__:
        named = NAMED_RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if named is not None and type(module).forward is kind.__dict__.get("forward"):
            return named
    return None


def find_layers(model: nn.Module, whole: Mapping[str, str] = NONE) -> tuple[Layer, ...]:
    """Return the modules that own trainable parameters, outermost first. Each such parameter is in at least one layer.

    whole: names of modules that must run per example, with their children, and the reason for each.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return tuple(_walk(model, "", names, set(), whole))


def around(model: nn.Module, name: str, names: Iterable[str]) -> set[str]:
    """Return the nearest callable modules around layer ``name``, and around the layers of its class in ``names``.

    The outermost module has none around it.
    """
    kind = type(_module(model, name))
    alike = {name, *(each for each in names if type(_module(model, each)) is kind)} - {OUTERMOST}
    return {_around(model, each) for each in alike}


def _around(model: nn.Module, name: str) -> str:
    outer = name.rpartition(".")[0]
    is_container = isinstance(_module(model, outer or OUTERMOST), nn.ModuleList | nn.ModuleDict)
    return _around(model, outer) if outer and is_container else outer or OUTERMOST


def _module(model: nn.Module, name: str) -> nn.Module:
    return model if name == OUTERMOST else model.get_submodule(name)


def _walk(
    module: nn.Module, name: str, names: Mapping[int, str], seen: set[int], whole: Mapping[str, str]
) -> Iterator[Layer]:
    if id(module) in seen:
        return
    seen.add(id(module))
    called = name or OUTERMOST
    rule = None if called in whole else find_rule(module)
    own = {local: names[id(p)] for local, p in _own_parameters(module) if id(p) in names}
    if rule is not None or is_parametrized(module) or called in whole or (own and _runs_as_one(module)):
        parameters = {local: names[id(p)] for local, p in module.named_parameters() if id(p) in names}
        if parameters:
            yield _as_one(called, module, parameters, rule, whole.get(called))
        return
    if own:
        yield Layer(called, module, own, "parameters per row")
    for child_name, child in module.named_children():
        if not isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, names, seen, whole)


def _as_one(name: str, module: nn.Module, parameters: Mapping[str, str], rule: Rule | None, why: str | None) -> Layer:
    """Return the layer of a module whose parameters are differentiated together with its children's."""
    if rule is not None:
        return Layer(name, module, parameters, "rule", rule=rule)
    plain = not any(is_parametrized(part) for part in module.modules())
    rewrite = REWRITES.get(type(module)) if plain and why is None else None
    if rewrite is not None:
        return Layer(name, module, parameters, "rewrite", rewrite=rewrite)
    why = why or ("no rule covers its class" if plain else "its weights are parametrized")
    return Layer(name, module, parameters, "per example", why=why)


def _runs_as_one(module: nn.Module) -> bool:
    """Return whether the module reads parameters of its children, or passes its own to a kernel without a vmap rule."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase)


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the module's own forward reads, also those in its parameter lists and dicts."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            for local, parameter in child.named_parameters():
                yield f"{name}.{local}", parameter
