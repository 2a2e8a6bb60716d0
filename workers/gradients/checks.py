"""Refuses modules that have no per-example gradients, and says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrizations import _SpectralNorm

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.factors import HALF_PRECISION
from dpsweep.workers.gradients.layers import RULES


def _has_weight_from_a_hook(module: nn.Module) -> bool:
    is_own = "weight" in module._parameters or hasattr(type(module), "weight")  # of a parametrization or an adapter
    return isinstance(module, tuple(RULES)) and not is_own


_NO_BATCH_FIRST = "reads its batch from the second axis; construct it with batch_first=True"

REFUSED: tuple[tuple[type | tuple[type, ...], Callable[..., bool], str], ...] = (
    (
        _BatchNorm,
        lambda module: module.training or module.running_mean is None,
        "mixes the examples of a batch, so an example's gradient depends on the others; use torch.nn.GroupNorm, or "
        "return it in .eval() if its running statistics are those of public data",
    ),
    (
        _InstanceNorm,
        lambda module: module.track_running_stats,
        "keeps running statistics over examples; construct it with track_running_stats=False",
    ),
    (
        (nn.Embedding, nn.EmbeddingBag),
        lambda module: module.scale_grad_by_freq,
        "scales gradients by how often a token occurs in the batch; construct it with scale_grad_by_freq=False",
    ),
    (
        (nn.Embedding, nn.EmbeddingBag),
        lambda module: module.max_norm is not None,
        "rewrites its weight while it is read; construct it with max_norm=None",
    ),
    (nn.EmbeddingBag, lambda module: module.sparse, "has sparse gradients; construct it with sparse=False"),
    (
        _SpectralNorm,
        lambda module: True,
        "changes with every forward pass, so that no two passes agree; use torch.nn.utils.parametrizations.weight_norm",
    ),
    (
        nn.Module,
        _has_weight_from_a_hook,
        "computes its weight in a hook, where no gradient is captured; use torch.nn.utils.parametrizations.weight_norm "
        "in place of a weight or spectral norm, and torch.nn.utils.prune.remove after pruning",
    ),
    (torch.jit.ScriptModule, lambda module: True, "hides what its layers read; use the module it was made from"),
    (nn.MultiheadAttention, lambda module: not module.batch_first, _NO_BATCH_FIRST),
    (nn.RNNBase, lambda module: not module.batch_first, _NO_BATCH_FIRST),
    (LazyModuleMixin, lambda module: True, "has no parameters yet; run one forward pass before training"),
)


def check_model(model: nn.Module) -> None:
    """Raise InvalidInput naming every module without per-example gradients and its replacement."""
    problems = [
        f"module {name or '(the model itself)'!r} ({type(module).__name__}) {reason}"
        for name, module in model.named_modules()
        for kind, applies, reason in REFUSED
        if isinstance(module, kind) and applies(module)
    ]
    if problems:
        raise InvalidInput("; ".join(problems))
    dtypes = {name: parameter.dtype for name, parameter in trained_parameters(model).items()}
    if not dtypes:
        raise InvalidInput("the model has no parameter with requires_grad=True; there is nothing to train")
    _check_precision(dtypes)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name.

    As of `named_parameters`, in half its time: every step asks for them.
    """
    found, seen, waiting = dict[str, nn.Parameter](), set[object](), [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                found[path + name] = parameter
        if module._modules:
            children = reversed(module._modules.items())
            waiting += [(f"{path}{name}.", child) for name, child in children if child is not None]
    return found


def require_trained(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise InvalidInput unless ``parameters`` are the trainable parameters of the model."""
    trained = trained_parameters(model)
    other = [name for name in {**parameters, **trained} if trained.get(name) is not parameters.get(name)]
    if other:
        raise InvalidInput(
            f"parameters {', '.join(other[:5])} were frozen, unfrozen or replaced since the engine was made, which "
            "would go on as it began; make a new engine, and optimizer, after such a change"
        )


def _check_precision(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raises: InvalidInput unless all trainable parameters, given by name, have one precision that is exact enough."""
    if set(dtypes.values()) in ({torch.float32}, {torch.float64}):
        return
    unlike = {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32}
    named = ", ".join(f"{name} ({dtype})" for name, dtype in unlike.items())
    if any(dtype.is_complex for dtype in unlike.values()):
        cure = "clipping and noise are of real numbers: keep real parameters [..., 2], and use torch.view_as_complex"
    elif set(dtypes.values()) == {torch.float32, torch.float64}:
        cure = "one step needs one precision: return the model in .float(), or in .double()"
    else:
        cure = "rounding to fewer digits may move a sum by more than an example does: train in float32, under autocast"
    raise InvalidInput(f"parameters {named} are not torch.float32; {cure}")


def refuse_changed(parameters: Sequence[str]) -> None:
    """Raise InvalidInput if a forward pass has changed ``parameters``, given by name."""
    if parameters:
        raise InvalidInput(
            f"the forward pass changes the parameters {', '.join(parameters)}, as max_norm of an embedding does: no "
            "noise would cover what they keep of the examples. Compute such values within an example, or fix them"
        )


@contextmanager
def unchanged(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Raise InvalidInput if a parameter is changed in place within this context, but through its ``data``."""
    versions = [parameter._version for parameter in parameters.values()]
    yield
    now = [parameter._version for parameter in parameters.values()]
    if now != versions:
        refuse_changed([name for name, was, is_ in zip(parameters, versions, now, strict=True) if was != is_])


def has_half_precision(model: nn.Module) -> bool:
    """Return whether frozen parts are in half precision; trainable parameters are in single or double precision."""
    return any(parameter.dtype in HALF_PRECISION for parameter in model.parameters())


def in_its_precision(model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Within this context the model runs: under autocast where it has frozen parts in half precision. These do not take
    the float32 of trained layers. Any other model computes as outside."""
    return torch.autocast(device.type, torch.bfloat16) if has_half_precision(model) else nullcontext()


def require_autocast(model: nn.Module, autocast: torch.dtype | None) -> None:
    """Refuse to train beside frozen parts in half precision without autocast.

    Their rounding depends on the batch size, and only of trials under autocast is it known that norms are estimates.
    Trainable parameters in half precision are refused with or without autocast (`checks.check_model`).
    """
    frozen = [each for each in model.parameters() if not each.requires_grad and each.dtype in HALF_PRECISION]
    if autocast is None and frozen:
        dtypes = sorted({str(each.dtype) for each in frozen})
        raise InvalidInput(
            f"its frozen parameters are {', '.join(dtypes)}, which train beside float32 under autocast only; set "
            "execution.autocast: true"
        )


@contextmanager
def precision_named(model: nn.Module, features: torch.dtype) -> Iterator[None]:
    """Say so where a model fails on features of another precision than its parameters."""
    try:
        yield
    except RuntimeError as error:
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if not features.is_floating_point or kinds != {torch.float64}:
            raise
        raise InvalidInput(
            f"the parameters are torch.float64, and the features {features}: return the model in .float(), or begin "
            "its forward with x.double()"
        ) from error
