"""The trainable parameters that the losses of some examples reach; noise alone would move the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.checks import in_its_precision, trained_parameters

Losses = Callable[[slice], Tensor]
"""The losses of the examples at a place, by the model as it is."""

_STEPS: Final = 3
_STEP: Final = 0.1
"""Number of steps along the gradients, and the length of each. One of the two factors of LoRA begins at 0; after these
steps both have had a gradient."""
_SCALES: Final = (0.1, 1.0, 3.0)
"""Random moves of the parameters, relative to their sizes, after which a parameter that is used has had a gradient."""
_SMALLEST_SIZE: Final = 0.1
"""Size that a parameter near 0 is taken to have."""
_ADAPTERS: Final = ("adapter", "adaption_", "lora_", "prompt_encoder")
"""Substrings of the names of adapter parameters, for adapters that no class of peft lists."""
_SHOWN: Final = 24
"""Maximum number of names in one sentence."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")
"""A number among the parts of a name."""


@torch.no_grad()
def require_reached(
    model: nn.Module, losses: Losses, places: Sequence[slice], allowed: Sequence[str] = ()
) -> tuple[str, ...]:
    """Refuse trainable parameters that the losses do not depend on, and adapters that are all frozen. Moves the model.

    A parameter is refused if its gradient from the examples at every place is exactly 0, while others get one. This is
    tried after steps along the gradients from those at the first, and after random moves of all trainable parameters.
    The gradient of LoRA's first factor, for example, is 0 only until the second, which begins at 0, has moved.

    places: of examples, each with a few; those after the first are read only if it does not reach all parameters.
    allowed: patterns of names that need no gradient, such as ``experts.*``.

    Returns sentences about parameters without a gradient that are not refused. Raises: InvalidInput, with their names.
    """
    _require_adapters_train(model)
    trained = list(trained_parameters(model))
    missing = _after_steps(model, losses, places)
    unused = _after_moves(model, losses, places, missing)
    if len(unused) == len(trained):
        return ("gets no gradient from the examples that were tried: where that stays so, noise alone moves it",)
    refused = [name for name in unused if not any(fnmatchcase(name, each) for each in allowed)]
    if refused:
        raise InvalidInput(
            f"its parameters {listed_layers(refused)} do not change the loss: noise alone would move them. Use them, "
            "or set requires_grad_(False) on them; where only rare examples use them, name them in without_gradient of "
            "the sweep"
        )
    slow = [name for name in missing if name not in unused]
    unmatched = [each for each in allowed if not any(fnmatchcase(name, each) for name in trained)]
    facts = {
        f"has no trainable parameter called {listed_layers(unmatched)}, as without_gradient has": unmatched,
        f"gives {listed_layers(unused)} no gradient, as without_gradient allows": unused,
        f"gives {listed_layers(slow)} {_ONLY_AFTER_NOISE}": slow,
    }
    return tuple(fact for fact, names in facts.items() if names)


_ONLY_AFTER_NOISE: Final = (
    "no gradient until noise has moved parameters, as two factors have none that both begin at 0; without noise they "
    "may never train"
)


def _gradients(model: nn.Module, losses: Losses, place: slice) -> dict[str, Tensor]:
    """Gradients of the sum of the losses, of the trainable parameters where any entry is a number other than 0."""
    trained = trained_parameters(model)
    with torch.enable_grad(), in_its_precision(model, torch.device("cpu")):
        total = losses(place).sum()
    if not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    dense = {
        name: each.to_dense().nan_to_num(0.0) for name, each in zip(trained, found, strict=True) if each is not None
    }
    return {name: each for name, each in dense.items() if each.any()}


def _after_steps(model: nn.Module, losses: Losses, places: Sequence[slice]) -> list[str]:
    """Trainable parameters that get no gradient from the examples, also after others have moved along theirs."""
    missing = list(trained_parameters(model))
    for place in (*[places[0]] * _STEPS, *places):
        gradients = _gradients(model, losses, place)
        missing = [name for name in missing if name not in gradients]
        if not missing:
            break
        if place == places[0]:
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(gradient / gradient.norm(), alpha=_STEP)
    return missing


def _after_moves(model: nn.Module, losses: Losses, places: Sequence[slice], missing: Collection[str]) -> list[str]:
    """Return which of ``missing`` get no gradient at any place, each at random moves of all that trains."""
    trained = trained_parameters(model)
    start = {name: parameter.clone() for name, parameter in trained.items()} if missing else {}
    left = list(missing)
    for scale in _SCALES:
        for place in places:
            if not left:
                return left
            for name, before in start.items():
                size = before.square().mean().sqrt().clamp(min=_SMALLEST_SIZE)
                trained[name].copy_(before + scale * size * torch.randn_like(before))
            gradients = _gradients(model, losses, place)
            left = [name for name in left if name not in gradients]
    return left


def _require_adapters_train(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    adapters = [name for name in parameters if name in set(_adapters(model, parameters))]
    if adapters and not any(parameters[name].requires_grad for name in adapters):
        trained = listed_layers(list(trained_parameters(model)))
        raise InvalidInput(
            f"its adapters {listed_layers(adapters)} are all frozen, so that only {trained} would train; set "
            "requires_grad_(True) on them, as peft does with is_trainable=True and without inference_mode"
        )


def _adapters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Yield the names of the parameters of adapters: which a layer of peft lists as ``adapter_layer_names``."""
    yield from (name for name in parameters if any(part in name for part in _ADAPTERS))
    tuned = [(path, module) for path, module in model.named_modules() if hasattr(module, "get_base_layer")]
    for path, module in tuned:
        for local in getattr(module, "adapter_layer_names", ()):
            place = f"{path}.{local}" if path else local
            yield from (name for name in parameters if name == place or name.startswith(f"{place}."))


def listed_layers(names: Sequence[str]) -> str:
    """Return the names; those that differ in numbers only, as layers of one kind do, as one with their count."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    shown = [same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in alike.items()]
    more = sum(len(same) for same in list(alike.values())[_SHOWN:])
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
