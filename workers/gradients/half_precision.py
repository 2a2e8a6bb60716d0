"""Frozen parts of a model in half precision, as the trunk of an adapter may have: they run under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.factors import HALF_PRECISION


def has_half_precision(model: nn.Module) -> bool:
    """Return whether frozen parts are in half precision; trainable parameters are in single or double precision."""
    return any(parameter.dtype in HALF_PRECISION for parameter in model.parameters())


def in_its_precision(model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Within this context the model runs: under autocast where it has frozen parts in half precision, which do not take
    the float32 of what trains; any other model computes as ever."""
    return torch.autocast(device.type, torch.bfloat16) if has_half_precision(model) else nullcontext()


def require_autocast(model: nn.Module, autocast: torch.dtype | None) -> None:
    """Refuse to train beside frozen parts in half precision without autocast.

    Their rounding depends on the batch size, and only of trials under autocast is it known that norms are estimates.
    Trainable parameters in half precision are refused with or without autocast (`checks.check_model`).
    """
    frozen = [each for each in model.parameters() if not each.requires_grad and each.dtype in HALF_PRECISION]
    if autocast is None and frozen:
        dtypes = sorted({str(each.dtype) for each in frozen})
        raise InvalidInput(
            f"its frozen parameters are {', '.join(dtypes)}, which train beside float32 under autocast only; set "
            "execution.autocast: true"
        )
