"""The tests of the engine make models and batches on the device that they are to run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.devices import DEVICE


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    before, rounds = torch.get_default_device(), torch.backends.cudnn.allow_tf32
    torch.set_default_device(None if DEVICE.type == "cpu" else DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # as in a trial: norms are exact to 1e-5 without it
    yield
    torch.backends.cudnn.allow_tf32 = rounds
    torch.set_default_device(None if before.type == "cpu" else before)
