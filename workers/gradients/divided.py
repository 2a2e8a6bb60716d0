"""Frozen parameters that ranks have divided among them (`dpsweep.workers.trials.divided_trunk`).

The module that divides them takes a second to import, and is not imported here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_divided(value: object) -> bool:
    """Return whether a parameter is a DTensor: this process has a part of it."""
    return hasattr(value, "to_local")


def own_part(parameter: nn.Parameter) -> Tensor:
    """Return the values of a parameter that this process has: all, unless it is divided."""
    whole: Any = parameter.detach()
    part: Tensor = whole.to_local() if is_divided(whole) else whole
    return part
