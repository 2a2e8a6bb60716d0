"""Parts of a pretrained model that train: adapters of the package peft, or its head, its biases or all of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt
from torch import nn

from dpsweep.accounting.errors import InvalidInput

Trainable = Literal["all", "head", "bias"]


@dataclass(frozen=True)
class Adapter:
    """An adapter of the package peft on a frozen trunk. targets: the layers that it adapts, by the end of their names.

    r, alpha: rank and scale of ``lora`` and ``dora``; alpha None: twice the rank.
    """

    method: Literal["lora", "dora", "ia3"]
    targets: tuple[str, ...]
    r: PositiveInt = 8
    alpha: PositiveFloat | None = None


def adapted(trunk: nn.Module, adapter: Adapter, task_type: str | None) -> nn.Module:
    """Return the trunk, frozen, with an adapter that trains. task_type: peft's name for the task of the trunk's class.

    Raises: InvalidInput where peft is absent, and for targets that match no layer.
    """
    peft = require_package("peft", "an adapter")
    named: dict[str, Any] = {"task_type": task_type, "target_modules": list(adapter.targets)}
    scale = {"r": adapter.r, "lora_alpha": 2.0 * adapter.r if adapter.alpha is None else adapter.alpha}
    makers: Mapping[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**named, **scale),
        "dora": lambda: peft.LoraConfig(**named, **scale, use_dora=True),
        "ia3": lambda: peft.IA3Config(**named, feedforward_modules=[]),
    }
    try:
        found: nn.Module = peft.get_peft_model(trunk, makers[adapter.method]())
    except ValueError as error:
        layers = sorted(
            {
                name.rpartition(".")[2]
                for name, part in trunk.named_modules()
                if isinstance(part, (nn.Linear, nn.Conv2d))
            }
        )
        raise InvalidInput(
            f"adapter targets {', '.join(adapter.targets)} match no layer of the model; its layers end in: "
            f"{', '.join(layers)}"
        ) from error
    return found


def require_package(name: str, reader: str) -> Any:
    """Import a package of the extra ``models``. reader: what needs it. Raises: InvalidInput where it is absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidInput(f"{reader} needs the package {name}: pip install 'dpsweep[models]'") from error
