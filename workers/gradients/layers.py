"""Splits a model into layers: modules whose per-example gradients are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from workers.gradients import attention, convolution, embedding, linear, normalization, standardized
from workers.gradients.rules import Rewrite, Rule
from workers.models import WeightStandardizedConv2d

RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear.linear,
    nn.Conv1d: convolution.convolution,
    nn.Conv2d: convolution.convolution,
    nn.Conv3d: convolution.convolution,
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
    WeightStandardizedConv2d: standardized.standardized_convolution,
}


REWRITES: Mapping[type[nn.Module], Rewrite] = {nn.MultiheadAttention: attention.self_attention}


@dataclass(frozen=True)
class Layer:
    """A module, and how its per-example gradients are computed: by a rule, a rewrite, or the generic fallback.

    parameters: trainable ones, local name -> name in the model. rule: None if there is none for this class; then
    ``rewrite`` expresses the call in linear maps. If it is None or does not cover the call, the fallback runs the
    module row by row. without_batch: positions of arguments that the fallback has seen not to hold the batch.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, str]
    rule: Rule | None
    rewrite: Rewrite | None
    without_batch: set[tuple[str, int]] = field(default_factory=set)

    @property
    def described(self) -> str:
        """Name and class, for errors."""
        return f"layer {self.name!r} ({type(self.module).__name__})"


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of the module's class; None if a subclass or parametrization changes the computation."""
    if is_parametrized(module):
        return None
    for kind, rule in RULES.items():
        if type(module).forward is kind.forward and isinstance(module, kind):
            return rule
    return None


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """The modules that own trainable parameters, outermost first. Each trainable parameter is in at least one layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return tuple(_walk(model, "", names, set()))


def _walk(module: nn.Module, name: str, names: Mapping[int, str], seen: set[int]) -> Iterator[Layer]:
    if id(module) in seen:
        return
    seen.add(id(module))
    rule = find_rule(module)
    owns = is_parametrized(module) or any(id(parameter) in names for parameter in _own_parameters(module))
    if rule is None and not owns:
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, names, seen)
        return
    parameters = {local: names[id(p)] for local, p in module.named_parameters() if id(p) in names}
    if parameters:
        plain = not any(is_parametrized(part) for part in module.modules())
        yield Layer(name or "model", module, parameters, rule, REWRITES.get(type(module)) if plain else None)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that the module's own forward reads, including those in its ParameterLists and ParameterDicts."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()
