"""Loads weights that were pre-trained on public data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput


def load_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the state dict in a file written by ``torch.save``.

    Raises:
        InvalidInput: there is no such file, or it holds anything but named tensors.
    """
    if not path.is_file():
        raise InvalidInput(f"there is no file {path.absolute()}; give an absolute path to the weights")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InvalidInput(f"cannot read the weights {path}: {error.strerror}; give a file that can be read") from error
    except Exception as error:  # the unpickler raises almost anything for bytes that are no pickle
        raise InvalidInput(f"torch cannot load {path}; save a state dict with torch.save") from error
    if not isinstance(stored, Mapping):
        raise InvalidInput(f"{path} holds a {type(stored).__name__}; save a state dict with torch.save")
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InvalidInput(
                f"{path} holds a {type(value).__name__} under {name!r}, but must hold named tensors alone; "
                "save model.state_dict() with torch.save"
            )
    return stored


def load_pretrained(model: nn.Module, path: str) -> None:
    """Copy the weights in a file into ``model``. If its last layer has another shape, that layer is left unchanged.

    Raises:
        InvalidInput: there is no such file, or a tensor before the last layer is missing or has another shape.
    """
    stored = load_weights(Path(path))
    own = model.state_dict()
    head = list(model.named_modules())[-1][0]
    fitting = {name: stored[name] for name in own if name in stored and stored[name].shape == own[name].shape}
    misfits = [name for name in own if name not in fitting and not name.startswith(f"{head}.")]
    if misfits:
        raise InvalidInput(f"initial_weights {path}: {len(misfits)} tensors do not fit the model, first {misfits[0]!r}")
    model.load_state_dict({**own, **fitting})
