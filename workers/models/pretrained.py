"""Loads weights that were pre-trained on public data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models.adapters import require_package


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
