"""Load weights that were pre-trained on public data, and choose the parts that train: adapters, head, biases or all."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput


def load_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the state dict in a file written by ``torch.save``, or in a file ``*.safetensors``.

    Raises:
        InvalidInput: there is no such file, or it holds anything but named tensors.
    """
    if not path.is_file():
        raise InvalidInput(f"there is no file {path.absolute()}; give an absolute path to the weights")
    try:
        if path.suffix == ".safetensors":
            return dict(require_package("safetensors.torch", f"the file {path}").load_file(path))
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InvalidInput(f"cannot read the weights {path}: {error.strerror}; give a file that can be read") from error
    except InvalidInput:
        raise
    except Exception as error:  # the readers raise almost anything for bytes that they did not write
        raise InvalidInput(
            f"{path} cannot be loaded; save a state dict with torch.save or safetensors.torch.save_file"
        ) from error
    if not isinstance(stored, Mapping):
        raise InvalidInput(f"{path} holds a {type(stored).__name__}; save a state dict with torch.save")
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InvalidInput(
                f"{path} holds a {type(value).__name__} under {name!r}, but must hold named tensors alone; "
                "save model.state_dict() with torch.save"
            )
    return stored


def load_pretrained(model: nn.Module, path: str, heads: Collection[str]) -> None:
    """Copy the weights in a file into ``model``, but for those of heads that have another shape, or are not there.

    heads: names of the modules behind the trunk. Raises: InvalidInput where there is no such file, or a tensor of the
    trunk is missing or has another shape.
    """
    stored = load_weights(Path(path).expanduser())
    own = model.state_dict()
    fitting = {name: stored[name] for name in own if name in stored and stored[name].shape == own[name].shape}
    inside = tuple(f"{head}." for head in heads)
    misfits = [name for name in own if name not in fitting and not name.startswith(inside)]
    if misfits:
        raise InvalidInput(f"initial_weights {path}: {len(misfits)} tensors do not fit the model, first {misfits[0]!r}")
    model.load_state_dict({**own, **fitting})


Trainable = Literal["all", "head", "bias"]


@dataclass(frozen=True)
class Adapter:
    """An adapter of the package peft on a frozen trunk.

    targets: ends of the names of layers. By default, layers that peft knows for the architecture.
    r, alpha: rank and scale of ``lora`` and ``dora``. alpha None: twice the rank.
    """

    method: Literal["lora", "dora", "ia3"]
    targets: tuple[str, ...] = ()
    r: PositiveInt = 8
    alpha: PositiveFloat | None = None


def trained_parts(
    network: nn.Module, heads: Iterable[nn.Parameter], trainable: Trainable, adapter: Adapter | None
) -> nn.Module:
    """Return the network with gradients for the parameters that train, and for no others.

    heads: parameters that train beside an adapter or the biases, and alone for ``head``.

    Raises: InvalidInput where both ``trainable`` and an adapter are given, where peft is absent, and for targets that
    match no layer.
    """
    if adapter is not None and trainable != "all":
        raise InvalidInput(f"trainable: {trainable} and an adapter both say what is trained; leave one out")
    if adapter is not None:
        network = _adapted(network, adapter)
    elif trainable != "all":
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(trainable == "bias" and name.endswith("bias"))
    for parameter in heads:
        parameter.requires_grad_(True)
    return network


def _adapted(trunk: nn.Module, adapter: Adapter) -> nn.Module:
    """Return the trunk, frozen, with an adapter that trains."""
    peft = require_package("peft", "an adapter")
    named: dict[str, Any] = {"target_modules": list(adapter.targets) or None}
    scale = {"r": adapter.r, "lora_alpha": 2.0 * adapter.r if adapter.alpha is None else adapter.alpha}
    makers: Mapping[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**named, **scale),
        "dora": lambda: peft.LoraConfig(**named, **scale, use_dora=True),
        "ia3": lambda: peft.IA3Config(**named, feedforward_modules=[]),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old names, and of transposed layers that peft sees by itself
            found: nn.Module = peft.get_peft_model(trunk, makers[adapter.method]())
    except ValueError as error:
        given = f"adapter targets {', '.join(adapter.targets)} match no layer of the model"
        unknown = "peft knows no targets for this architecture; name adapter.targets"
        raise InvalidInput(
            f"{given if adapter.targets else unknown}; its layers end in: {', '.join(_layer_names(trunk))}"
        ) from error
    return found


def _layer_names(trunk: nn.Module) -> list[str]:
    """Return the ends of names of layers with a matrix."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, part in trunk.named_modules()
            if any(each.dim() > 1 for each in part.parameters(recurse=False)) and not any(part.children())
        }
    )


def require_package(name: str, reader: str) -> Any:
    """Import a package of the extra ``models``. reader: what needs it. Raises: InvalidInput where it is absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidInput(f"{reader} needs the package {name}: pip install 'dpsweep[models]'") from error
