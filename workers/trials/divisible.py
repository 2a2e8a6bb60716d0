"""Which layers of a model have frozen parameters that ranks can divide among them."""

from __future__ import annotations

from collections import Counter

from torch import nn

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


def _layers(module: nn.Module) -> list[nn.Module]:
    members = [each for each in module.children() if _has_frozen(each)]
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1:
        return members
    return [found for each in members for found in _layers(each)]


def _has_frozen(module: nn.Module) -> bool:
    return any(not each.requires_grad and each.dim() for each in module.parameters())
