"""Which layers of a model have frozen parameters that ranks can divide among them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.spec import WHY_NOT_TRAINED, TrialSpec


def require_divisible(spec: TrialSpec) -> None:
    """Raise InvalidInput for a trial that needs a second copy of its model, which FSDP does not make."""
    if spec.averaging is not None:
        raise InvalidInput(
            f"averaging {spec.averaging.name!r} evaluates a copy of the model, and one whose frozen parameters ranks "
            "divide cannot be copied; leave averaging or resources.shard out"
        )


def layers_to_divide(model: nn.Module) -> list[nn.Module]:
    """Return the layers, such as the blocks of a transformer: members of a ModuleList or Sequential with several that
    have frozen parameters.

    Raises: InvalidInput for a model without such layers, or with a frozen parameter that several of them share.
    """
    layers = _layers(model)
    if not layers:
        raise InvalidInput(
            "resources.shard: frozen divides the frozen parameters of layers in a ModuleList or Sequential, of which "
            f"the model has none, and {WHY_NOT_TRAINED}; leave shard out, or freeze the layers, as an adapter or "
            "trainable: head does"
        )
    owners = Counter(id(each) for layer in layers for each in layer.parameters() if not each.requires_grad)
    shared = [name for name, each in model.named_parameters() if owners[id(each)] > 1]
    if shared:
        raise InvalidInput(
            f"resources.shard: frozen divides layers one by one, but several share {', '.join(shared)}; leave shard out"
        )
    return layers


@contextlib.contextmanager
def only_in_calls(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Raise InvalidInput where a pass of ``model`` reads frozen parameters of a layer that is not called meanwhile.

    Ranks gather a layer's parameters when it is called, so that otherwise a rank has its part of them alone.
    """
    names = {part: name for name, part in model.named_modules()}
    owners = {each: names[layer] for layer in layers for each in layer.parameters() if not each.requires_grad}
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
        with _Reads({each: owner for each, owner in owners.items() if each.dim()}, called):
            yield
    finally:
        for hook in hooks:
            hook.remove()


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
            layer = min(owners)
            raise InvalidInput(
                f"it reads parameters of the layer {layer} without calling it, and resources.shard: frozen gathers a "
                "layer's parameters when the layer is called; call the layer itself, neither its parts nor its "
                "forward, or leave shard out"
            )
        return found


def _layers(module: nn.Module) -> list[nn.Module]:
    members = [each for each in module.children() if _has_frozen(each)]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1:
        return members
    return [found for each in members for found in _layers(each)]


def _has_frozen(module: nn.Module) -> bool:
    return any(not each.requires_grad and each.dim() for each in module.parameters())
