"""Load weights that were pre-trained on public data, and choose the parts that train: adapters, head, biases or all."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.machine.folders import at_home
from dpsweep.workers.machine.stored_tensors import load_tensors


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
        with path.open("rb") as opened:
            stored = load_tensors(opened, or_older=True)
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
    """Copy the weights in a file into ``model``, except for heads that have another shape, or are not there.

    Counts of batches, which torch before 0.4 did not store, may be missing, too.

    heads: names of the modules behind the trunk. Raises: InvalidInput where there is no such file, a tensor of the
    trunk is missing or has another shape, and for weights that are not finite.
    """
    stored = load_weights(at_home(path))
    own = model.state_dict()
    fitting = {name: stored[name] for name in own if name in stored and stored[name].shape == own[name].shape}
    inside = tuple(f"{head}." for head in heads)
    optional = "num_batches_tracked"
    misfits = [name for name in own if name not in fitting and not name.startswith(inside) and optional not in name]
    if misfits:
        raise InvalidInput(
            f"initial_weights {path}: {count_of(len(misfits), 'tensor does', 'tensors do')} not fit the model, first "
            f"{_misfit(misfits[0], own, stored)}"
        )
    own.update(fitting)  # which keeps the versions of its modules
    model.load_state_dict(own)
    require_finite_weights(model, f"the file {path}")


def _misfit(name: str, own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str:
    """Return how a tensor of a model does not fit a file: by its shape, or as the file calls it otherwise."""
    if name in stored:
        there, needed = (" x ".join(map(str, each[name].shape)) or "1" for each in (stored, own))
        return f"{name!r}, which has {there} numbers there and needs {needed}"
    return f"{name!r}; the tensors of the file begin with {next(iter(stored), 'none')!r}"


def require_finite_weights(model: nn.Module, holder: str) -> None:
    """Raises: InvalidInput for weights that are NaN or infinite, by which outputs become so, even if only for examples
    that meet them. Buffers may be infinite, as masks are. holder: of the weights, in the message.
    """
    wrong = [name for name, each in model.named_parameters() if not each.isfinite().all()]
    wrong += [name for name, each in model.named_buffers() if each.isnan().any()]
    if wrong:
        raise InvalidInput(
            f"{holder} has NaN or infinite numbers in {count_of(len(wrong), 'tensor')}, first {wrong[0]}; fetch it "
            "again, or save weights that are finite"
        )


Trainable = Literal["all", "head", "bias"]


@dataclass(frozen=True)
class Adapter:
    """An adapter of the package peft on a frozen trunk.

    targets: ends of the names of layers. None: layers that peft knows for the architecture. r, alpha: rank and scale of
    ``lora`` and ``dora``. None: a rank of 8, and twice the rank as scale.

    Raises: InvalidInput for no targets, and for a rank or scale of ``ia3``, which has neither.
    """

    method: Literal["lora", "dora", "ia3"]
    targets: tuple[str, ...] | None = None
    r: PositiveInt | None = None
    alpha: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.targets == ():
            raise InvalidInput("targets names no layer; name some, or leave it out for those that peft knows")
        unused = [name for name in ("r", "alpha") if getattr(self, name) is not None]
        if self.method == "ia3" and unused:
            raise InvalidInput(f"ia3 has no {unused[0]}; leave it out, or use method lora or dora")

    @property
    def rank(self) -> int:
        return _RANK if self.r is None else self.r


_RANK: Final = 8


def trained_parts(
    network: nn.Module, heads: Iterable[nn.Parameter], trainable: Trainable, adapter: Adapter | None
) -> nn.Module:
    """Return the network with gradients for the parameters that train, and for no others.

    heads: parameters that train beside an adapter or the biases, and alone for ``head``.

    Raises: InvalidInput where both ``trainable`` and an adapter are given, where peft is absent, for targets that match
    no layer, for a rank above that of a layer, and for biases of a network without any.
    """
    if adapter is not None and trainable != "all":
        raise InvalidInput(f"trainable: {trainable} and an adapter both say what is trained; leave one out")
    if adapter is not None:
        return _adapted(network, adapter, frozenset(heads))
    heads = frozenset(heads)
    if trainable != "all":
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(trainable == "bias" and name.endswith("bias"))
        trunk = [parameter for parameter in network.parameters() if parameter not in heads]
        if trainable == "bias" and not any(parameter.requires_grad for parameter in trunk):
            raise InvalidInput("trainable: bias finds no bias before the head; add an adapter, or set trainable: all")
    for parameter in heads:
        parameter.requires_grad_(True)
    return network


def _adapted(trunk: nn.Module, adapter: Adapter, heads: Set[nn.Parameter]) -> nn.Module:
    """Return the trunk, frozen, with an adapter and heads that train, which its ``save_pretrained`` writes together."""
    peft = require_package("peft", "an adapter")
    own = [
        name for name, part in trunk.named_modules() if name and not heads.isdisjoint(part.parameters(recurse=False))
    ]
    targets = None if adapter.targets is None else list(adapter.targets)
    named: dict[str, Any] = {"target_modules": targets, "modules_to_save": own or None}
    scale = {"r": adapter.rank, "lora_alpha": 2.0 * adapter.rank if adapter.alpha is None else adapter.alpha}
    makers: Mapping[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**named, **scale),
        "dora": lambda: peft.LoraConfig(**named, **scale, use_dora=True),
        "ia3": lambda: peft.IA3Config(**named, feedforward_modules=[]),
    }
    _require_targets(trunk, adapter)
    if adapter.method != "ia3":
        _require_rank(trunk, adapter, peft)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old names, and of transposed layers that peft sees by itself
            found: nn.Module = peft.get_peft_model(trunk, makers[adapter.method]())
    except ValueError as error:
        raise InvalidInput(
            f"{_why_not_adapted(trunk, adapter)}; its layers end in: {', '.join(_layer_names(trunk))}"
        ) from error
    inside = tuple(f"base_model.model.{name}." for name in own)
    for name, parameter in found.named_parameters():
        if ".modules_to_save." in name:  # of every module whose name ends as that of a head
            parameter.requires_grad_(name.startswith(inside))
    return found


def _why_not_adapted(trunk: nn.Module, adapter: Adapter) -> str:
    """Return why peft refused the targets of an adapter, or had none for the architecture."""
    if adapter.targets is None:
        return "peft knows no targets for this architecture; name adapter.targets"
    named = f"adapter targets {', '.join(adapter.targets)} match"
    kinds = {type(part).__name__ for name, part in trunk.named_modules() if _ends_in(name, adapter.targets)}
    return f"{named} layers of the classes {', '.join(sorted(kinds))}, not all of which {adapter.method} can adapt"


def _require_targets(trunk: nn.Module, adapter: Adapter) -> None:
    """Raises: InvalidInput for targets that match no layer; peft would pass over them beside others that do."""
    names = [name for name, _ in trunk.named_modules()]
    unknown = [each for each in adapter.targets or () if not any(_ends_in(name, (each,)) for name in names)]
    if unknown:
        raise InvalidInput(
            f"adapter targets {', '.join(unknown)} match no layer of the model; its layers end in: "
            f"{', '.join(_layer_names(trunk))}"
        )


def _require_rank(trunk: nn.Module, adapter: Adapter, peft: Any) -> None:
    """Raises: InvalidInput for a rank above that of a layer it adapts, before such an adapter takes its memory."""
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    kind = getattr(getattr(trunk, "config", None), "model_type", None)
    ends = adapter.targets or known.get(kind, ())
    for name, part in trunk.named_modules():
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or not _ends_in(name, ends):
            continue
        sides = len(weight), weight[0].numel()
        if adapter.rank > min(sides):
            raise InvalidInput(
                f"adapter.r is {adapter.rank}, but layer {name} is a matrix of {sides[0]} x {sides[1]}; set r to at "
                f"most {min(sides)}"
            )


def _ends_in(name: str, ends: str | Collection[str]) -> bool:
    """Return whether peft adapts the layer ``name``. ends: of names, or a pattern of whole names."""
    if isinstance(ends, str):
        return re.fullmatch(ends, name) is not None
    return any(f".{name}".endswith(f".{end}") for end in ends)


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
