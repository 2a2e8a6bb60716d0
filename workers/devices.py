"""Devices that trials run on, by their names in torch."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from accounting.errors import InvalidInput


def choose_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the GPU if there is one, else the CPU.

    Raises: InvalidInput when the name is unknown or this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, found = known_device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise InvalidInput(
            f"device is {name!r}, but torch finds {found} CUDA devices here; use auto or cpu, or give trials a GPU"
        )
    return device


def sent(values: Tensor, device: torch.device) -> Tensor:
    """``values`` [...] from the CPU, copied to the device; for a GPU the host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def known_device(name: str) -> torch.device:
    """The device by its torch name, whether or not this machine has it. Raises: InvalidInput for another name."""
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise InvalidInput(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")


def room_for_data(device: torch.device) -> float:
    """Bytes of data that a trial may keep on a device.

    On a GPU, half of its free memory; models and gradients need the rest. On the CPU, any number, because the data are
    in its memory already.
    """
    return math.inf if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] / 2
