"""Layers of a model whose parameters ranks can divide among them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models import WeightStandardizedConv2d
from dpsweep.workers.spec import Shard, TrialSpec, divides_trained


def require_divisible(spec: TrialSpec, shard: Shard) -> None:
    """Raise InvalidInput for a trial that needs its model, or a copy of it, whole in one place."""
    if spec.averaging is not None:
        _refuse(shard, f"averaging {spec.averaging.name!r} evaluates a copy of the model")
    if not divides_trained(shard):
        return
    if spec.audit is not None:
        _refuse(shard, f"an audit of {spec.audit.kind} canaries compares whole models or updates at rank 0")
    if spec.attacks.rmia:
        _refuse(shard, "attacks.rmia trains reference models at rank 0")


def _refuse(shard: Shard, why: str) -> None:
    raise InvalidInput(f"{why}, and with resources.shard: {shard} no rank has all parameters; leave out one of both")


def is_shared_out(parameter: nn.Parameter, shard: Shard) -> bool:
    """Return whether ranks divide a parameter."""
    return divides_trained(shard) or not parameter.requires_grad


def layers_to_divide(model: nn.Module, shard: Shard) -> list[nn.Module]:
    """Return the layers with parameters to divide: the members of a ModuleList or Sequential that has several.

    Raises: InvalidInput for a model without such layers, with a parameter that several of them share, or with one that
    gradients are computed from after a pass.
    """
    layers = _layers(model, shard)
    if not layers:
        whose, freeze = "the layers", ""
        if not divides_trained(shard):
            whose = "the frozen parameters of layers"
            freeze = ", or freeze the layers, as an adapter or trainable: head does, or use shard: all"
        raise InvalidInput(
            f"resources.shard: {shard} divides {whose} in a ModuleList or Sequential, of which the model has none; "
            f"leave shard out{freeze}"
        )
    owners = Counter(id(each) for layer in layers for each in layer.parameters() if is_shared_out(each, shard))
    shared = [name for name, each in model.named_parameters() if owners[id(each)] > 1]
    if shared:
        raise InvalidInput(
            f"resources.shard: {shard} divides layers one by one, but several share {', '.join(shared)}; leave shard "
            "out"
        )
    late = [name for name, part in model.named_modules() if isinstance(part, WeightStandardizedConv2d)]
    if late and divides_trained(shard):
        raise InvalidInput(
            f"resources.shard: all frees weights after a pass, from which gradients of {late[0]} "
            "(WeightStandardizedConv2d) are computed; leave shard out"
        )
    return layers


def require_gathered(model: nn.Module, layers: Sequence[nn.Module], per_example: Collection[str]) -> None:
    """Raise InvalidInput where a module that runs once per example, by its name, has divided layers inside.

    It would read their parameters before they are gathered.
    """
    modules = dict(model.named_modules())
    for name in per_example:
        inside = set(modules.get(name, model).modules()) - {modules.get(name)}
        if not inside.isdisjoint(layers):
            raise InvalidInput(
                f"{name} runs once per example, with its parts, and resources.shard: all gathers parameters for their "
                "own layer alone; leave shard out"
            )


@contextlib.contextmanager
def only_in_calls(model: nn.Module, layers: Sequence[nn.Module], shard: Shard) -> Iterator[None]:
    """Raise InvalidInput where a pass of ``model`` reads divided parameters of a layer that is not called meanwhile.

    Ranks gather a layer's parameters when it is called, so that otherwise a rank has its part of them alone.
    """
    names = {part: name for name, part in model.named_modules()}
    owners = {each: names[layer] for layer in layers for each in layer.parameters() if is_shared_out(each, shard)}
    called: list[str] = []
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda part, given: called.append(names[part])),
            layer.register_forward_hook(lambda part, given, output: called.remove(names[part]), always_call=True),
        )
    ]
    try:
        with _Reads(owners, called):
            yield
    except _ReadOutside as error:  # anew, as the message of an error from the user's code may not be published
        raise InvalidInput(
            f"it reads parameters of the layer {error} without calling it, and resources.shard: {shard} gathers a "
            "layer's parameters when the layer is called; call the layer itself, neither its parts nor its forward, or "
            "leave shard out"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()


class _ReadOutside(Exception):
    """A parameter is read outside the calls of its layer, which is named."""


class _Reads(TorchFunctionMode):
    """Refuses every function that makes a tensor of a parameter while its owner is not ``called``."""

    def __init__(self, owners: Mapping[nn.Parameter, str], called: Sequence[str]) -> None:
        super().__init__()
        self._owners, self._called = owners, called

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        found = function(*args, **named)
        read = [each for each in pytree.tree_leaves((args, named)) if isinstance(each, nn.Parameter)]
        owners = {self._owners[each] for each in read if each in self._owners} - set(self._called)
        if owners and any(isinstance(each, Tensor) for each in pytree.tree_leaves(found)):
            raise _ReadOutside(min(owners))
        return found


def _layers(module: nn.Module, shard: Shard) -> list[nn.Module]:
    members = [each for each in module.children() if any(is_shared_out(own, shard) for own in each.parameters())]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1:
        return members
    return [found for each in members for found in _layers(each, shard)]
