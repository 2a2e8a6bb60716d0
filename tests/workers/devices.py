"""The device that the tests of training run on: ``pytest tests/workers --device cuda``, the CPU unless told."""

from __future__ import annotations

import os
from typing import Final

import torch

VARIABLE: Final = "DPSWEEP_TEST_DEVICE"
"""Set by ``--device`` before a test is imported, and inherited by the processes that tests start."""

NAME: Final = os.environ.get(VARIABLE, "cpu")
DEVICE: Final = torch.device(NAME)
